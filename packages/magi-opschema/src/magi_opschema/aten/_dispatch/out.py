# SPDX-License-Identifier: Apache-2.0
"""The contract of `out=` for calls that ATen does not serve itself: composed forms, and kernels of lower slots."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from magi_opschema.aten._generate.schema import OPTIONS


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
        msg = f"Expected out tensor to have device {device}, but got {out.device} instead"
        raise RuntimeError(msg)
    if out.dtype != dtype and not torch.can_cast(dtype, out.dtype):
        msg = f"result type {dtype} can't be cast to the desired output type {out.dtype}"
        raise RuntimeError(msg)
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
        msg = f"out= has {count} tensors, and the result {len(result)}"
        raise ValueError(msg)
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
            msg = f"{name} {wanted} does not match that of out: {getattr(out, name, False)}"
            raise RuntimeError(msg)
    return {name: value for name, value in options.items() if name not in OPTIONS}


def _agrees(name: str, wanted: Any, out: Tensor) -> bool:
    if name == "pin_memory":
        return not wanted or out.is_pinned()
    if name == "device":
        device = torch.device(wanted)
        return device.type == out.device.type and device.index in {None, out.device.index}
    return bool(getattr(out, name) == wanted)
