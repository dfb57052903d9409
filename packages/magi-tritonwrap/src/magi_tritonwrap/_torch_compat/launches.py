# SPDX-License-Identifier: Apache-2.0
"""Launches in a graph: how one is recorded, and what its node holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch._higher_order_ops.triton_kernel_wrap import (
    TracingTritonHOPifier,
    create_tma_stable_metadata,
    generate_ttir,
    kernel_side_table,
    maybe_unpack_tma_stable_metadata,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._library import triton as torch_triton
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _triton as torch_triton_features
from triton.tools.tensor_descriptor import TensorDescriptor

from .tracing import unwrap_functional


class _Recorder(TracingTritonHOPifier):
    """What `wrap_triton` records a launch with, and tensor descriptors, which torch takes from Dynamo only.

    The node of a launch has the Tensor of a descriptor as its argument, and the size of a block beside it
    (`torch/_higher_order_ops/triton_kernel_wrap.py`, torch 2.10 to 2.15). When the launch runs,
    `TensorDescriptor.from_tensor` makes the descriptor again, so it must be one of a whole Tensor.
    """

    def call_HOP(  # noqa: N802 - torch's name
        self, variable: Any, grids: list[Any], combined_args: dict[str, Any], tx: None
    ) -> None:
        blocks = _blocks(combined_args)
        if not blocks:
            super().call_HOP(variable, grids, combined_args, tx)
            return
        graphable, constants = self.store_non_graphable_args(_with_bases(combined_args))
        triton_kernel_wrapper_mutation(
            kernel_idx=variable.kernel_idx,
            constant_args_idx=constants,
            grid=grids,
            tma_descriptor_metadata=blocks,
            kwargs=graphable,
        )


_RECORDER = _Recorder()


def _blocks(arguments: dict[str, Any]) -> dict[str, Any]:
    """What torch notes of each tensor descriptor among *arguments*."""
    found = {name: value for name, value in arguments.items() if is_tensor_descriptor(value)}
    return {name: create_tma_stable_metadata(list(value.block_shape)) for name, value in found.items()}


def _with_bases(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: described_tensor(value) for name, value in arguments.items()}


def record_launch(kernel: Any, grid: Any, arguments: dict[str, Any]) -> None:
    """Record `wrap_triton(kernel)[grid](**arguments)` in the graph being traced."""
    positional: list[Any] = []
    named = dict(arguments)
    for name in kernel.arg_names:
        if name not in named:
            break
        positional.append(named.pop(name))
    fakes = [value for value in map(described_tensor, arguments.values()) if isinstance(value, FakeTensor)]
    # torch 2.10 and 2.11 record a launch on fake Tensors only while a mode is active.
    mode = fakes[0].fake_mode if fakes else nullcontext()
    with mode, torch_triton.set_wrap_triton_enabled(True):
        wrapped = _RECORDER.call_getitem(torch.library.wrap_triton(kernel), (grid,))
        _RECORDER.call_triton_kernel(wrapped, positional, named, None)


def writes_unknown_to_torch(kernel: Any, arguments: dict[str, Any]) -> list[str]:
    """The operations of a launch that write through a tensor descriptor without torch's knowing it.

    torch finds what a kernel writes by a list of operations (`WRITE_OPS` or `MUTATION_OPS` in
    `torch/_higher_order_ops/triton_kernel_wrap.py`, torch 2.10 to 2.13), in which these are missing. Where it cannot
    make the IR, it takes every Tensor for written.
    """
    plain = {name: unwrap_functional(value) for name, value in _with_bases(arguments).items()}
    try:
        module, _ = generate_ttir(kernel, plain, _blocks(arguments))
    except Exception:  # noqa: BLE001 - whatever Triton raises, torch gets it too, and warns of it
        return []
    text = str(module)
    return [operation for operation in ("tt.descriptor_reduce", "tt.descriptor_scatter") if operation in text]


def is_tensor_descriptor(value: object) -> bool:
    """Whether *value* is a `TensorDescriptor`, from which the tensor memory accelerator of a GPU loads and stores."""
    return isinstance(value, TensorDescriptor)


def described_tensor(value: Any) -> Any:
    """The Tensor of a tensor descriptor; any other value as it is."""
    return value.base if is_tensor_descriptor(value) else value


def settings_that_are_lost(descriptor: Any) -> dict[str, Any]:
    """What a tensor descriptor was made with beside a Tensor, sizes, strides and a block: only those are in a graph.

    Triton 3.6 has `padding`, 3.7 `round_f32_to_tf32` too.
    """
    kept = {"base", "shape", "strides", "block_shape"}
    others = [field for field in dataclasses.fields(descriptor) if field.name not in kept]
    found = {field.name: (getattr(descriptor, field.name), field.default) for field in others}
    return {name: value for name, (value, default) in found.items() if value != default}


def static_launcher_refuses_descriptors() -> bool:
    """Whether Inductor is told to launch kernels that a user wrote by its own launcher, which fails for descriptors.

    It asks a table for the type of each argument, and a KeyError ends the compilation, where it would leave a kernel to
    Triton for a NotImplementedError, as in torch 2.15 (`extract_type` in
    `torch/_inductor/runtime/static_triton_launcher.py`, torch 2.11 to 2.14; in 2.10 in `static_cuda_launcher.py`).
    """
    from torch._inductor import config

    if not config.static_launch_user_defined_triton_kernels:
        return False
    from torch._inductor.runtime import triton_heuristics

    heuristics: Any = triton_heuristics
    try:
        heuristics.StaticallyLaunchedCudaKernel.extract_type(None, "tensordesc<fp32[16, 16]>")
    except KeyError:
        return True
    except NotImplementedError:
        pass
    return False


def tensor_descriptors_are_taken() -> bool:
    """Whether torch finds the writes of kernels with tensor descriptors: for a GPU of capability 9.0 or more."""
    return bool(torch_triton_features.has_triton_tensor_descriptor_host_tma())


@contextmanager
def tensor_descriptors_taken(taken: bool) -> Iterator[None]:
    """Answer torch's question whether there is a GPU that has them (private; a function of torch 2.10 to 2.15)."""
    with mock.patch.object(torch_triton_features, "has_triton_tensor_descriptor_host_tma", return_value=taken):
        yield


def of_whole_tensor(descriptor: Any) -> Any:
    """The same descriptor, over a Tensor of its own sizes and strides: its base, or a view of that."""
    base, shape, strides = descriptor.base, list(descriptor.shape), list(descriptor.strides)
    if list(base.shape) == shape and list(base.stride()) == strides:
        return descriptor
    return dataclasses.replace(descriptor, base=base.as_strided(shape, strides))


def is_launch(target: object) -> bool:
    """Whether the target of a graph node is a Triton launch, functional or mutating."""
    return target in (triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation)


def launched_kernel(index: int) -> Any:
    """The kernel with the number *index*, which the node of a launch holds in its place."""
    return kernel_side_table.get_kernel(index)


def launch_constants(index: int) -> dict[str, Any]:
    """The constant arguments with the number *index*, which the node of a launch holds in their place."""
    return dict(kernel_side_table.get_constant_args(index))


def launch_blocks(metadata: dict[str, Any]) -> dict[str, list[int]]:
    """The size of a block for each tensor descriptor, by what the node of a launch holds of them."""
    blocks = {name: maybe_unpack_tma_stable_metadata(held) for name, held in metadata.items()}
    return {name: [int(size) for size in block[0]] for name, block in blocks.items() if block is not None}
