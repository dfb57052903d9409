# SPDX-License-Identifier: Apache-2.0
"""Library operators for bases with kernels: `magi_aten::softmax__int`, one for each overload and choice of slot.

Their fake is that of ATen. Under autograd, a kernel with a backward runs as a separate operator that has that backward;
otherwise ATen serves the call. Autocast and vmap are those of ATen as well.
"""

from __future__ import annotations

import functools as ft
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from magi_opschema.aten._generate.names import python_name
from magi_opschema.aten._torch_compat import (
    DispatchKeySet,
    OpOverload,
    after_autograd,
    after_inplace_or_view,
    arguments,
    below_autograd,
    below_inplace_or_view,
    schema_text,
    tag_out,
)

from .kernels import Kernel, out_names
from .registry import chosen_in_graph, kernels_of
from .serve import mark_written, options_of_out, python_names, run_kernel, select, tensors_in


if TYPE_CHECKING:
    from collections.abc import Callable

    from .cells import Cell, Pair


NAMESPACE = "magi_aten"

_ATEN_SERVES = ("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS", "FuncTorchBatched")
"""Dispatch keys whose rule is to call ATen's overload, which dispatches on them in its own way."""

_KEPT_TAGS = ("nondeterministic_seeded", "dynamic_output_shape", "needs_exact_strides", "pt2_compliant_tag")

_MAY_ALIAS = frozenset({"conj_physical", "unsafe_split", "unsafe_split_with_sizes"})
"""Bases whose schema promises new tensors, but whose results can be their input or views of it."""

_defined: dict[str, OpOverload] = {}


@ft.cache
def _library() -> torch.library.Library:
    return torch.library.Library(NAMESPACE, "FRAGMENT")


def library_ops() -> dict[str, OpOverload]:
    """Every library operator that has been defined, by name."""
    return dict(_defined)


def library_op(cell: Cell, pair: Pair, overload: str, chosen: int | None) -> OpOverload:
    """The operator for one overload that prefers the slot *chosen*; it is defined at the first request."""
    suffix = "" if chosen is None else f"__use{chosen}"
    name = f"{cell.base}__{python_name(overload)}{suffix}"
    if name not in _defined:
        _defined[name] = _define(cell, pair, overload, chosen, name)
    return _defined[name]


@dataclass(frozen=True)
class _Form:
    """The parts of an operator: ATen's overload, its out arguments (none for a functional one), and the chosen slot."""

    cell: Cell
    pair: Pair
    aten: OpOverload
    outs: tuple[str, ...]
    chosen: int | None


def _define(cell: Cell, pair: Pair, overload: str, chosen: int | None, name: str) -> OpOverload:
    outs = out_names(cell, pair) if overload == pair.out else ()
    form = _Form(cell, pair, cell.overloads[overload], outs, chosen)
    schema, tags = _schema_and_tags(form.aten, outs)
    library = _library()
    library.define(name + schema, tags=tags)
    op: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    returning = _nothing if schema.endswith("-> ()") else _the_result
    library.impl(name, returning(_run(form)), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", returning(_fake(form)), lib=library)
    library.impl(name, returning(_autograd(form, op)), "Autograd", with_keyset=True)
    for key in _ATEN_SERVES:
        library.impl(name, returning(form.aten), key)
    if any(a.alias_info is not None and a.alias_info.is_write for a in arguments(op)):
        library.impl(name, _version_bump(op), "ADInplaceOrView", with_keyset=True)
    return op


def _the_result(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _nothing(function: Callable[..., Any]) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)

    return call


def _run(form: _Form) -> Callable[..., Any]:
    options = options_of_out(form.cell, form.pair)

    def run(*args: Any, **kwargs: Any) -> Any:
        inputs = python_names({key: value for key, value in kwargs.items() if key not in form.outs})
        kernel = select(_serving(form.cell, form.pair), chosen_in_graph(form.cell, form.chosen), args, inputs)
        if kernel is None:
            return _no_alias(form, form.aten(*args, **kwargs))
        outs = tuple(kwargs[key] for key in form.outs) if form.outs else None
        return run_kernel(kernel, args, inputs, outs, options, otherwise=lambda: form.aten(*args, **kwargs))

    return run


def _no_alias(form: _Form, result: Any) -> Any:
    """*result*, or a copy if ATen may return its input, which an operator of the library must not."""
    if form.cell.base not in _MAY_ALIAS or form.outs:
        return result
    return [t.clone() for t in result] if isinstance(result, (list, tuple)) else result.clone()


def _autograd(form: _Form, op: OpOverload) -> Callable[..., Any]:
    def autograd(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args, kwargs))):
            with below_autograd():
                return op.redispatch(after_autograd(keyset), *args, **kwargs)
        if form.outs:
            return form.aten(*args, **kwargs)  # whose error says that out= and gradients cannot be combined
        chosen = chosen_in_graph(form.cell, form.chosen)
        kernel = select(_with_backward(form.cell, form.pair), chosen, args, python_names(kwargs))
        if kernel is None:
            return form.aten(*args, **kwargs)
        return kernel_op(form.cell, form.pair, kernel)(*args, **kwargs)

    return autograd


def _fake(form: _Form) -> Callable[..., Any]:
    """A fake that runs the fake of the functional overload, and gives its shapes to the outs.

    ATen's fakes of many out overloads read symbolic sizes as plain numbers, and fail (`angle.out`, torch 2.13).
    """
    if not form.outs or form.pair.functional is None:
        return lambda *args, **kwargs: _no_alias(form, form.aten(*args, **kwargs))
    functional = form.cell.overloads[form.pair.functional]

    def fake(*args: Any, **kwargs: Any) -> Any:
        results = functional(*args, **{key: value for key, value in kwargs.items() if key not in form.outs})
        outs = tuple(kwargs[key] for key in form.outs)
        targets = outs[0] if isinstance(outs[0], (list, tuple)) else outs
        for out, result in zip(targets, results if isinstance(results, (list, tuple)) else [results], strict=True):
            if out.shape != result.shape:
                out.resize_(result.shape)
        return outs if len(outs) > 1 else outs[0]

    return fake


def _version_bump(op: OpOverload) -> Callable[..., Any]:
    written = [a.name for a in arguments(op) if a.alias_info is not None and a.alias_info.is_write]
    positions = {a.name: position for position, a in enumerate(arguments(op)) if not a.kwarg_only}

    def bump(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        with below_inplace_or_view():
            result = op.redispatch(after_inplace_or_view(keyset), *args, **kwargs)
        values = [kwargs[n] if n in kwargs else args[positions[n]] for n in written]
        mark_written(tuple(values))
        return result

    return bump


def kernel_op(cell: Cell, pair: Pair, kernel: Kernel) -> OpOverload:
    """The operator that is one kernel, with its backward."""
    name = f"{cell.base}__{python_name(pair.leading)}__slot{kernel.slot}"
    if name in _defined:
        return _defined[name]
    aten = cell.overloads[pair.leading]
    schema, tags = _schema_and_tags(aten, ())
    library = _library()
    library.define(name + schema, tags=tags)
    slot = kernel.slot

    def current() -> Kernel:
        return next(k for k in _with_backward(cell, pair) if k.slot == slot)

    def run(*args: Any, **kwargs: Any) -> Any:
        return current().fn(*args, **python_names(kwargs))

    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.magi_kernel.backward(ctx, *grads)

    def setup_context(ctx: Any, **given: Any) -> None:
        # `inputs` and `output`, and `keyword_only_inputs` if the schema has such arguments.
        ctx.magi_kernel = current()
        if ctx.magi_kernel.setup_context is not None:
            ctx.magi_kernel.setup_context(ctx, **given)

    qualified = f"{NAMESPACE}::{name}"
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, aten, lib=library)
    torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=library)
    for key in _ATEN_SERVES:
        library.impl(name, aten, key)
    op: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    _defined[name] = op
    return op


def _serving(cell: Cell, pair: Pair) -> tuple[Kernel, ...]:
    return tuple(kernel for kernel in kernels_of(cell) if pair.leading in kernel.serves)


def _with_backward(cell: Cell, pair: Pair) -> tuple[Kernel, ...]:
    return tuple(kernel for kernel in _serving(cell, pair) if kernel.backward is not None)


def _schema_and_tags(aten: OpOverload, outs: tuple[str, ...]) -> tuple[str, tuple[torch.Tag, ...]]:
    """The schema text of ATen, and the tags for its definition.

    `Tag.out` tells AOTAutograd that the returns are the outs. If torch does not have the tag, or it does not apply (a
    list of outs, or an input that is written as well), the operator returns nothing.
    """
    schema = schema_text(aten)
    for name, python in _python_arguments(aten).items():
        schema = re.sub(rf"\b{name}\b(?=[,=)])", python, schema)
    tags = [getattr(torch.Tag, tag) for tag in _KEPT_TAGS if getattr(torch.Tag, tag) in aten.tags]
    if not outs:
        return schema, tuple(tags)
    written = [a for a in arguments(aten) if a.alias_info is not None and a.alias_info.is_write]
    out = tag_out()
    if out is not None and all(a.name in outs and str(a.type) == "Tensor" for a in written):
        return schema, (*tags, out)
    return schema[: schema.rindex("->")] + "-> ()", tuple(tags)


def _python_arguments(aten: OpOverload) -> dict[str, str]:
    """New names of arguments: AOTAutograd treats `self` as a method's and uses `mode` itself, and `from` is a keyword.

    Only positional arguments are renamed, so that a call needs no translation.
    """
    names = [argument.name for argument in arguments(aten) if not argument.kwarg_only]
    renamed = {name: "mode_" if name == "mode" else next(iter(python_names({name: None}))) for name in names}
    return {name: python for name, python in renamed.items() if name != python}
