# SPDX-License-Identifier: Apache-2.0
"""From a call to a kernel: the namespaces of a cell whose base has kernels.

An eager call with plain tensors and no gradient selects a kernel and runs it directly, which costs a microsecond less
than an operator written in Python. All other calls, and all compiled code, use the library operators of `library`,
which support modes, fake tensors and autograd.
"""

from __future__ import annotations

from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from magi_opschema.aten._generate.names import python_name
from magi_opschema.aten._torch_compat import (
    arguments,
    bump_version,
    dispatcher_callable,
    is_traced_tensor,
    plain_dispatch,
)

from .cells import Namespace
from .kernels import Kernel, out_names
from .library import library_op
from .out import fits, write_out
from .registry import kernels_of
from .serve import mark_written, options_of_out, python_names, run_kernel, select, tensors_in


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .cells import Cell, Pair


_PLAIN = frozenset({Tensor, Parameter})
_NO_TENSORS = frozenset({NoneType, bool, float, int, complex, str, torch.dtype, torch.device, torch.layout})
_NONE_GIVEN: dict[str, Any] = {}


def traced_namespace(cell: Cell, chosen: int | None) -> Namespace:
    """Library operators for the variants that have kernels, ATen's overloads for the others."""
    callables: dict[str, Callable[..., Any]] = {python_name(name): op for name, op in cell.overloads.items()}
    for pair in _served_pairs(cell):
        for name in (pair.functional, pair.out):
            if name is not None:
                callables[python_name(name)] = library_op(cell, pair, name, chosen)
    return Namespace(callables)


def eager_namespace(cell: Cell, kernels: tuple[Kernel, ...], chosen: Callable[[], int | None]) -> Namespace:
    """A router for each overload of the variants that have kernels, the dispatcher's callables for the others.

    Args:
        cell: The base.
        kernels: Its kernels, the lowest slot first.
        chosen: The slot that a call prefers, asked at each call.
    """
    callables = dict(vars(cell.aten_eager))
    for pair in _served_pairs(cell):
        serving = tuple(kernel for kernel in kernels if pair.leading in kernel.serves)
        if pair.functional is not None:
            callables[python_name(pair.functional)] = _functional_router(cell, pair, serving, chosen)
        if pair.out is not None:
            callables[python_name(pair.out)] = _out_router(cell, pair, serving, chosen)
    return Namespace(callables)


def _served_pairs(cell: Cell) -> list[Pair]:
    served = frozenset().union(*(kernel.serves for kernel in kernels_of(cell)))
    return [pair for pair in cell.pairs if pair.leading in served]


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


def _needs_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args, kwargs))


def has_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor is a stand-in of tracing, which can occur without an active mode."""
    return any(is_traced_tensor(type(t)) for t in tensors_in(args, kwargs) if type(t) not in _PLAIN)


def _wraps_others(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor is of a subclass with its own dispatch, which supports ATen's operators but not ours."""
    return any(
        type(t) not in _PLAIN
        and type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__
        and not is_traced_tensor(type(t))
        for t in tensors_in(args, kwargs)
    )


def _functional_router(
    cell: Cell, pair: Pair, kernels: tuple[Kernel, ...], chosen: Callable[[], int | None]
) -> Callable[..., Any]:
    name = str(pair.functional)
    aten = dispatcher_callable(cell.overloads[name])
    any_backward = any(kernel.backward is not None for kernel in kernels)

    def careful(*args: Any, **kwargs: Any) -> Any:
        if _wraps_others(args, kwargs):
            return aten(*args, **kwargs)
        if plain_dispatch() and not has_traced(args, kwargs):
            if not _needs_grad(args, kwargs):
                kernel = select(kernels, chosen(), args, kwargs)
                return aten(*args, **kwargs) if kernel is None else kernel.fn(*args, **python_names(kwargs))
            if not any_backward:
                return aten(*args, **kwargs)
        return library_op(cell, pair, name, chosen())(*args, **kwargs)

    def route(*args: Any, **kwargs: Any) -> Any:
        if not _is_plain(args) or (kwargs and not _is_plain(kwargs.values())) or not plain_dispatch():
            return careful(*args, **kwargs)
        kernel = select(kernels, chosen(), args, kwargs)
        if kernel is None:
            return aten(*args, **kwargs)
        return kernel.fn(*args, **kwargs)

    return route


def _out_router(
    cell: Cell, pair: Pair, kernels: tuple[Kernel, ...], chosen: Callable[[], int | None]
) -> Callable[..., Any]:
    name = str(pair.out)
    aten = dispatcher_callable(cell.overloads[name])
    names = out_names(cell, pair)
    options = options_of_out(cell, pair)
    only = names[0] if len(names) == 1 and not options and not _takes_list(cell, name) else None

    def serve(kernel: Kernel, args: tuple[Any, ...], inputs: dict[str, Any], kwargs: dict[str, Any]) -> Any:
        if not only:
            outs = tuple(kwargs[key] for key in names)
            written = run_kernel(kernel, args, inputs, outs, options, otherwise=lambda: aten(*args, **kwargs))
            mark_written(outs)
            return written
        out = kwargs[only]
        if not kernel.takes_out:
            result = kernel.fn(*args, **inputs)
            if not fits(result, out):
                return aten(*args, **kwargs)
            write_out(result, out)
        elif inputs:
            kernel.fn(*args, **inputs, out=out)
        else:
            kernel.fn(*args, out=out)
        bump_version(out)
        return out

    def careful(*args: Any, **kwargs: Any) -> Any:
        # ATen's own error says that out= and gradients cannot be combined.
        if _wraps_others(args, kwargs) or _needs_grad(args, kwargs):
            return aten(*args, **kwargs)
        if plain_dispatch() and not has_traced(args, kwargs):
            inputs = python_names({key: value for key, value in kwargs.items() if key not in names})
            kernel = select(kernels, chosen(), args, inputs)
            return aten(*args, **kwargs) if kernel is None else serve(kernel, args, inputs, kwargs)
        return library_op(cell, pair, name, chosen())(*args, **kwargs)

    def route(*args: Any, **kwargs: Any) -> Any:
        if not _is_plain(args) or not _is_plain(kwargs.values()) or not plain_dispatch():
            return careful(*args, **kwargs)
        inputs = _NONE_GIVEN
        if len(kwargs) > len(names):
            inputs = {key: value for key, value in kwargs.items() if key not in names}
        kernel = select(kernels, chosen(), args, inputs)
        return aten(*args, **kwargs) if kernel is None else serve(kernel, args, inputs, kwargs)

    return route


def _takes_list(cell: Cell, overload: str) -> bool:
    return any(a.is_out and str(a.type) != "Tensor" for a in arguments(cell.overloads[overload]))
