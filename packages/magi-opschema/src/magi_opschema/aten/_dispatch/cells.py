# SPDX-License-Identifier: Apache-2.0
"""Where the calls of a base go: one mutable cell for each base, which generated functions read and slots change.

A cell has two namespaces of callables, one attribute per overload. `traced` is read under Dynamo and holds `OpOverload`
objects, which it inlines; it guards on them, so that a changed slot recompiles. `eager` holds the dispatcher's own
callables (`OpOverload._op`), which saves the Python frame of `OpOverload.__call__`, a fifth of a small call.

A cell also holds the kernels of its base, and the slot that users prefer by `use_slot`, `pin` or `MAGI_SLOT_<base>`.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from magi_opschema._text import show_value
from magi_opschema.aten._generate.schema import ATEN_SLOT, nearest, python_name
from magi_opschema.aten._torch_compat import OpOverload, dispatcher_callable, find_overload
from magi_opschema.aten.errors import SlotError, SurfaceError, UnknownOpError


if TYPE_CHECKING:
    from .kernels import Kernel


_PREFIX = "MAGI_SLOT_"


class Namespace:
    """Callables by overload: `namespace.Tensor`, `namespace.out`. Read faster than a `SimpleNamespace`."""

    def __init__(self, callables: dict[str, Any]) -> None:
        self.__dict__.update(callables)


@dataclass(frozen=True)
class Pair:
    """The two overloads of a variant, by name (`default` for the unnamed one); one may be missing."""

    functional: str | None
    out: str | None

    @property
    def leading(self) -> str:
        """The overload that names the variant."""
        return str(self.functional or self.out)


class Cell:
    """One base.

    Attributes:
        base: Its ATen name.
        pairs: Its variants.
        overloads: ATen's overloads, by name.
        aten_traced: The namespace of ATen's overloads.
        aten_eager: The namespace of the dispatcher's callables for them.
        traced: What generated functions call under Dynamo.
        eager: What they call otherwise.
        kernels: The kernels, the lowest slot first.
        pinned: The slot that `pin` prefers.
        from_environment: The slot that `MAGI_SLOT_<base>` prefers, after it was read.
        environment_read: Whether it was read.
        used: The open `use_slot` contexts, the latest last: a token, the slot and the thread of each.
    """

    def __init__(self, base: str, pairs: tuple[Pair, ...]) -> None:
        self.base = base
        self.pairs = pairs
        self.overloads = {name: _overload(base, name) for pair in pairs for name in (pair.functional, pair.out) if name}
        callables = {python_name(name): overload for name, overload in self.overloads.items()}
        self.aten_traced = Namespace(callables)
        self.aten_eager = Namespace({name: dispatcher_callable(op) for name, op in callables.items()})
        self.traced = self.aten_traced
        self.eager: Any = self.aten_eager
        self.kernels: tuple[Kernel, ...] = ()
        self.pinned: int | None = None
        self.from_environment: int | None = None
        self.environment_read = False
        self.used: list[tuple[object, int, threading.Thread]] = []

    @property
    def chosen_for_all(self) -> int | None:
        """The slot that calls prefer if no `use_slot` is open."""
        return self.pinned if self.pinned is not None else self.from_environment

    def chosen_here(self) -> int | None:
        """The slot that this thread's eager calls prefer."""
        if self.used:
            here = threading.current_thread()
            for _, slot, thread in reversed(self.used):
                if thread is here:
                    return slot
        return self.chosen_for_all

    def serving(self, pair: Pair, *, differentiable: bool = False) -> tuple[Kernel, ...]:
        """The kernels of a variant, the lowest slot first; with *differentiable*, those that have a backward."""
        found = (kernel for kernel in self.kernels if pair.leading in kernel.serves)
        return tuple(kernel for kernel in found if not differentiable or kernel.backward is not None)

    def check_active(self, slot: int, source: str = "") -> None:
        """Raise a `SlotError` if *slot* has no kernel."""
        active = sorted({kernel.slot for kernel in self.kernels} | {ATEN_SLOT})
        if slot not in active:
            what = f"{source}={slot}: " if source else ""
            msg = f"{what}slot {slot} of aten::{self.base} has no kernel; active are {', '.join(map(str, active))}"
            raise SlotError(msg)

    def read_environment(self) -> None:
        """Read `MAGI_SLOT_<base>`, once."""
        if self.environment_read:
            return
        check_environment()
        variable = f"{_PREFIX}{self.base}"
        text = os.environ.get(variable)
        with lock:
            if text is not None:
                self.check_active(int(text), source=variable)
                self.from_environment = int(text)
            self.environment_read = True


cells: dict[str, Cell] = {}
"""The cell of every loaded base; loaded surfaces share them, and so their slots."""

lock = threading.RLock()
"""Held while a base's kernels or preferences change."""


def cell_of(base: str) -> Cell:
    """The cell of a loaded base."""
    if base not in cells:
        msg = f"no operator {base!r} in the loaded ATen surface{nearest(base, cells)}"
        raise UnknownOpError(msg)
    return cells[base]


def check_environment(*, is_complete: bool = False) -> None:
    """Raise a `SlotError` for a variable `MAGI_SLOT_<base>` with an unknown base, or a value that is not a slot.

    With *is_complete*, no other surface will be loaded; otherwise a base of ATen may be on another surface.
    """
    for variable, text in os.environ.items():
        if not variable.startswith(_PREFIX):
            continue
        base = variable.removeprefix(_PREFIX)
        if base not in cells and (is_complete or not hasattr(torch.ops.aten, base)):
            hint = nearest(base, cells).replace("'", f"'{_PREFIX}", 1)
            msg = f"{variable} names no operator of the ATen surface{hint}; write {_PREFIX}<base>, as MAGI_SLOT_softmax"
            raise SlotError(msg)
        if not (text.isascii() and text.isdecimal()):
            msg = f"{variable}={text!r} is not a slot; give a number from 0 to {ATEN_SLOT}"
            raise SlotError(msg)
        check_number(int(text), base, source=variable)


def check_number(slot: object, base: str, *, lowest_only: bool = False, source: str = "") -> None:
    """Raise a `SlotError` if *slot* is not the number of a slot; it names *source*, where the number is from."""
    highest = ATEN_SLOT - 1 if lowest_only else ATEN_SLOT
    if not isinstance(slot, int) or isinstance(slot, bool) or not 0 <= slot <= highest:
        what = f"{source}={slot}" if source else f"slot {show_value(slot)} of aten::{base}"
        aten = f"; {ATEN_SLOT} is ATen itself" if lowest_only else ""
        msg = f"{what}: slots are numbered 0 to {highest}{aten}"
        raise SlotError(msg)


def _overload(base: str, name: str) -> OpOverload:
    overload = find_overload(base, name)
    if overload is None:
        dotted = base if name == "default" else f"{base}.{name}"
        msg = (
            f"torch {torch.__version__} has no aten::{dotted}; generate the surface again with `magi-opschema aten gen`"
        )
        raise SurfaceError(msg)
    return overload
