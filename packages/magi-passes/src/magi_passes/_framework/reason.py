# SPDX-License-Identifier: Apache-2.0
"""Whether a pass applies to a graph, and the sentence that says why."""

from __future__ import annotations

from dataclasses import dataclass

from .arguments import check_types


@dataclass(frozen=True)
class Reason:
    """The answer of `MagiInductorPass.is_applicable`.

    Truthy exactly when the pass applies, so ``if reason:`` reads as it should.

    Example:
        >>> reason = Reason(False, "no placeholder carries a free symbol")
        >>> bool(reason)
        False
        >>> print(reason)
        no placeholder carries a free symbol

    Attributes:
        applies: Whether the pass is to run.
        text: One short sentence for the record, without a full stop.
    """

    applies: bool
    text: str

    def __post_init__(self) -> None:
        """Raise for an *applies* that is not a bool, whose truth the record would not show.

        Raises:
            PassArgumentTypeError: *applies* is not a bool, or *text* is not a str.
        """
        check_types(self)

    def __bool__(self) -> bool:
        return self.applies

    def __str__(self) -> str:
        return self.text
