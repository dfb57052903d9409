# SPDX-License-Identifier: Apache-2.0
"""From a call to a kernel: the namespaces that a cell gets once a base has kernels.

An eager call with plain tensors and no gradient asks the kernels and runs one directly, which costs a microsecond less
than an operator written in Python. Everything else, and all compiled code, goes through the library operators of
`_library`, which modes, fake tensors and autograd understand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ._cells import Namespace
from ._kernels import Kernel, out_names
from ._metadata import ATEN_SLOT
from ._names import python_name
from ._out import write_out
from ._torch_compat import dispatcher_callable, is_traced_tensor, plain_dispatch


if TYPE_CHECKING:
    from collections.abc import Callable

    from ._cells import Cell, Pair


_PLAIN = frozenset({Tensor, Parameter})


def traced_namespace(cell: Cell, chosen: int | None) -> Namespace:
    """Library operators for the variants that have kernels, ATen's overloads for the others."""
    from ._library import library_op

    callables: dict[str, Callable[..., Any]] = {python_name(name): op for name, op in cell.overloads.items()}
    for pair in _served_pairs(cell):
        for name in (pair.functional, pair.out):
            if name is not None:
                callables[python_name(name)] = library_op(cell, pair, name, chosen)
    return Namespace(callables)


def eager_namespace(cell: Cell, kernels: tuple[Kernel, ...]) -> Namespace:
    """A router for each overload of the variants that have kernels, the dispatcher's callables for the others."""
    callables = dict(vars(cell.aten_eager))
    for pair in _served_pairs(cell):
        serving = tuple(kernel for kernel in kernels if pair.leading in kernel.serves)
        if pair.functional is not None:
            callables[python_name(pair.functional)] = _functional_router(cell, pair, serving)
        if pair.out is not None:
            callables[python_name(pair.out)] = _out_router(cell, pair, serving)
    return Namespace(callables)


def select(
    kernels: tuple[Kernel, ...], chosen: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Kernel | None:
    """The kernel that serves a call in which no input needs a gradient; None for ATen."""
    if chosen == ATEN_SLOT:
        return None
    first: Tensor | None = None
    device_types: set[str] | None = None
    for kernel in kernels:
        if chosen is not None and kernel.slot != chosen:
            continue
        if kernel.dtypes is not None or kernel.devices is not None:
            if device_types is None:
                tensors = list(tensors_in(args, kwargs))
                first = tensors[0] if tensors else None
                device_types = {t.device.type for t in tensors} or {_factory_device(kwargs)}
            if kernel.devices is not None and not device_types <= kernel.devices:
                continue
            if (
                kernel.dtypes is not None
                and (first.dtype if first is not None else _factory_dtype(kwargs)) not in kernel.dtypes
            ):
                continue
        if kernel.supports is not None and not kernel.supports(*args, **kwargs):
            continue
        return kernel
    return None


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments, those in lists too."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def python_names(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords of a schema as a kernel knows them."""
    return {"input" if name == "self" else python_name(name): value for name, value in kwargs.items()}


def run_kernel(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[Tensor, ...] | None) -> Any:
    """Call a kernel; with *outs*, let its results end up there."""
    if outs is None:
        return kernel.fn(*args, **kwargs)
    out: Any = outs[0] if len(outs) == 1 else outs
    if not kernel.takes_out:
        return write_out(kernel.fn(*args, **kwargs), out)
    kernel.fn(*args, **kwargs, out=out)
    return out


def _served_pairs(cell: Cell) -> list[Pair]:
    from ._slots import kernels_of

    served = frozenset().union(*(kernel.serves for kernel in kernels_of(cell)))
    return [pair for pair in cell.pairs if pair.leading in served]


def _is_plain(args: tuple[Any, ...]) -> bool | None:
    """True for plain tensors of which none needs a gradient, None for one that does, False for anything else."""
    grad = torch.is_grad_enabled()
    needs_grad = False
    for value in args:
        if type(value) in _PLAIN:
            needs_grad = needs_grad or (grad and value.requires_grad)
        elif isinstance(value, Tensor):
            return False
        elif isinstance(value, (list, tuple)):
            inner = _is_plain(tuple(value))
            if inner is False:
                return False
            needs_grad = needs_grad or inner is None
    return None if needs_grad else True


def _wraps_others(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor is of a subclass with a dispatch of its own, which knows ATen's operators and not ours."""
    return any(
        type(t) not in _PLAIN
        and type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__
        and not is_traced_tensor(type(t))
        for t in tensors_in(args, kwargs)
    )


def _functional_router(cell: Cell, pair: Pair, kernels: tuple[Kernel, ...]) -> Callable[..., Any]:
    from ._slots import chosen_here

    aten = dispatcher_callable(cell.overloads[str(pair.functional)])
    name = str(pair.functional)
    has_backward = any(kernel.backward is not None for kernel in kernels)

    def route(*args: Any, **kwargs: Any) -> Any:
        plain = _is_plain((*args, *kwargs.values())) if kwargs else _is_plain(args)
        if plain and plain_dispatch():
            kernel = select(kernels, chosen_here(cell), args, kwargs)
            return kernel.fn(*args, **kwargs) if kernel is not None else aten(*args, **kwargs)
        if (plain is None and not has_backward and plain_dispatch()) or _wraps_others(args, kwargs):
            return aten(*args, **kwargs)
        from ._library import library_op

        return library_op(cell, pair, name, chosen_here(cell))(*args, **kwargs)

    return route


def _out_router(cell: Cell, pair: Pair, kernels: tuple[Kernel, ...]) -> Callable[..., Any]:
    from ._slots import chosen_here

    aten = dispatcher_callable(cell.overloads[str(pair.out)])
    name = str(pair.out)
    names = out_names(cell, pair)

    def route(*args: Any, **kwargs: Any) -> Any:
        plain = _is_plain((*args, *kwargs.values()))
        if plain and plain_dispatch():
            inputs = {key: value for key, value in kwargs.items() if key not in names}
            kernel = select(kernels, chosen_here(cell), args, inputs)
            if kernel is None:
                return aten(*args, **kwargs)
            outs = tuple(kwargs[key] for key in names)
            written = run_kernel(kernel, args, inputs, outs)
            mark_written(outs)
            return written
        if plain is None or _wraps_others(args, kwargs):
            return aten(*args, **kwargs)
        from ._library import library_op

        return library_op(cell, pair, name, chosen_here(cell))(*args, **kwargs)

    return route


def mark_written(outs: tuple[Any, ...]) -> None:
    """Tell autograd that these tensors changed, as an in-place operator of torch does."""
    for out in outs:
        if isinstance(out, (list, tuple)):
            mark_written(tuple(out))
        elif not out.is_inference():
            torch.autograd.graph.increment_version(out)


def _factory_device(kwargs: dict[str, Any]) -> str:
    device = kwargs.get("device")
    return torch.get_default_device().type if device is None else torch.device(device).type


def _factory_dtype(kwargs: dict[str, Any]) -> torch.dtype:
    dtype = kwargs.get("dtype")
    return dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype()
