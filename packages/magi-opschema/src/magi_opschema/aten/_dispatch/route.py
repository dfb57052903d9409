# SPDX-License-Identifier: Apache-2.0
"""From a call to a kernel: the namespaces of a cell whose base has kernels.

An eager call with plain tensors and no gradient selects a kernel and runs it directly, which costs a microsecond less
than an operator written in Python. All other calls, and all compiled code, use library operators, which support modes,
fake tensors and autograd: `magi_aten::softmax__int`, one for each overload and choice of slot.

The fake of a library operator is that of ATen. Under autograd, a kernel with a backward runs as a separate operator
that has that backward; otherwise ATen serves the call. Autocast and vmap are those of ATen as well.
"""

from __future__ import annotations

import functools as ft
import re
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from magi_opschema import _torch_compat as compat
from magi_opschema._model.schema import tensors_in
from magi_opschema.aten._generate.schema import parameter_name, python_name
from magi_opschema.aten._torch_compat import (
    DispatchKeySet,
    OpOverload,
    after_autograd,
    after_inplace_or_view,
    arguments,
    below_autograd,
    below_inplace_or_view,
    dispatcher_callable,
    is_traced_tensor,
    plain_dispatch,
    schema_text,
    tag_out,
    takes_numbers,
    written_arguments,
)

from .kernels import Cell, Kernel, Namespace, Pair, options_of_out, out_names, python_names, run_with_out, select


NAMESPACE = "magi_aten"

_ATEN_SERVES = ("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS", "FuncTorchBatched")
"""Dispatch keys whose rule is to call ATen's overload, which dispatches on them in its own way."""

_KEPT_TAGS = ("nondeterministic_seeded", "dynamic_output_shape", "needs_exact_strides", "pt2_compliant_tag")

_MAY_ALIAS = frozenset({"conj_physical", "unsafe_split", "unsafe_split_with_sizes"})
"""Bases whose schema promises new tensors, but whose results can be their input or views of it."""

_PLAIN = frozenset({Tensor, Parameter})
_NO_TENSORS = frozenset({NoneType, bool, float, int, complex, str, torch.dtype, torch.device, torch.layout})
_NONE_GIVEN: dict[str, Any] = {}

library_ops: dict[str, OpOverload] = {}
"""Every library operator that has been defined, by name."""


def served_namespace(cell: Cell, aten: Namespace, served: Callable[[Pair, str], Any]) -> Namespace:
    """The namespace *aten* with what *served* returns for each overload of the variants that have kernels."""
    callables = dict(vars(aten))
    for pair in cell.pairs:
        if cell.serving(pair):
            callables |= {python_name(name): served(pair, name) for name in pair.names}
    return Namespace(callables)


def _is_plain(values: Iterable[Any]) -> bool:
    """Whether every tensor is of torch's own class and needs no gradient, so that only a kernel must be selected.

    It is false for lists and parameters, which the careful path handles.
    """
    for value in values:
        type_ = type(value)
        if type_ is Tensor:
            if value.requires_grad:
                return False
        elif type_ not in _NO_TENSORS:
            return False
    return True


def _tensor_positions(overload: OpOverload) -> tuple[int, ...]:
    """Where a call has tensors by position; a kernel has no other value there, such as the 2 of `mul(2, x)`."""
    return tuple(i for i, a in enumerate(arguments(overload)) if str(a.type) == "Tensor" and not a.kwarg_only)


def traced_op(cell: Cell, pair: Pair, name: str, chosen: int | None) -> Callable[..., Any]:
    """What Dynamo traces for a call of one overload: the library operator, or ATen for a number in a tensor's place."""
    op, aten = library_op(cell, pair, name, chosen), cell.overloads[name]
    if not takes_numbers(cell.base):
        return op
    tensors = _tensor_positions(aten)

    def trace(*args: Any, **kwargs: Any) -> Any:
        return (op if all(isinstance(args[i], Tensor) for i in tensors) else aten)(*args, **kwargs)

    return trace


def _elsewhere(
    cell: Cell, pair: Pair, name: str, chosen: Callable[[], int | None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any] | None:
    """ATen or a library operator, whichever the call needs; None if a kernel can serve it directly."""
    # A stand-in of tracing can occur without an active mode. A subclass with its own dispatch supports ATen's operators
    # but not ours.
    types = {type(t) for t in tensors_in((args, kwargs))} - _PLAIN
    traced = {type_ for type_ in types if is_traced_tensor(type_)}
    if any(type_.__torch_dispatch__ is not Tensor.__torch_dispatch__ for type_ in types - traced):
        return cell.overloads[name]
    direct = plain_dispatch() and not traced
    if needs_grad(args, kwargs):
        # ATen's own error says that out= and gradients cannot be combined.
        if name == pair.out or (direct and not cell.serving(pair, differentiable=True)):
            return cell.overloads[name]
        direct = False
    return None if direct else library_op(cell, pair, name, chosen())


def router(cell: Cell, pair: Pair, name: str, chosen: Callable[[], int | None]) -> Callable[..., Any]:
    """What an eager call of one overload runs: ATen, a kernel, or a library operator.

    *chosen* returns the slot that a call prefers; it is asked at each call.
    """
    aten = dispatcher_callable(cell.overloads[name])
    kernels = cell.serving(pair)
    outs = out_names(cell, pair) if name == pair.out else ()
    only = outs[0] if len(outs) == 1 else None
    options = options_of_out(cell, pair)
    tensors = _tensor_positions(cell.overloads[name])

    def route(*args: Any, **kwargs: Any) -> Any:
        for i in tensors:  # a generator would take longer
            if not isinstance(args[i], Tensor):
                return aten(*args, **kwargs)
        inputs = kwargs
        if outs:
            inputs = _NONE_GIVEN
            if len(kwargs) > len(outs):
                inputs = {key: value for key, value in kwargs.items() if key not in outs}
        if not _is_plain(args) or (kwargs and not _is_plain(kwargs.values())) or not plain_dispatch():
            elsewhere = _elsewhere(cell, pair, name, chosen, args, kwargs)
            if elsewhere is not None:
                return elsewhere(*args, **kwargs)
            inputs = python_names(inputs)
        kernel = select(kernels, chosen(), args, inputs)
        if kernel is None:
            return aten(*args, **kwargs)
        if not outs:
            return kernel.fn(*args, **inputs)
        # A generator would capture kwargs, and make each read of it slower.
        out = kwargs[only] if only else tuple(map(kwargs.__getitem__, outs))
        if run_with_out(kernel, args, inputs, out, options) is NotImplemented:
            return aten(*args, **kwargs)
        compat.increment_version((out,) if type(out) is Tensor else tensors_in(out))
        return out

    return route


@ft.cache
def _library() -> torch.library.Library:
    return torch.library.Library(NAMESPACE, "FRAGMENT")


def library_op(cell: Cell, pair: Pair, overload: str, chosen: int | None) -> OpOverload:
    """The operator for one overload that prefers the slot *chosen*; it is defined at the first request."""
    suffix = "" if chosen is None else f"__use{chosen}"
    name = f"{cell.base}__{python_name(overload)}{suffix}"
    if name not in library_ops:
        library_ops[name] = _Operator(cell, pair, overload, chosen).define(name)
    return library_ops[name]


class _Operator:
    """The rules of one operator: ATen's overload, its out arguments (none for a functional one), the chosen slot."""

    def __init__(self, cell: Cell, pair: Pair, overload: str, chosen: int | None) -> None:
        self.cell, self.pair, self.chosen = cell, pair, chosen
        self.aten = cell.overloads[overload]
        self.outs = out_names(cell, pair) if overload == pair.out else ()
        self.options = options_of_out(cell, pair)
        self.op: OpOverload

    def define(self, name: str) -> OpOverload:
        library = _library()
        self.op = _declared(name, self.aten, self.outs, self.run, self.fake)
        library.impl(name, _returning(self.op, self.autograd), "Autograd", with_keyset=True)
        if written_arguments(self.op):
            library.impl(name, self.bump_versions, "ADInplaceOrView", with_keyset=True)
        return self.op

    @property
    def preferred(self) -> int | None:
        """The slot that calls prefer: the chosen one, otherwise that of the environment.

        Every other choice has an operator of its own. The environment may not have been read when the graph was made.
        """
        self.cell.read_environment()
        return self.chosen if self.chosen is not None else self.cell.from_environment

    def run(self, *args: Any, **kwargs: Any) -> Any:
        inputs = python_names({key: value for key, value in kwargs.items() if key not in self.outs})
        kernel = select(self.cell.serving(self.pair), self.preferred, args, inputs)
        if kernel is None:
            return self.without_alias(self.aten(*args, **kwargs))
        if not self.outs:
            return kernel.fn(*args, **inputs)
        outs = tuple(kwargs[key] for key in self.outs)
        written = run_with_out(kernel, args, inputs, outs[0] if len(outs) == 1 else outs, self.options)
        return self.aten(*args, **kwargs) if written is NotImplemented else written

    def without_alias(self, result: Any) -> Any:
        """*result*, or a copy if ATen may return its input, which an operator of the library must not."""
        if self.cell.base not in _MAY_ALIAS or self.outs:
            return result
        return [t.clone() for t in result] if isinstance(result, (list, tuple)) else result.clone()

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        """Run the fake of the functional overload, and give its shapes to the outs.

        ATen's fakes of many out overloads read symbolic sizes as plain numbers, and fail (`angle.out`, torch 2.13).
        """
        if not self.outs or self.pair.functional is None:
            return self.without_alias(self.aten(*args, **kwargs))
        functional = self.cell.overloads[self.pair.functional]
        results = functional(*args, **{key: value for key, value in kwargs.items() if key not in self.outs})
        outs = tuple(kwargs[key] for key in self.outs)
        targets = outs[0] if isinstance(outs[0], (list, tuple)) else outs
        for out, result in zip(targets, results if isinstance(results, (list, tuple)) else [results], strict=True):
            if out.shape != result.shape:
                out.resize_(result.shape)
        return outs if len(outs) > 1 else outs[0]

    def autograd(self, keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not needs_grad(args, kwargs):
            with below_autograd():
                return self.op.redispatch(after_autograd(keyset), *args, **kwargs)
        if self.outs:
            return self.aten(*args, **kwargs)  # whose error says that out= and gradients cannot be combined
        kernels = self.cell.serving(self.pair, differentiable=True)
        kernel = select(kernels, self.preferred, args, python_names(kwargs))
        return (self.aten if kernel is None else kernel_op(self.cell, self.pair, kernel))(*args, **kwargs)

    def bump_versions(self, keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        with below_inplace_or_view():
            result = self.op.redispatch(after_inplace_or_view(keyset), *args, **kwargs)
        given = dict(zip((a.name for a in arguments(self.op)), args, strict=False)) | kwargs
        compat.increment_version(tensors_in([given[a.name] for a in written_arguments(self.op)]))
        return result


def kernel_op(cell: Cell, pair: Pair, kernel: Kernel) -> OpOverload:
    """The operator that is one kernel, with its backward."""
    name = f"{cell.base}__{python_name(pair.leading)}__slot{kernel.slot}"
    if name in library_ops:
        return library_ops[name]
    slot = kernel.slot

    def current() -> Kernel:
        return next(k for k in cell.serving(pair, differentiable=True) if k.slot == slot)

    def run(*args: Any, **kwargs: Any) -> Any:
        return current().fn(*args, **python_names(kwargs))

    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.magi_kernel.backward(ctx, *grads)

    def setup_context(ctx: Any, **given: Any) -> None:
        # `inputs` and `output`, and `keyword_only_inputs` if the schema has such arguments.
        ctx.magi_kernel = current()
        if ctx.magi_kernel.setup_context is not None:
            ctx.magi_kernel.setup_context(ctx, **given)

    aten = cell.overloads[pair.leading]
    op = library_ops[name] = _declared(name, aten, (), run, aten)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_library())
    return op


def _declared(
    name: str, aten: OpOverload, outs: tuple[str, ...], run: Callable[..., Any], fake: Callable[..., Any]
) -> OpOverload:
    """The new operator *name* with ATen's schema, its kernel *run* and its *fake*.

    `Tag.out` tells AOTAutograd that the returns are the outs. If torch does not have the tag, or it does not apply (a
    list of outs, or an input that is written as well), the operator returns nothing.
    """
    schema = schema_text(aten)
    # AOTAutograd treats `self` as a method's and uses `mode` itself, and `from` is a keyword. Only positional arguments
    # are renamed, so that a call needs no translation.
    for argument in arguments(aten):
        if not argument.kwarg_only:
            renamed = "mode_" if argument.name == "mode" else parameter_name(argument.name)
            schema = re.sub(rf"\b{argument.name}\b(?=[,=)])", renamed, schema)
    tags = [getattr(torch.Tag, tag) for tag in _KEPT_TAGS if getattr(torch.Tag, tag) in aten.tags]
    if outs:
        out = tag_out()
        if out is not None and all(a.name in outs and str(a.type) == "Tensor" for a in written_arguments(aten)):
            tags.append(out)
        else:
            schema = schema[: schema.rindex("->")] + "-> ()"
    library = _library()
    library.define(name + schema, tags=tuple(tags))
    op: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    library.impl(name, _returning(op, run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _returning(op, fake), lib=library)
    for key in _ATEN_SERVES:
        library.impl(name, _returning(op, aten), key)
    return op


def _returning(op: OpOverload, function: Callable[..., Any]) -> Callable[..., Any]:
    """*function*, without its result if the schema of *op* has none."""
    if not schema_text(op).endswith("-> ()"):
        return function

    def call(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)

    return call


def needs_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call needs a backward."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args, kwargs)))
