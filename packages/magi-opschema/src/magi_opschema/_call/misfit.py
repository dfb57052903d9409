# SPDX-License-Identifier: Apache-2.0
"""Errors about calls that do not fit the signature; Python's own error would name only the function.

The function that the decorator returns accepts any call, and detects the misfit itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.show import show_signature
from magi_opschema._text import nearest
from magi_opschema._torch_compat import is_dynamo_compiling
from magi_opschema.errors import ArgumentError


NOT_GIVEN = inspect.Parameter.empty
"""What a parameter of generated code holds if the caller gave no argument."""


@dataclass(frozen=True)
class CallForm:
    """The parameters that a call must fit."""

    lowering: SignatureLowering
    by_position: tuple[str, ...]
    by_name: tuple[str, ...]
    """Parameters that are given by name only."""
    required: frozenset[str]
    is_flat: bool

    @staticmethod
    def of_signature(lowering: SignatureLowering) -> CallForm:
        """The form of a call with the user's arguments."""
        return CallForm._of(lowering, lowering.parameters, is_flat=False)

    @staticmethod
    def of_schema(lowering: SignatureLowering) -> CallForm:
        """The form of a call with flat arguments."""
        return CallForm._of(lowering, lowering.arguments, is_flat=True)

    @staticmethod
    def _of(lowering: SignatureLowering, known: Sequence[Any], *, is_flat: bool) -> CallForm:
        return CallForm(
            lowering,
            tuple(one.name for one in known if not one.is_keyword_only),
            tuple(one.name for one in known if one.is_keyword_only),
            frozenset(one.name for one in known if not one.has_default),
            is_flat,
        )

    def check(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Raise if a call with *args* and *kwargs* does not fit.

        Raises:
            ArgumentError: the call does not fit.
        """
        filled = self.by_position[: len(args)]
        names = self.by_position + self.by_name
        unused = [name for name in kwargs if name in filled or name not in names]
        missing = [name for name in names if name in self.required and name not in {*filled, *kwargs}]
        if unused or missing or len(args) > len(filled):
            self._refuse(missing, len(args) - len(filled), unused)

    def refuse(self, values: Sequence[object], extra: Sequence[object], unused: Mapping[str, object]) -> NoReturn:
        """Raise for a call. *values* has an entry for each parameter; *extra* and *unused* belong to none."""
        names = self.by_position + self.by_name
        missing = [name for name, value in zip(names, values, strict=True) if value is NOT_GIVEN]
        self._refuse(missing, len(extra), list(unused))

    def _refuse(self, missing: Sequence[str], extra: int, unused: Sequence[str]) -> NoReturn:
        names = self.by_position + self.by_name
        if unused and unused[0] in names:
            text = f"the call gives '{unused[0]}' twice, by position and by name."
        elif unused:
            # Dynamo traces this, and cannot trace the search for a name.
            hint = "" if is_dynamo_compiling() else nearest(unused[0], names)
            text = f"the call names '{unused[0]}', which is not a parameter.{hint}"
        elif extra:
            count = len(self.by_position)
            text = f"the call gives {count + extra} arguments by position, expected at most {count}."
        else:
            text = f"the call lacks {', '.join(repr(name) for name in missing)}."
        raise ArgumentError(self.lowering.sentence(f"{text} {self._shown()}"))

    def _shown(self) -> str:
        if self.is_flat:
            return f"The schema is {self.lowering.schema}."
        return f"The signature is {show_signature(self.lowering.name, self.lowering.signature)}."


def refusal_of_calls(lowering: SignatureLowering) -> Callable[..., NoReturn]:
    """The function that the exposed function calls if its call does not fit the signature."""

    def refuse(values: Sequence[object], extra: Sequence[object], unused: Mapping[str, object]) -> NoReturn:
        CallForm.of_signature(lowering).refuse(values, extra, unused)

    return refuse
