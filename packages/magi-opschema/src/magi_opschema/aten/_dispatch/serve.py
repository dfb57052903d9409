# SPDX-License-Identifier: Apache-2.0
"""Selects the kernel for a call, and runs it like the operator: into `out=`, with the names of the schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from magi_opschema.aten._generate.names import python_name
from magi_opschema.aten._torch_compat import arguments, bump_version

from .kernels import Kernel
from .out import fits, write_out


if TYPE_CHECKING:
    from collections.abc import Callable

    from .cells import Cell, Pair


def select(
    kernels: tuple[Kernel, ...], chosen: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Kernel | None:
    """The kernel that serves a call in which no input needs a gradient; None for ATen."""
    for kernel in kernels:
        if chosen is not None and kernel.slot != chosen:
            continue
        if kernel.unconditional or _supports(kernel, args, kwargs):
            return kernel
    return None


def _supports(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = tensors_in(args, kwargs)
    if kernel.devices is not None:
        devices = {t.device.type for t in tensors} or {_factory_device(kwargs)}
        if not devices <= kernel.devices:
            return False
    if kernel.dtypes is not None:
        dtype = tensors[0].dtype if tensors else _factory_dtype(kwargs)
        if dtype not in kernel.dtypes:
            return False
    return kernel.supports is None or bool(kernel.supports(*args, **kwargs))


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
    """*kwargs* of a schema with the names that a kernel has for them."""
    return {"input" if name == "self" else python_name(name): value for name, value in kwargs.items()}


def options_of_out(cell: Cell, pair: Pair) -> tuple[str, ...]:
    """The options of a factory's functional form that are given by `out=`."""
    if pair.functional is None or pair.out is None:
        return ()
    known = {argument.name for argument in arguments(cell.overloads[pair.out])}
    asked = {argument.name for argument in arguments(cell.overloads[pair.functional])}
    return tuple(name for name in ("dtype", "layout", "device") if name in asked - known)


def run_kernel(
    kernel: Kernel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outs: tuple[Tensor, ...] | None,
    options: tuple[str, ...] = (),
    *,
    otherwise: Callable[[], Any],
) -> Any:
    """Call a kernel. With *outs*, its results are written there, made with the *options* of the first out.

    If a result does not fit an out, *otherwise* calls ATen, which refuses it or computes in the dtype of the out.
    """
    if outs is None:
        return kernel.fn(*args, **kwargs)
    out: Any = outs[0] if len(outs) == 1 else outs
    if not kernel.takes_out:
        result = kernel.fn(*args, **kwargs, **{name: getattr(outs[0], name) for name in options})
        return write_out(result, out) if fits(result, out) else otherwise()
    kernel.fn(*args, **kwargs, out=out)
    return out


def mark_written(outs: tuple[Any, ...]) -> None:
    """Tell autograd that *outs* changed, as an in-place operator of torch does."""
    for out in outs:
        if isinstance(out, (list, tuple)):
            mark_written(tuple(out))
        else:
            bump_version(out)


def _factory_device(kwargs: dict[str, Any]) -> str:
    device = kwargs.get("device")
    return torch.get_default_device().type if device is None else torch.device(device).type


def _factory_dtype(kwargs: dict[str, Any]) -> torch.dtype:
    dtype = kwargs.get("dtype")
    return dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype()
