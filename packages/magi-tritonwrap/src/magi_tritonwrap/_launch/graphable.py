# SPDX-License-Identifier: Apache-2.0
"""What of a launch a graph can carry: its arguments, and writes that torch finds in the kernel's Triton IR."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from triton.runtime.autotuner import Config
from triton.runtime.jit import JITFunction

from magi_tritonwrap._identity.code import code_names
from magi_tritonwrap._kernel.kernels import Kernel
from magi_tritonwrap._torch_compat.launches import (
    is_tensor_descriptor,
    settings_that_are_lost,
    static_launcher_refuses_descriptors,
    tensor_descriptors_are_taken,
    writes_unknown_to_torch,
)
from magi_tritonwrap.errors import UnsupportedLaunchError

from .hook import launch_site
from .self_contained import functions_of


_MAY_WRITE = {"scatter", "atomic_add", "atomic_and", "atomic_max", "atomic_min", "atomic_or", "atomic_xor"}
"""Names of operations that write through a tensor descriptor; most kernels with one have it write through pointers."""


def check_arguments(kernel: Kernel, arguments: Mapping[str, Any], configs: list[Config]) -> None:
    """Raise UnsupportedLaunchError for arguments that are missing, or that a node of a graph cannot hold."""
    given = set(arguments).union(*(config.kwargs for config in configs))
    missing = [name for name in kernel.jit.arg_names if name not in given]
    if missing:
        raise unsupported(kernel, f"was launched without {', '.join(missing)}")
    for name, value in arguments.items():
        if is_tensor_descriptor(value):
            _check_descriptor(kernel, name, value)
        elif _holds_tensor(value):
            raise unsupported(kernel, f"was launched with tensors inside the {type(value).__name__} '{name}'")


def _check_descriptor(kernel: Kernel, name: str, descriptor: Any) -> None:
    launched = f"was launched with the TensorDescriptor '{name}'"
    if not tensor_descriptors_are_taken():
        raise unsupported(kernel, f"{launched}; torch takes it in a graph for GPUs of compute capability 9.0 or more")
    lost = settings_that_are_lost(descriptor)
    if lost:
        made = ", ".join(f"{setting}={value!r}" for setting, value in lost.items())
        raise unsupported(kernel, f"{launched}, made with {made}; Inductor makes it again without that")
    if static_launcher_refuses_descriptors():
        why = "Inductor's own launcher does not know them; leave out static_launch_user_defined_triton_kernels"
        raise unsupported(kernel, f"{launched}; {why}")


def check_writes(kernel: Kernel, jit: JITFunction[Any], launched: Any, arguments: dict[str, Any]) -> None:
    """Raise UnsupportedLaunchError for operations of which torch does not know that they write."""
    unknown = writes_unknown_to_torch(launched, arguments) if _may_write_unknown_to_torch(jit) else []
    if unknown:
        operations = {"tt.descriptor_reduce": "an atomic operation", "tt.descriptor_scatter": "scatter"}
        how = " and ".join(operations[operation] for operation in unknown)
        why = "torch does not know that the Tensor changes then; register its op as an opaque custom op"
        raise unsupported(kernel, f"writes through a tensor descriptor by {how}; {why}")


@functools.lru_cache(maxsize=512)
def _may_write_unknown_to_torch(jit: JITFunction[Any]) -> bool:
    """Whether the kernel asks any object for one of these operations. To read its Triton IR takes longer."""
    return any(not _MAY_WRITE.isdisjoint(code_names(each.fn.__code__).mentioned) for each in functions_of(jit))


def _holds_tensor(value: object) -> bool:
    """Whether *value* is a container with a tensor in it, which torch's mutation analysis would not see."""
    if isinstance(value, Mapping):
        return any(isinstance(item, torch.Tensor) or _holds_tensor(item) for item in value.values())
    if isinstance(value, tuple | list):
        return any(isinstance(item, torch.Tensor) or _holds_tensor(item) for item in value)
    return is_tensor_descriptor(value)


def unsupported(kernel: Kernel, why: str) -> UnsupportedLaunchError:
    """The error for a launch of *kernel*, which it says *why* a graph cannot carry."""
    file, line = launch_site()
    launch = f"launched at {file}:{line}, defined at {kernel.file}:{kernel.line}"
    return UnsupportedLaunchError(f"Triton kernel '{kernel.name}' {why}. ({launch})")
