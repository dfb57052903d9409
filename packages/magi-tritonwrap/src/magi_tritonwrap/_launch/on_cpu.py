# SPDX-License-Identifier: Apache-2.0
"""An op of Triton kernels that gets CPU tensors: what to say instead of what Triton says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from magi_tritonwrap._torch_compat.kernels import has_triton_driver, refuses_cpu_tensors
from magi_tritonwrap.errors import CpuTensorError


P = ParamSpec("P")
R = TypeVar("R")


def translate_cpu_errors(fn: Callable[P, R], op: str) -> Callable[P, R]:
    """Return the body *fn* of an op with an error that names the op and both fixes if it gets CPU tensors.

    Example:
        >>> def double(x): return x * 2
        >>> translate_cpu_errors(double, "mylib::double")(3)
        6
    """

    @functools.wraps(fn)
    def body(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fn(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            if refuses_cpu_tensors(error) and are_on_cpu(args, kwargs):
                raise CpuTensorError(_sentence(op)) from error
            raise

    return body


def check_driver(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for a call with CPU tensors if Triton has no device to launch on.

    Raises:
        CpuTensorError: the error names *op* and both fixes.
    """
    if are_on_cpu(args, kwargs) and not has_triton_driver():
        raise CpuTensorError(_sentence(op))


def are_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call has tensors, and all of them are on the CPU."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return bool(tensors) and all(tensor.device.type == "cpu" for tensor in tensors)


def _sentence(op: str) -> str:
    return (
        f"{op} launches Triton kernels, which need a GPU, and got CPU tensors. Give it a body for them with "
        f'register_kernel(op, "cpu"), or set TRITON_INTERPRET=1 before the kernels are defined.'
    )
