# SPDX-License-Identifier: Apache-2.0
"""Slots: which kernel serves a base. 0 to 7 are the user's, 8 is ATen.

A call goes to the slot chosen by `use_slot`, otherwise by `pin`, otherwise by `MAGI_SLOT_<base>`, if that slot supports
the call. If none is chosen, it goes to the lowest active slot that supports it, otherwise to slot 8. Eager calls see
`use_slot` of their own thread only. Compiled code is specialized on the choice when it runs, in any thread, and
recompiles when that changes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch

from magi_opschema._text import show_value, show_with_type
from magi_opschema.aten._generate.metadata import ATEN_SLOT
from magi_opschema.aten._generate.names import SUBMODULES, base_name
from magi_opschema.aten.errors import SlotError, UnknownOpError

from .cells import Cell, cell_of, loaded_cells
from .kernels import Kernel, served_variants
from .load import default_surface
from .registry import (
    check_active,
    check_number,
    chosen_for_all,
    chosen_here,
    kernels_of,
    lock,
    read_environment,
    state_of,
    used_in_this_thread,
)
from .route import eager_namespace, traced_namespace


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
    by_number: dict[int, list[Kernel]] = {}
    for kernel in kernels_of(cell):
        by_number.setdefault(kernel.slot, []).append(kernel)
    found = {number: Slot(number, tuple(kernels)) for number, kernels in sorted(by_number.items())}
    return found | {ATEN_SLOT: Slot(ATEN_SLOT, ())}


@overload
def register_slot(
    base: str,
    slot: int,
    fn: Fn,
    *,
    devices: Iterable[str] | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
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
    if fn is None:
        return lambda kernel: register_slot(
            base,
            slot,
            kernel,
            devices=devices,
            dtypes=dtypes,
            supports=supports,
            backward=backward,
            setup_context=setup_context,
        )
    cell, only = _cell_and_overload(base)
    check_number(slot, cell.base, lowest_only=True)
    serves, takes_out = served_variants(cell, fn, only or None)
    kernel = Kernel(
        base=cell.base,
        slot=slot,
        fn=fn,
        serves=serves,
        takes_out=takes_out,
        devices=_frozen(devices, str, "devices"),
        dtypes=_frozen(dtypes, torch.dtype, "dtypes"),
        supports=_predicate(_function(supports, "supports")),
        backward=_function(backward, "backward"),
        setup_context=_function(setup_context, "setup_context"),
    )
    with lock:
        state = state_of(cell)
        for other in state.kernels:
            if other.slot == slot and other.serves & serves:
                taken = ", ".join(sorted(other.serves & serves))
                where = f"slot {slot} of aten::{cell.base}"
                msg = f"{where} already serves {taken}; call unregister_slot({cell.base!r}, {slot}) first"
                raise SlotError(msg)
        state.kernels = sorted([*state.kernels, kernel], key=lambda k: k.slot)
        _refresh(cell)
    return fn


def unregister_slot(base: str, slot: int) -> None:
    """Remove the kernels of a slot; calls go to the remaining slots.

    Raises:
        SlotError: The slot has no kernels.
    """
    cell = _cell(base)
    with lock:
        state = state_of(cell)
        check_number(slot, cell.base, lowest_only=True)
        check_active(slot, cell)
        state.kernels = [kernel for kernel in state.kernels if kernel.slot != slot]
        if state.pinned == slot:
            state.pinned = None
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
            check_active(slot, cell)
        state_of(cell).pinned = slot
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
        check_active(slot, cell)
        state_of(cell).used.append((token, slot))
        _refresh(cell)
    stack = used_in_this_thread(cell.base)
    stack.append((token, slot))
    try:
        yield
    finally:
        # It may not be the last one, because generators close their contexts in any order, and in any thread.
        stack[:] = [entry for entry in stack if entry[0] is not token]
        with lock:
            state = state_of(cell)
            state.used = [entry for entry in state.used if entry[0] is not token]
            _refresh(cell)


def active_cell(base: str, slot: int) -> Cell:
    """The cell of *base*, after a check that *slot* has a kernel.

    Raises:
        UnknownOpError: The surface has no such operator.
        SlotError: The slot has no kernel.
    """
    cell = _cell(base)
    check_number(slot, cell.base)
    check_active(slot, cell)
    return cell


def settle(cell: Cell) -> None:
    """Read `MAGI_SLOT_<base>` at the first eager call of *cell*, and set the callables of the cell.

    Raises:
        SlotError: It holds no number of an active slot.
    """
    read_environment(cell)
    with lock:
        _refresh(cell)


def _refresh(cell: Cell) -> None:
    """Set the callables of the cell: those of ATen if no kernel can serve a call, otherwise those of the slots."""
    state = state_of(cell)
    latest = state.used[-1][1] if state.used else chosen_for_all(state)
    aten_only = not state.kernels or latest == ATEN_SLOT
    cell.traced = cell.aten_traced if aten_only else traced_namespace(cell, latest)
    if not state.environment_read:
        return  # the first eager call must still read the environment
    if not state.kernels:
        cell.eager = cell.aten_eager
        return
    for_all = chosen_for_all(state)
    chosen = functools.partial(chosen_here, cell) if state.used else lambda: for_all
    cell.eager = eager_namespace(cell, tuple(state.kernels), chosen)


def _cell(base: object) -> Cell:
    if not isinstance(base, str):
        msg = f"an operator is given by its name, such as 'softmax', not by {show_with_type(base)}"
        raise UnknownOpError(msg)
    if base not in loaded_cells():
        default_surface()
        if base not in loaded_cells():
            return cell_of(base_name(base))
    return cell_of(base)


def _cell_and_overload(base: object) -> tuple[Cell, str]:
    if not isinstance(base, str):
        return _cell(base), ""
    name, overload = _split_overload(base)
    return _cell(name), overload


def _split_overload(name: str) -> tuple[str, str]:
    """`mul.Tensor` is `("mul", "Tensor")`, `linalg.norm.out` is `("linalg.norm", "out")`, `linalg.norm` has none."""
    dots = 1 + (name.partition(".")[0] in SUBMODULES)
    parts = name.split(".", dots)
    return ".".join(parts[:dots]), parts[dots] if len(parts) > dots else ""


def _frozen(values: object, kind: type, name: str) -> frozenset[Any] | None:
    if values is None:
        return None
    if isinstance(values, str):
        msg = f"{name}={values!r} is a string; give a collection, {name}=({values!r},)"
        raise SlotError(msg)
    found = list(values) if isinstance(values, Iterable) else []
    if not found or not all(isinstance(value, kind) for value in found):
        msg = f"{name}={show_value(values)} must be a collection of {kind.__name__}"
        raise SlotError(msg)
    return frozenset(found)


def _function(value: Any, name: str) -> Any:
    if value is not None and not callable(value):
        msg = f"{name}={show_value(value)} must be a function"
        raise SlotError(msg)
    return value


def _predicate(supports: Callable[..., bool] | None) -> Callable[..., bool] | None:
    if supports is None:
        return None
    try:
        names = list(inspect.signature(supports).parameters)
    except (TypeError, ValueError):
        return supports
    if names != ["args"] or inspect.signature(supports).parameters["args"].kind.name == "VAR_POSITIONAL":
        return supports
    return lambda *args, **_: supports(args)
