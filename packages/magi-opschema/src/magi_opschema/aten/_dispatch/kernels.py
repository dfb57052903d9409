# SPDX-License-Identifier: Apache-2.0
"""A user's kernel for one slot, and the check of its signature against the schemas of its base."""

from __future__ import annotations

import inspect
import typing
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from magi_opschema._text import show_value, show_with_type
from magi_opschema.aten._generate.names import python_name
from magi_opschema.aten._torch_compat import arguments
from magi_opschema.aten.errors import KernelSignatureError


if TYPE_CHECKING:
    from collections.abc import Callable

    from .cells import Cell, Pair


@dataclass(frozen=True)
class Kernel:
    """A registered kernel.

    Attributes:
        base: The ATen base that it serves.
        slot: Its slot, 0 to 7.
        fn: The kernel, called with the operator's arguments.
        serves: The variants it serves, each by its leading overload.
        takes_out: Whether `fn` has an `out` parameter; otherwise its result is copied into `out=`.
        devices: The device types it serves; None for all.
        dtypes: The dtypes it serves, by the first tensor of a call; None for all.
        supports: Called with the operator's arguments; if it returns false, the next slot is asked. None for all calls.
        backward: `backward(ctx, *grads)`, as for `torch.library.register_autograd`.
        setup_context: `setup_context(ctx, inputs, output)`, as there.
    """

    base: str
    slot: int
    fn: Callable[..., Any]
    serves: frozenset[str]
    takes_out: bool
    devices: frozenset[str] | None
    dtypes: frozenset[torch.dtype] | None
    supports: Callable[..., bool] | None
    backward: Callable[..., Any] | None
    setup_context: Callable[..., Any] | None

    @cached_property
    def unconditional(self) -> bool:
        """Whether it serves every call of its overloads."""
        return self.devices is None and self.dtypes is None and self.supports is None


@dataclass(frozen=True)
class _Form:
    """A variant's parameters in Python, which a kernel's signature must have."""

    leading: str
    parameters: tuple[inspect.Parameter, ...]

    def __str__(self) -> str:
        return str(inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in self.parameters]))


def served_variants(cell: Cell, fn: Callable[..., Any], only: str | None) -> tuple[frozenset[str], bool]:
    """The variants of a base that *fn* can serve, by its signature, and whether it takes `out`.

    Args:
        cell: The base.
        fn: The kernel.
        only: The one overload that it is for; None for every variant that it fits.

    Raises:
        KernelSignatureError: It fits none; names, order, kinds and defaults must be those of the schema.
    """
    signature = _signature_of(fn, cell.base)
    parameters = list(signature.parameters.values())
    takes_out = "out" in signature.parameters
    if takes_out:
        out = signature.parameters["out"]
        if out.kind is not inspect.Parameter.KEYWORD_ONLY or out.default is not None:
            msg = f"{_where(fn)}: a kernel takes out as a keyword with default None, (..., *, out=None)"
            raise KernelSignatureError(msg)
        parameters.remove(out)
    forms = [_form(cell, pair) for pair in cell.pairs if only is None or only in {pair.functional, pair.out}]
    reasons = [(form, _mismatch(parameters, form.parameters)) for form in forms]
    serves = frozenset(form.leading for form, reason in reasons if reason is None)
    if not serves:
        listed = "".join(f"\n  {_dotted(cell, form.leading)}{form}: {reason}" for form, reason in reasons)
        msg = f"{_where(fn)} has the signature {signature}, which is that of no overload of aten::{cell.base}:{listed}"
        raise KernelSignatureError(msg)
    return serves, takes_out


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


def _form(cell: Cell, pair: Pair) -> _Form:
    overload = cell.overloads[pair.leading]
    outs = out_names(cell, pair) if pair.functional is None else ()
    inputs = [argument for argument in arguments(overload) if argument.name not in outs]
    return _Form(pair.leading, tuple(_parameter(argument) for argument in inputs))


def _parameter(argument: Any) -> inspect.Parameter:  # a torch._C.Argument
    kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
    name = "input" if argument.name == "self" else python_name(argument.name)
    return inspect.Parameter(name, kind, default=default, annotation=str(argument.type))


def out_names(cell: Cell, pair: Pair) -> tuple[str, ...]:
    """The schema names of a variant's out arguments, in order."""
    if pair.out is None:
        return ()
    known = set()
    if pair.functional is not None:
        known = {argument.name for argument in arguments(cell.overloads[pair.functional])}
    return tuple(a.name for a in arguments(cell.overloads[pair.out]) if a.is_out and a.name not in known)


def _mismatch(own: list[inspect.Parameter], wanted: tuple[inspect.Parameter, ...]) -> str | None:
    """The first difference, or None if the signatures agree. Keyword-only parameters may have any order."""
    for parameter in own:
        if parameter.kind in {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            return f"{parameter} hides parameters; spell them out"
    for kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
        mine = [p for p in own if p.kind is kind]
        theirs = [p for p in wanted if p.kind is kind]
        if kind is inspect.Parameter.KEYWORD_ONLY:
            mine.sort(key=lambda p: p.name)
            theirs.sort(key=lambda p: p.name)
        if [p.name for p in mine] != [p.name for p in theirs]:
            return f"its {'keyword' if kind.value == 3 else 'positional'} parameters are {_names(theirs)}"
        for parameter, schema in zip(mine, theirs, strict=True):
            reason = _parameter_mismatch(parameter, schema)
            if reason is not None:
                return reason
    if any(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in own):
        return "its parameters can be given by name"
    return None


def _parameter_mismatch(parameter: inspect.Parameter, schema: inspect.Parameter) -> str | None:
    if not _same_default(parameter.default, schema.default):
        wanted = "no default" if schema.default is inspect.Parameter.empty else f"the default {schema.default!r}"
        return f"its {schema.name} has {wanted}"
    kinds = _annotated_kinds(parameter.annotation)
    wanted_kinds = _schema_kinds(str(schema.annotation))
    if kinds and wanted_kinds and not kinds & wanted_kinds:
        return f"its {schema.name} is a {schema.annotation}"
    return None


def _same_default(mine: Any, theirs: Any) -> bool:
    if mine is inspect.Parameter.empty or theirs is inspect.Parameter.empty:
        return mine is theirs
    if isinstance(theirs, (list, tuple)) and isinstance(mine, (list, tuple)):
        return list(mine) == list(theirs)
    if isinstance(theirs, (list, tuple)) and theirs and _is_number(mine):
        # `int[2] padding=0` is [0, 0] for the dispatcher.
        return all(_is_number(value) and value == mine for value in theirs)
    alike = type(mine) is type(theirs) or _is_number(mine, theirs)
    return alike and bool(mine == theirs)


def _is_number(*values: Any) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


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
    if annotation is inspect.Parameter.empty or typing.get_origin(annotation) in {list, tuple}:
        return frozenset()
    found = [_KINDS.get(part) for part in parts if part is not type(None)]
    known = [kinds for kinds in found if kinds is not None]
    return frozenset().union(*known) if known and len(known) == len(found) else frozenset()


def _schema_kinds(type_: str) -> frozenset[str]:
    inner = type_.removeprefix("Optional[").removesuffix("]") if type_.startswith("Optional[") else type_
    return {
        "Tensor": frozenset({"tensor"}),
        "int": frozenset({"number"}),
        "float": frozenset({"number"}),
        "number": frozenset({"number"}),
        "bool": frozenset({"bool"}),
        "str": frozenset({"str"}),
    }.get(inner, frozenset())


def _names(parameters: list[inspect.Parameter]) -> str:
    return "(" + ", ".join(p.name for p in parameters) + ")"


def _dotted(cell: Cell, overload: str) -> str:
    return cell.base if overload == "default" else f"{cell.base}.{overload}"


def _where(fn: Callable[..., Any]) -> str:
    name = getattr(fn, "__qualname__", show_value(fn))
    code = getattr(fn, "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"
