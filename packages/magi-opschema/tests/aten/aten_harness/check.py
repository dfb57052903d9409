# SPDX-License-Identifier: Apache-2.0
"""Test operators of the ATen surface, and kernels in their slots, against ATen.

Each base runs in a separate forked process, so a kernel that crashes or hangs is a failed row. Inputs come from
recipes, then torch's test database, then the calls seen while that ran, then the schema. Layouts, dtypes, edge shapes
and the contract of `out=` are checked with all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from magi_opschema._text import show_value
from magi_opschema.aten._dispatch.cells import check_number
from magi_opschema.aten._dispatch.slots import _cell
from magi_opschema.aten.errors import SlotError

from .rows import Report
from .run import run


def check(
    tasks: Iterable[tuple[str, int]], *, jobs: int | None = None, device: str | None = None
) -> dict[tuple[str, int], Report]:
    """Check bases in slots.

    Args:
        tasks: Pairs of an operator and a slot; slot 8 checks that the surface equals ATen bit for bit.
        jobs: How many processes work at a time; by default, as many as there are processors.
        device: The device of the inputs, for example `"cuda"`. By default, the CPU if one of the slot's kernels serves
            it, otherwise one of their devices.

    Returns:
        A report for each pair: `.rows`, `.failures`, `.summary()`.

    Raises:
        UnknownOpError: The surface has no such operator.
        SlotError: The slot has no kernel, or *tasks* or *device* has another form.
        MissingExtraError: numpy or expecttest is missing, which torch's test database needs.

    Example:
        >>> check([("relu", 8)])["relu", 8].failures
        []
    """
    tasks = _checked(tasks, device)
    for base, slot in tasks:
        check_number(slot, _cell(base).base)
        _cell(base).check_active(slot)
    asked = {(_cell(base).base, slot): (base, slot) for base, slot in tasks}
    return {asked[task]: report for task, report in run(asked, jobs=jobs, device=device)}


def _checked(tasks: object, device: Any) -> list[Any]:
    pairs = list(tasks) if isinstance(tasks, Iterable) else [None]
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        msg = f"tasks={show_value(tasks)} must be pairs of an operator and a slot, [('softmax', 8)]"
        raise SlotError(msg)
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError):
        msg = f"device={show_value(device)} is not a device of torch; give 'cpu' or 'cuda'"
        raise SlotError(msg) from None
    return pairs
