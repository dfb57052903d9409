# SPDX-License-Identifier: Apache-2.0
"""A user's kernel for one slot: the check of its signature against the schemas of its base, and its calls."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from magi_opschema._call.conditions import Condition
from magi_opschema._text import show_value, show_with_type
from magi_opschema.aten._generate.schema import parameter_name
from magi_opschema.aten._torch_compat import arguments
from magi_opschema.aten.errors import KernelSignatureError

from .cells import Cell, Pair
from .out import fits, write_out


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
        if only is None or only in {pair.functional, pair.out}:
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
        msg = f"the kernel for aten::{base} is {show_with_type(fn)}, expected a function"
        raise KernelSignatureError(msg)
    try:
        return inspect.signature(fn, eval_str=True)
    except NameError:
        return inspect.signature(fn)  # an annotation has a name that only a type checker imports, so it is not compared
    except (TypeError, ValueError) as error:
        what = f"the kernel for aten::{base}, {show_value(fn)}"
        msg = f"{what}, has no signature that Python can read; wrap it in a function"
        raise KernelSignatureError(msg) from error


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
            kinds, wanted_kinds = _annotated_kinds(parameter.annotation), _schema_kinds(str(schema.annotation))
            if kinds and wanted_kinds and not kinds & wanted_kinds:
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


_KINDS: dict[Any, frozenset[str]] = {
    Tensor: frozenset({"tensor"}),
    int: frozenset({"number"}),
    float: frozenset({"number"}),
    complex: frozenset({"number"}),
    bool: frozenset({"bool", "number"}),
    str: frozenset({"str"}),
    torch.dtype: frozenset({"number"}),  # schemas show ScalarType as int
}


def _annotated_kinds(annotation: Any) -> frozenset[str]:
    """The kinds of values that a kernel's annotation allows; empty if it cannot be compared."""
    parts = typing.get_args(annotation) if typing.get_origin(annotation) is not None else (annotation,)
    if annotation is Parameter.empty or typing.get_origin(annotation) in {list, tuple}:
        return frozenset()
    found = [_KINDS.get(part) for part in parts if part is not type(None)]
    known = [kinds for kinds in found if kinds is not None]
    return frozenset().union(*known) if known and len(known) == len(found) else frozenset()


def _schema_kinds(type_: str) -> frozenset[str]:
    inner = type_.removeprefix("Optional[").removesuffix("]") if type_.startswith("Optional[") else type_
    kind = {"Tensor": "tensor", "int": "number", "float": "number", "number": "number", "bool": "bool", "str": "str"}
    return frozenset({kind[inner]} if inner in kind else ())
