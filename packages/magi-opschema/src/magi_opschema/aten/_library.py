# SPDX-License-Identifier: Apache-2.0
"""Library operators for bases with kernels: `magi_aten::softmax__int`, one per overload and choice of slot.

Their fake is ATen's own. Under autograd they ask the kernels: one with a backward runs as an operator of its own that
has that backward, otherwise ATen serves the call. Autocast and vmap are ATen's as well.
"""

from __future__ import annotations

import functools as ft
import re
from typing import TYPE_CHECKING, Any

import torch

from ._kernels import Kernel, out_names
from ._names import python_name
from ._route import mark_written, python_names, run_kernel, select, tensors_in
from ._torch_compat import (
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


if TYPE_CHECKING:
    from collections.abc import Callable

    from ._cells import Cell, Pair


NAMESPACE = "magi_aten"

_ATEN_SERVES = ("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS", "FuncTorchBatched")
"""Dispatch keys whose rule is to call ATen's overload, which dispatches on them in its own way."""

_KEPT_TAGS = ("nondeterministic_seeded", "dynamic_output_shape", "needs_exact_strides", "pt2_compliant_tag")

_defined: dict[str, OpOverload] = {}


@ft.cache
def _library() -> torch.library.Library:
    return torch.library.Library(NAMESPACE, "FRAGMENT")


def library_ops() -> dict[str, OpOverload]:
    """Every library operator that was defined so far, by name."""
    return dict(_defined)


def library_op(cell: Cell, pair: Pair, overload: str, chosen: int | None) -> OpOverload:
    """The operator for one overload, `chosen` the slot that it prefers; defined at the first request."""
    suffix = "" if chosen is None else f"__use{chosen}"
    name = f"{cell.base}__{python_name(overload)}{suffix}"
    if name not in _defined:
        _defined[name] = _define(cell, pair, overload, chosen, name)
    return _defined[name]


def _define(cell: Cell, pair: Pair, overload: str, chosen: int | None, name: str) -> OpOverload:
    aten = cell.overloads[overload]
    outs = out_names(cell, pair) if overload == pair.out else ()
    schema, tags = _schema_and_tags(aten, outs)
    library = _library()
    library.define(name + schema, tags=tags)
    op: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    returns_nothing = schema.endswith("-> ()")

    def returned(values: Any) -> Any:
        return None if returns_nothing else values

    def run(*args: Any, **kwargs: Any) -> Any:
        inputs = {key: value for key, value in kwargs.items() if key not in outs}
        kernel = select(_serving(cell, pair), chosen, args, python_names(inputs))
        if kernel is None:
            return returned(aten(*args, **kwargs))
        if not outs:
            return run_kernel(kernel, args, python_names(inputs), None)
        return returned(run_kernel(kernel, args, python_names(inputs), tuple(kwargs[key] for key in outs)))

    def fake(*args: Any, **kwargs: Any) -> Any:
        return returned(aten(*args, **kwargs))

    def autograd(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args, kwargs)):
            kernel = None if outs else select(_with_backward(cell, pair), chosen, args, python_names(kwargs))
            if kernel is None:
                return returned(aten(*args, **kwargs))
            return _kernel_op(cell, pair, kernel)(*args, **kwargs)
        with below_autograd():
            return op.redispatch(after_autograd(keyset), *args, **kwargs)

    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    library.impl(name, autograd, "Autograd", with_keyset=True)
    for key in _ATEN_SERVES:
        library.impl(name, fake, key)
    if any(a.alias_info is not None and a.alias_info.is_write for a in arguments(op)):
        library.impl(name, _version_bump(op), "ADInplaceOrView", with_keyset=True)
    return op


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


def _kernel_op(cell: Cell, pair: Pair, kernel: Kernel) -> OpOverload:
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
        return run_kernel(current(), args, python_names(kwargs), None)

    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.magi_kernel.backward(ctx, *grads)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.magi_kernel = current()
        if ctx.magi_kernel.setup_context is not None:
            ctx.magi_kernel.setup_context(ctx, inputs, output)

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
    from ._slots import kernels_of

    return tuple(kernel for kernel in kernels_of(cell) if pair.leading in kernel.serves)


def _with_backward(cell: Cell, pair: Pair) -> tuple[Kernel, ...]:
    return tuple(kernel for kernel in _serving(cell, pair) if kernel.backward is not None)


def _schema_and_tags(aten: OpOverload, outs: tuple[str, ...]) -> tuple[str, tuple[torch.Tag, ...]]:
    """ATen's schema text, and the tags to define it with.

    `Tag.out` tells AOTAutograd that the returns are the outs. Where torch does not know it, or it does not hold (a list
    of outs, or an input that is written as well), the operator returns nothing.
    """
    # AOTAutograd warns about an argument called self, which it takes for a method's.
    schema = re.sub(r"\bself\b", "input", schema_text(aten))
    tags = [getattr(torch.Tag, tag) for tag in _KEPT_TAGS if getattr(torch.Tag, tag) in aten.tags]
    if not outs:
        return schema, tuple(tags)
    written = [a for a in arguments(aten) if a.alias_info is not None and a.alias_info.is_write]
    out = tag_out()
    if out is not None and all(a.name in outs and str(a.type) == "Tensor" for a in written):
        return schema, (*tags, out)
    return schema[: schema.rindex("->")] + "-> ()", tuple(tags)
