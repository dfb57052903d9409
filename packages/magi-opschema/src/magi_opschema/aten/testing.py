# SPDX-License-Identifier: Apache-2.0
"""Test operators of the ATen surface, and kernels in their slots, against ATen.

Each base runs in a forked process of its own: a kernel that crashes or hangs is a failed row. Inputs come from recipes,
then torch's test database, then the calls seen while that ran, then the schema; layouts, dtypes, edge shapes and the
contract of `out=` are tried on all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._harness._rows import Report as Report
from ._harness._rows import Row as Row


if TYPE_CHECKING:
    from collections.abc import Iterable


def check(
    tasks: Iterable[tuple[str, int]], *, jobs: int | None = None, device: str | None = None
) -> dict[tuple[str, int], Report]:
    """Check bases in slots.

    Args:
        tasks: Pairs of an operator and a slot; 8 checks that the surface is ATen bit for bit.
        jobs: How many processes work at a time; as many as there are processors without it.
        device: Where the inputs are, for example `"cuda"`. Without it, the CPU where one of the slot's kernels serves
            it, else one of their devices.

    Returns:
        A report for each pair: `.rows`, `.failures`, `.summary()`.

    Raises:
        UnknownOpError: The surface has no such operator.
        SlotError: The slot has no kernel.
        MissingExtraError: numpy or expecttest is missing, which torch's test database needs.

    Example:
        >>> check([("relu", 8)])["relu", 8].failures
        []
    """
    from ._harness._run import run
    from ._slots import active_cell

    asked = {(active_cell(base, slot).base, slot): (base, slot) for base, slot in tasks}
    return {asked[task]: report for task, report in run(asked, jobs=jobs, device=device)}


__all__ = ["Report", "Row", "check"]
