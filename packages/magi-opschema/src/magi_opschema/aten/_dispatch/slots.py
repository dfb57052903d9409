# SPDX-License-Identifier: Apache-2.0
"""Slots: which kernel serves a base. 0 to 7 are the user's, 8 is ATen.

A call goes to the slot chosen by `use_slot`, otherwise by `pin`, otherwise by `MAGI_SLOT_<base>`, if that slot supports
the call. If none is chosen, it goes to the lowest active slot that supports it, otherwise to slot 8. Eager calls see
`use_slot` of their own thread only. Compiled code is specialized on the choice when it runs, in any thread, and
recompiles when that changes.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools as it
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch

from magi_opschema._call.conditions import Condition
from magi_opschema._text import show_value, show_with_type
from magi_opschema.aten._generate.schema import ATEN_SLOT, SUBMODULES, base_name
from magi_opschema.aten.errors import SlotError, SurfaceError, UnknownOpError

from .kernels import Cell, Kernel, Pair, cell_of, cells, check_number, lock, served_variants
from .load import default_surface
from .route import library_op, router, served_namespace


Fn = TypeVar("Fn", bound=Callable[..., Any])


@dataclass(frozen=True)
class Slot:
    """One slot of a base, with its kernels: several if they serve different overloads, none for ATen's slot 8."""

    number: int
    kernels: tuple[Kernel, ...]


def slots(base: str) -> dict[int, Slot]:
    """The active slots of *base*, by number, in the order in which they are asked. 8 is always among them.

    Example:
        >>> list(slots("softmax"))
        [8]

    Raises:
        UnknownOpError: The surface has no such operator.
    """
    cell = _cell(base)
    by_number = it.groupby(cell.kernels, lambda kernel: kernel.slot)
    found = {number: Slot(number, tuple(kernels)) for number, kernels in by_number}
    return found | {ATEN_SLOT: Slot(ATEN_SLOT, ())}


@overload
def register_slot(
    base: str,
    slot: int,
    fn: Fn,
    *,
    devices: Iterable[str] | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    capability: tuple[int, int] | None = None,
    supports: Callable[..., bool] | None = None,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> Fn: ...
@overload
def register_slot(
    base: str,
    slot: int,
    fn: None = None,
    *,
    devices: Iterable[str] | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    capability: tuple[int, int] | None = None,
    supports: Callable[..., bool] | None = None,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> Callable[[Fn], Fn]: ...
def register_slot(
    base: str,
    slot: int,
    fn: Fn | None = None,
    *,
    devices: Iterable[str] | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    capability: tuple[int, int] | None = None,
    supports: Callable[..., bool] | None = None,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> Fn | Callable[[Fn], Fn]:
    """Make *fn* the kernel of a slot. Without *fn*, this is a decorator.

    The kernel has the operator's own signature, as `magi_opschema.aten` shows it: names, order and defaults. It returns
    what ATen returns, including strides, and aliases no input. With a keyword `out=None`, it calls `prepare_out`,
    writes into `out` itself and returns it; without one, its result is copied. It serves every overload whose signature
    it has; annotate a parameter, or name one overload (`"mul.Tensor"`), to serve fewer.

    A kernel without *backward* serves only calls in which no input needs a gradient.

    Args:
        base: The operator, as in ATen (`linalg_norm`) or here (`linalg.norm`), with or without an overload.
        slot: 0 to 7; lower ones are asked first.
        fn: The kernel.
        devices: The device types it serves, for example `("cuda",)`: every tensor of a call must be on one of them.
        dtypes: The dtypes it serves, compared with that of the first tensor of a call.
        capability: The least compute capability of the GPU that it serves, such as (9, 0).
        supports: Called with the operator's arguments; if it returns false, the call goes to the next slot. A predicate
            whose only parameter is called `args` gets the positional arguments as one tuple.
        backward: `backward(ctx, *grads)`, one gradient for each parameter, as for `torch.library.register_autograd`.
        setup_context: `setup_context(ctx, inputs, output)`, as there; `setup_context(ctx, inputs, keyword_only_inputs,
            output)` for an operator with keyword-only arguments such as `alpha`.

    Returns:
        *fn*, or the decorator.

    Raises:
        SlotError: *slot* is not 0 to 7, or already serves one of these overloads.
        KernelSignatureError: *fn* has the signature of no overload.
        UnknownOpError: The surface has no such operator.
    """
    functions: dict[str, Any] = {"supports": supports, "backward": backward, "setup_context": setup_context}
    if fn is None:
        conditions: dict[str, Any] = {"devices": devices, "dtypes": dtypes, "capability": capability}
        return lambda kernel: register_slot(base, slot, kernel, **conditions, **functions)
    cell, only = _cell_and_overload(base)
    check_number(slot, cell.base, lowest_only=True)
    serves, takes_out = served_variants(cell, fn, only)
    for name, function in functions.items():
        if function is not None and not callable(function):
            msg = f"{name}={show_value(function)} must be a function"
            raise SlotError(msg)
    kernel = Kernel(
        base=cell.base,
        slot=slot,
        fn=fn,
        serves=serves,
        takes_out=takes_out,
        condition=Condition.of(devices, dtypes, capability, _predicate(supports), SlotError),
        backward=backward,
        setup_context=setup_context,
    )
    with lock:
        for other in cell.kernels:
            if other.slot == slot and other.serves & serves:
                taken = ", ".join(sorted(other.serves & serves))
                where = f"slot {slot} of aten::{cell.base}"
                msg = f"{where} already serves {taken}; call unregister_slot({cell.base!r}, {slot}) first"
                raise SlotError(msg)
        cell.kernels = tuple(sorted([*cell.kernels, kernel], key=lambda k: k.slot))
        _refresh(cell)
    return fn


def unregister_slot(base: str, slot: int) -> None:
    """Remove the kernels of a slot; calls go to the remaining slots.

    Raises:
        SlotError: The slot has no kernels.
    """
    cell = _cell(base)
    with lock:
        check_number(slot, cell.base, lowest_only=True)
        cell.check_active(slot)
        cell.kernels = tuple(kernel for kernel in cell.kernels if kernel.slot != slot)
        if cell.pinned == slot:
            cell.pinned = None
        _refresh(cell)


def pin(base: str, slot: int | None) -> None:
    """Prefer *slot* for every call of *base* in this process; None removes the preference.

    A call that the slot does not support goes to slot 8.

    Raises:
        SlotError: The slot has no kernel.
    """
    cell = _cell(base)
    with lock:
        if slot is not None:
            check_number(slot, cell.base)
            cell.check_active(slot)
        cell.pinned = slot
        _refresh(cell)


@contextlib.contextmanager
def use_slot(base: str, slot: int) -> Iterator[None]:
    """A context in which *slot* is preferred for calls of *base*, over `pin` and `MAGI_SLOT_<base>`.

    Example:
        >>> with use_slot("softmax", 8):
        ...     pass

    Raises:
        SlotError: The slot has no kernel.
    """
    cell = _cell(base)
    token = object()
    with lock:
        check_number(slot, cell.base)
        cell.check_active(slot)
        cell.used = [*cell.used, (token, slot, threading.current_thread())]
        _refresh(cell)
    try:
        yield
    finally:
        # It may not be the last one, because generators close their contexts in any order, and in any thread.
        with lock:
            cell.used = [entry for entry in cell.used if entry[0] is not token]
            _refresh(cell)


def op(base: str, *pairs: tuple[str | None, str | None]) -> Cell:
    """The cell of *base*, made when it is first needed; each pair names the overloads of a variant."""
    wanted = tuple(Pair(*pair) for pair in pairs)
    if base not in cells:
        cells[base] = cell = Cell(base, wanted)
        cell.eager = _FirstCall(cell)
    elif cells[base].pairs != wanted:
        msg = f"aten::{base} is loaded with other overloads; both surfaces must come from the same torch"
        raise SurfaceError(msg)
    return cells[base]


class _FirstCall:
    """The `eager` of a cell until the first eager call of its base, which reads `MAGI_SLOT_<base>`."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def __getattr__(self, overload: str) -> Any:
        self._cell.read_environment()
        with lock:
            _refresh(self._cell)
        return getattr(self._cell.eager, overload)


def _refresh(cell: Cell) -> None:
    """Set the callables of the cell: those of ATen if no kernel can serve a call, otherwise those of the slots."""
    latest = cell.used[-1][1] if cell.used else cell.chosen_for_all
    if not cell.kernels or latest == ATEN_SLOT:
        cell.traced = cell.aten_traced
    else:
        cell.traced = served_namespace(cell, cell.aten_traced, lambda pair, name: library_op(cell, pair, name, latest))
    if not cell.environment_read:
        return  # the first eager call must still read the environment
    if not cell.kernels:
        cell.eager = cell.aten_eager
        return
    for_all = cell.chosen_for_all
    chosen = cell.chosen_here if cell.used else lambda: for_all
    cell.eager = served_namespace(cell, cell.aten_eager, lambda pair, name: router(cell, pair, name, chosen))


def _cell(base: object) -> Cell:
    if not isinstance(base, str):
        msg = f"an operator is given by its name, such as 'softmax', not by {show_with_type(base)}"
        raise UnknownOpError(msg)
    if base not in cells:
        default_surface()
        if base not in cells:
            return cell_of(base_name(base))
    return cells[base]


def _cell_and_overload(base: object) -> tuple[Cell, str | None]:
    """The cell and the overload that *base* names: `mul.Tensor` and `linalg.norm.out` name one, `linalg.norm` none."""
    if not isinstance(base, str):
        return _cell(base), None
    parts = base.split(".")
    dots = 2 if parts[0] in SUBMODULES else 1
    return _cell(".".join(parts[:dots])), ".".join(parts[dots:]) or None


def _predicate(supports: Callable[..., bool] | None) -> Callable[..., bool] | None:
    if supports is None:
        return None
    try:
        parameters = inspect.signature(supports).parameters
    except (TypeError, ValueError):
        return supports
    if list(parameters) != ["args"] or parameters["args"].kind is inspect.Parameter.VAR_POSITIONAL:
        return supports
    return lambda *args, **_: supports(args)
