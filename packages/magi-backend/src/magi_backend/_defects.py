# SPDX-License-Identifier: Apache-2.0
"""Known defects of torch's compiler, each with the smallest guard against it.

A guard is active for the releases that have the defect and for nothing else. Where the defect is one wrong line, the
guard is that line repaired (``_torch_compat.py``), for compilations of this backend only; a graph that the defect does
not touch compiles to what it was. The report names a guard when it changed something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Defect:
    """One defect and its guard.

    Attributes:
        name: The name of the repair in ``_torch_compat.REPAIRS``.
        effect: What a user sees without the guard.
        severity: Whether the compiled code is wrong, or there is none.
        since: First release known to have it.
        fixed: First release known not to have it; None while every release since has it.
        guard: What the guard does, for the report.
    """

    name: str
    effect: str
    severity: Literal["wrong code", "no code"]
    since: tuple[int, ...]
    fixed: tuple[int, ...] | None
    guard: str

    def concerns(self, release: tuple[int, ...]) -> bool:
        """Whether the torch *release*, for example ``(2, 13, 0)``, has the defect."""
        return self.since <= release and (self.fixed is None or release < self.fixed)


DEFECTS: tuple[Defect, ...] = (
    Defect(
        name="keep_mutation_order",
        effect="on a CPU, gradients through upsampling and other scatter-adds are silently zero",
        severity="wrong code",
        since=(2, 13, 0),
        fixed=(2, 14, 0),
        guard="a kernel that reads a mutated buffer waits for the mutation",
    ),
    Defect(
        name="order_symbolic_strides",
        effect="attention in a training graph with dynamic sizes does not compile: "
        "'cannot determine truth value of Relational'",
        severity="no code",
        since=(2, 10, 0),
        fixed=(2, 14, 1),
        guard="symbolic strides are compared by what is known of the sizes",
    ),
    Defect(
        name="realize_readers_first",
        effect="what was computed from a buffer before a custom operator writes to it is computed from the new value",
        severity="wrong code",
        since=(2, 10, 0),
        fixed=None,
        guard="the old value is read before the write",
    ),
    Defect(
        name="exact_epilogues",
        effect="pointwise work fused into a user's Triton kernel starts from a value that was not rounded to the "
        "tensor's dtype, does not compile on 16-bit values, and overwrites variables of the kernel named tmp0",
        severity="wrong code",
        since=(2, 12, 0),
        fixed=None,
        guard="the value is cast as the store casts it, and the names are new",
    ),
)


def active_defects(release: tuple[int, ...]) -> tuple[Defect, ...]:
    """The defects that the torch *release* has."""
    return tuple(defect for defect in DEFECTS if defect.concerns(release))
