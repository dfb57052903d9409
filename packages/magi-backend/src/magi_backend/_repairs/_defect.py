# SPDX-License-Identifier: Apache-2.0
"""What is known of one defect of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


def _always() -> bool:
    return True


@dataclass(frozen=True)
class Defect:
    """One defect and its repair.

    A repair is active for the releases that have the defect. A graph that the defect does not touch compiles to what
    it was, and the report names the repair only where torch's own way would have failed, given another result or
    written slower code.

    Attributes:
        name: The name of the file, of the repair in reports, and of its scope.
        effect: What a user sees without the repair.
        severity: Whether the compiled code is wrong, or there is none, or it is in more graphs or slower than need be.
        since: First release known to have it.
        fixed: First release known not to have it; None while every release since has it.
        repair: What the repair does, for the report.
        patch: Puts the repair in the place of torch's functions, where it does nothing outside its scope.
        is_torch_concerned: Asked when a compilation starts: whether torch's own way, as it is configured by the user,
            meets the defect. Otherwise only what this backend turns on needs the repair, and the report is silent.
        is_of_joint_graphs: Whether it is met in the passes over the graph of forward and backward together too.
        is_in_capture: Whether the repair is one of Dynamo's capture rather than of the compilation. Such a one says by
            `note_in_capture` that it mattered.
    """

    name: str
    effect: str
    severity: Literal["wrong code", "no code", "more graphs", "slower code"]
    since: tuple[int, ...]
    fixed: tuple[int, ...] | None
    repair: str
    patch: Callable[[], None]
    is_torch_concerned: Callable[[], bool] = _always
    is_of_joint_graphs: bool = False
    is_in_capture: bool = False

    def concerns(self, release: tuple[int, ...]) -> bool:
        """Whether the torch *release*, for example ``(2, 13, 0)``, has the defect."""
        return self.since <= release and (self.fixed is None or release < self.fixed)
