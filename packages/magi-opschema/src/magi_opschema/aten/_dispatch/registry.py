# SPDX-License-Identifier: Apache-2.0
"""The kernels of each base, and the slot that users prefer by `use_slot`, `pin` or `MAGI_SLOT_<base>`."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from magi_opschema._text import show_value
from magi_opschema.aten._generate.metadata import ATEN_SLOT
from magi_opschema.aten._generate.names import nearest
from magi_opschema.aten._torch_compat import has_operator
from magi_opschema.aten.errors import SlotError

from .cells import loaded_cells


if TYPE_CHECKING:
    from .cells import Cell
    from .kernels import Kernel


PREFIX = "MAGI_SLOT_"


class BaseState:
    """The kernels of one base, and what users prefer."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.pinned: int | None = None
        self.from_environment: int | None = None
        self.environment_read = False
        self.used: list[tuple[object, int]] = []
        """The open `use_slot` contexts of all threads, the latest last."""


lock = threading.RLock()
"""Held while a base's kernels or preferences change."""

_states: dict[str, BaseState] = {}
_thread = threading.local()


def state_of(cell: Cell) -> BaseState:
    """The state of a base, which is empty at first."""
    return _states.setdefault(cell.base, BaseState())


def kernels_of(cell: Cell) -> list[Kernel]:
    """The kernels of a base, the lowest slot first."""
    state = _states.get(cell.base)
    return state.kernels if state is not None else []


def used_in_this_thread(base: str) -> list[tuple[object, int]]:
    """The open `use_slot` contexts of this thread for *base*, the latest last."""
    stack: list[tuple[object, int]] = _thread.__dict__.setdefault(base, [])
    return stack


def chosen_here(cell: Cell) -> int | None:
    """The slot that this thread's eager calls prefer."""
    stack = _thread.__dict__.get(cell.base)
    if stack:
        return int(stack[-1][1])
    return chosen_for_all(state_of(cell))


def chosen_in_graph(cell: Cell, chosen: int | None) -> int | None:
    """The slot that a library operator prefers: *chosen*, otherwise that of the environment.

    Every other choice has an operator of its own. The environment may not have been read when the graph was made.

    Raises:
        SlotError: The value in the environment is not the number of an active slot.
    """
    read_environment(cell)
    return chosen if chosen is not None else state_of(cell).from_environment


def read_environment(cell: Cell) -> None:
    """Read `MAGI_SLOT_<base>`, once.

    Raises:
        SlotError: Its value is not the number of an active slot.
    """
    state = state_of(cell)
    if state.environment_read:
        return
    check_environment()
    variable = f"{PREFIX}{cell.base}"
    text = os.environ.get(variable)
    with lock:
        if text is not None:
            check_active(int(text), cell, source=variable)
            state.from_environment = int(text)
        state.environment_read = True


def check_environment(*, is_complete: bool = False) -> None:
    """Raise for a variable `MAGI_SLOT_<base>` with an unknown base, or whose value is not the number of a slot.

    Args:
        is_complete: Whether no other surface will be loaded; otherwise a base of ATen may be on another surface.

    Raises:
        SlotError: There is such a variable.
    """
    for variable, text in os.environ.items():
        if not variable.startswith(PREFIX):
            continue
        base = variable.removeprefix(PREFIX)
        known = loaded_cells()
        if base not in known and (is_complete or not has_operator(base)):
            hint = nearest(base, known).replace("'", f"'{PREFIX}", 1)
            msg = f"{variable} names no operator of the ATen surface{hint}; write {PREFIX}<base>, as MAGI_SLOT_softmax"
            raise SlotError(msg)
        if not (text.isascii() and text.isdecimal()):
            msg = f"{variable}={text!r} is not a slot; give a number from 0 to {ATEN_SLOT}"
            raise SlotError(msg)
        check_number(int(text), base, source=variable)


def chosen_for_all(state: BaseState) -> int | None:
    """The slot that calls prefer if no `use_slot` is open."""
    return state.pinned if state.pinned is not None else state.from_environment


def check_number(slot: object, base: str, *, lowest_only: bool = False, source: str = "") -> None:
    """Raise a `SlotError` if *slot* is not the number of a slot; it names *source*, where the number is from."""
    highest = ATEN_SLOT - 1 if lowest_only else ATEN_SLOT
    if not isinstance(slot, int) or isinstance(slot, bool) or not 0 <= slot <= highest:
        what = f"{source}={slot}" if source else f"slot {show_value(slot)} of aten::{base}"
        aten = f"; {ATEN_SLOT} is ATen itself" if lowest_only else ""
        msg = f"{what}: slots are numbered 0 to {highest}{aten}"
        raise SlotError(msg)


def check_active(slot: int, cell: Cell, source: str = "") -> None:
    """Raise a `SlotError` if *slot* has no kernel."""
    active = sorted({kernel.slot for kernel in kernels_of(cell)} | {ATEN_SLOT})
    if slot not in active:
        what = f"{source}={slot}: " if source else ""
        msg = f"{what}slot {slot} of aten::{cell.base} has no kernel; active are {', '.join(map(str, active))}"
        raise SlotError(msg)
