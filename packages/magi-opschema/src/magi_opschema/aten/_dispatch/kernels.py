# SPDX-License-Identifier: Apache-2.0
"""Where the calls of a base go: one mutable cell for each base, which generated functions read and slots change.

A cell has two namespaces of callables, one attribute per overload. `traced` is read under Dynamo and holds `OpOverload`
objects, or functions that choose one; it guards on them, so that a changed slot recompiles. `eager` holds the
dispatcher's own callables (`OpOverload._op`), which saves the Python frame of `OpOverload.__call__`, a fifth of a small
call.

A cell also holds the kernels of its base, and the slot that users prefer by `use_slot`, `pin` or `MAGI_SLOT_<base>`.
The signature of a kernel is compared with the schemas, and its calls keep the contract of `out=`.
"""

from __future__ import annotations

import inspect
import os
import threading
import typing
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from magi_opschema._call.conditions import Condition
from magi_opschema._text import show_value, show_with_type
from magi_opschema.aten._generate.schema import ATEN_SLOT, OPTIONS, nearest, parameter_name, python_name
from magi_opschema.aten._torch_compat import OpOverload, arguments, dispatcher_callable, find_overload
from magi_opschema.aten.errors import KernelSignatureError, SlotError, SurfaceError


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
    def names(self) -> tuple[str, ...]:
        """The overloads that there are."""
        return tuple(name for name in (self.functional, self.out) if name is not None)

    @property
    def leading(self) -> str:
        """The overload that names the variant."""
        return self.names[0]


@dataclass(frozen=True)
class Kernel:
    """A registered kernel, with the conditions and the gradient that `register_slot` describes.

    Attributes:
        base: The ATen base that it serves.
        slot: Its slot, 0 to 7.
        fn: The kernel, called with the operator's arguments.
        serves: The variants it serves, each by its leading overload.
        takes_out: Whether `fn` has an `out` parameter; otherwise its result is copied into `out=`.
    """

    base: str
    slot: int
    fn: Callable[..., Any]
    serves: frozenset[str]
    takes_out: bool
    condition: Condition
    backward: Callable[..., Any] | None
    setup_context: Callable[..., Any] | None


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
        self.overloads = {name: _overload(base, name) for pair in pairs for name in pair.names}
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
            raise SlotError(f"{variable}={text!r} is not a slot; give a number from 0 to {ATEN_SLOT}")
        check_number(int(text), base, source=variable)


def check_number(slot: object, base: str, *, lowest_only: bool = False, source: str = "") -> None:
    """Raise a `SlotError` if *slot* is not the number of a slot; it names *source*, where the number is from."""
    highest = ATEN_SLOT - 1 if lowest_only else ATEN_SLOT
    if not isinstance(slot, int) or isinstance(slot, bool) or not 0 <= slot <= highest:
        what = f"{source}={slot}" if source else f"slot {show_value(slot)} of aten::{base}"
        aten = f"; {ATEN_SLOT} is ATen itself" if lowest_only else ""
        raise SlotError(f"{what}: slots are numbered 0 to {highest}{aten}")


def _overload(base: str, name: str) -> OpOverload:
    overload = find_overload(base, name)
    if overload is None:
        dotted = base if name == "default" else f"{base}.{name}"
        raise SurfaceError(
            f"torch {torch.__version__} has no aten::{dotted}; generate the surface again with `magi-opschema aten gen`"
        )
    return overload


def select(
    kernels: tuple[Kernel, ...], chosen: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Kernel | None:
    """The first of *kernels* that serves a call, if a slot is *chosen* only of that one; None for ATen."""
    for kernel in kernels:
        if chosen is not None and kernel.slot != chosen:
            continue
        if kernel.condition.is_open or kernel.condition.holds(args, kwargs):
            return kernel
    return None


def run_with_out(
    kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, options: tuple[str, ...]
) -> Any:
    """Call a kernel whose results are written to *out*, and return *out*.

    A kernel that does not write itself gets the *options* of *out*. It is NotImplemented if its result does not fit:
    ATen refuses that, or computes in the dtype of *out*.
    """
    if kernel.takes_out:
        kernel.fn(*args, **kwargs, out=out) if kwargs else kernel.fn(*args, out=out)
        return out
    result = kernel.fn(*args, **kwargs, **{name: getattr(out, name) for name in options})
    return write_out(result, out) if fits(result, out) else NotImplemented


def python_names(kwargs: dict[str, Any]) -> dict[str, Any]:
    """*kwargs* of a schema with the names that a kernel has for them."""
    return {parameter_name(name): value for name, value in kwargs.items()}


def out_names(cell: Cell, pair: Pair) -> tuple[str, ...]:
    """The schema names of a variant's out arguments, in order."""
    if pair.out is None:
        return ()
    known = {a.name for a in arguments(cell.overloads[pair.functional])} if pair.functional is not None else set()
    return tuple(a.name for a in arguments(cell.overloads[pair.out]) if a.is_out and a.name not in known)


def options_of_out(cell: Cell, pair: Pair) -> tuple[str, ...]:
    """The options of a factory's functional form that are given by `out=`."""
    if pair.functional is None or pair.out is None:
        return ()
    known = {argument.name for argument in arguments(cell.overloads[pair.out])}
    asked = {argument.name for argument in arguments(cell.overloads[pair.functional])}
    return tuple(name for name in ("dtype", "layout", "device") if name in asked - known)


def served_variants(cell: Cell, fn: Callable[..., Any], only: str | None) -> tuple[frozenset[str], bool]:
    """The variants of a base that the kernel *fn* can serve, by its signature, and whether it takes `out`.

    *only* is the one overload that it is for; None for every variant that it fits.

    Raises:
        KernelSignatureError: It fits none; names, order, kinds and defaults must be those of the schema.
    """
    signature = _signature_of(fn, cell.base)
    code = getattr(fn, "__code__", None)
    where = getattr(fn, "__qualname__", show_value(fn))
    where = where if code is None else f"{where} ({code.co_filename}:{code.co_firstlineno})"
    parameters = list(signature.parameters.values())
    takes_out = "out" in signature.parameters
    if takes_out:
        out = signature.parameters["out"]
        if out.kind is not Parameter.KEYWORD_ONLY or out.default is not None:
            msg = f"{where}: a kernel takes out as a keyword with default None, (..., *, out=None)"
            raise KernelSignatureError(msg)
        parameters.remove(out)
    serves, refusals = set(), ""
    for pair in cell.pairs:
        if only is None or only in pair.names:
            wanted = schema_parameters(cell, pair)
            reason = _mismatch(parameters, wanted)
            if reason is None:
                serves.add(pair.leading)
            dotted = cell.base if pair.leading == "default" else f"{cell.base}.{pair.leading}"
            shown = inspect.Signature([p.replace(annotation=Parameter.empty) for p in wanted])
            refusals += f"\n  {dotted}{shown}: {reason}"
    if not serves:
        msg = f"{where} has the signature {signature}, which is that of no overload of aten::{cell.base}:{refusals}"
        raise KernelSignatureError(msg)
    return frozenset(serves), takes_out


def _signature_of(fn: object, base: str) -> inspect.Signature:
    if not callable(fn):
        raise KernelSignatureError(f"the kernel for aten::{base} is {show_with_type(fn)}, expected a function")
    try:
        return inspect.signature(fn, eval_str=True)
    except NameError:
        return inspect.signature(fn)  # an annotation has a name that only a type checker imports, so it is not compared
    except (TypeError, ValueError) as error:
        what = f"the kernel for aten::{base}, {show_value(fn)}"
        raise KernelSignatureError(f"{what}, has no signature that Python can read; wrap it in a function") from error


def schema_parameters(cell: Cell, pair: Pair) -> list[Parameter]:
    """A variant's parameters in Python without `out`, which a kernel must have; the annotations are schema types."""
    outs = out_names(cell, pair) if pair.functional is None else ()
    return [
        Parameter(
            parameter_name(argument.name),
            Parameter.KEYWORD_ONLY if argument.kwarg_only else Parameter.POSITIONAL_OR_KEYWORD,
            default=argument.default_value if argument.has_default_value() else Parameter.empty,
            annotation=str(argument.type),
        )
        for argument in arguments(cell.overloads[pair.leading])
        if argument.name not in outs
    ]


def _mismatch(own: list[Parameter], wanted: list[Parameter]) -> str | None:
    """The first difference, or None if the signatures agree. Keyword-only parameters may have any order."""
    for parameter in own:
        if parameter.kind in {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}:
            return f"{parameter} hides parameters; spell them out"
    for kind, called in ((Parameter.POSITIONAL_OR_KEYWORD, "positional"), (Parameter.KEYWORD_ONLY, "keyword")):
        mine = [p for p in own if p.kind is kind]
        theirs = [p for p in wanted if p.kind is kind]
        if kind is Parameter.KEYWORD_ONLY:
            mine.sort(key=lambda p: p.name)
            theirs.sort(key=lambda p: p.name)
        if [p.name for p in mine] != [p.name for p in theirs]:
            return f"its {called} parameters are ({', '.join(p.name for p in theirs)})"
        for parameter, schema in zip(mine, theirs, strict=True):
            if not _same_default(parameter.default, schema.default):
                default = "no default" if schema.default is Parameter.empty else f"the default {schema.default!r}"
                return f"its {schema.name} has {default}"
            if _contradicts(parameter.annotation, schema.annotation):
                return f"its {schema.name} is a {schema.annotation}"
    if any(p.kind is Parameter.POSITIONAL_ONLY for p in own):
        return "its parameters can be given by name"
    return None


def _same_default(mine: Any, theirs: Any) -> bool:
    if mine is Parameter.empty or theirs is Parameter.empty:
        return mine is theirs
    if isinstance(theirs, (list, tuple)) and isinstance(mine, (list, tuple)):
        return list(mine) == list(theirs)
    if isinstance(theirs, (list, tuple)) and theirs and _is_number(mine):
        # `int[2] padding=0` is [0, 0] for the dispatcher.
        return all(_is_number(value) and value == mine for value in theirs)
    alike = type(mine) is type(theirs) or (_is_number(mine) and _is_number(theirs))
    return alike and bool(mine == theirs)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_NUMBERS = frozenset({"int", "float", "number"})
_SCHEMA_TYPES: dict[Any, frozenset[str]] = {
    Tensor: frozenset({"Tensor"}),
    **dict.fromkeys((int, float, complex, torch.dtype), _NUMBERS),  # schemas show ScalarType as int
    bool: _NUMBERS | {"bool"},
    str: frozenset({"str"}),
}
"""The schema types that a class in a kernel's annotation stands for."""
_COMPARED = frozenset().union(*_SCHEMA_TYPES.values())


def _contradicts(annotation: Any, schema_type: str) -> bool:
    """Whether a kernel's *annotation* allows no value of *schema_type*; false if they cannot be compared."""
    wanted = schema_type.removeprefix("Optional[").removesuffix("]") if schema_type[:9] == "Optional[" else schema_type
    parts = typing.get_args(annotation) if typing.get_origin(annotation) is not None else (annotation,)
    found = [_SCHEMA_TYPES.get(part, frozenset()) for part in parts if part is not type(None)]
    if typing.get_origin(annotation) in {list, tuple} or not all(found) or wanted not in _COMPARED:
        return False
    return bool(found) and all(wanted not in types for types in found)


def prepare_out(out: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make *out* ready for a result of *shape*, by ATen's rules (at/native/Resize.cpp, TensorIterator).

    A kernel with an `out` parameter calls this first and then writes. An `out` without elements is resized; one with
    elements of another shape is resized with ATen's warning.

    Args:
        out: The tensor that the caller gave.
        shape: The shape of the result.
        dtype: The dtype of the result; `out` may have any dtype that it can be cast to.
        device: The device of the result, and of `out`.

    Returns:
        *out*.

    Raises:
        RuntimeError: `out` is on another device, or the result cannot be cast to its dtype.

    Example:
        >>> prepare_out(torch.empty(0), (2, 3), torch.float32, torch.device("cpu")).shape
        torch.Size([2, 3])
    """
    if out.device != device:
        raise RuntimeError(f"Expected out tensor to have device {device}, but got {out.device} instead")
    if out.dtype != dtype and not torch.can_cast(dtype, out.dtype):
        raise RuntimeError(f"result type {dtype} can't be cast to the desired output type {out.dtype}")
    if out.shape != torch.Size(shape):
        if out.numel() != 0:
            warnings.warn(
                f"An output with one or more elements was resized since it had shape {list(out.shape)}, "
                f"which does not match the required output shape {list(shape)}.",
                UserWarning,
                stacklevel=2,
            )
        out.resize_(shape)
    return out


def write_out(result: Any, out: Any) -> Any:
    """Copy *result*, what a functional form returned, into *out*, and return *out*: a tensor or a sequence of tensors.

    Raises:
        RuntimeError: A device or dtype does not fit.
        ValueError: *out* has another number of tensors than the result.
    """
    if isinstance(result, Tensor):
        prepare_out(out, result.shape, result.dtype, result.device).copy_(result)
        return out
    if isinstance(out, Tensor) or len(result) != len(out):
        count = 1 if isinstance(out, Tensor) else len(out)
        raise ValueError(f"out= has {count} tensors, and the result {len(result)}")
    for value, target in zip(result, out, strict=True):
        write_out(value, target)
    return out


def fits(result: Any, out: Any) -> bool:
    """Whether `write_out` would accept *out* for *result*."""
    if isinstance(result, Tensor):
        same_device = isinstance(out, Tensor) and out.device == result.device
        return same_device and (out.dtype == result.dtype or torch.can_cast(result.dtype, out.dtype))
    return not isinstance(out, Tensor) and len(result) == len(out) and all(map(fits, result, out))


def out_options(out: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a factory without those that *out* determines, which must agree with it."""
    if not options:
        return options
    for name in OPTIONS:
        wanted = options.get(name)
        if wanted is not None and not _agrees(name, wanted, out):
            raise RuntimeError(f"{name} {wanted} does not match that of out: {getattr(out, name, False)}")
    return {name: value for name, value in options.items() if name not in OPTIONS}


def _agrees(name: str, wanted: Any, out: Tensor) -> bool:
    if name == "pin_memory":
        return not wanted or out.is_pinned()
    if name == "device":
        device = torch.device(wanted)
        return device.type == out.device.type and device.index in {None, out.device.index}
    return bool(getattr(out, name) == wanted)
