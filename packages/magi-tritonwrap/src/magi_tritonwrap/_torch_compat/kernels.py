# SPDX-License-Identifier: Apache-2.0
"""Kernels and launches: the classes that Triton makes, what torch puts around them, and how a graph holds a launch."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import inspect
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType, FunctionType
from typing import Any, cast
from unittest import mock

import torch
import triton
from torch._higher_order_ops.triton_kernel_wrap import (
    TraceableTritonKernelWrapper,
    TracingTritonHOPifier,
    create_tma_stable_metadata,
    generate_ttir,
    get_mutated_tensors,
    kernel_side_table,
    maybe_unpack_tma_stable_metadata,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._library import triton as torch_triton
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _triton as torch_triton_features
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction, TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

from .tracing import unwrap_functional


TRITON_WRAPPERS = (torch.library.wrap_triton, torch_triton.capture_triton)
"""The functions that put a kernel into a graph: `wrap_triton`, and the older name that some code imports."""
_INTERPRETER = "triton.runtime.interpreter"
_DTYPES = {
    "int1": torch.bool,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
"""What torch calls the dtypes for which Triton has another name."""


def kernel_classes() -> tuple[type[Any], ...]:
    """Everything that `triton.jit`, `triton.autotune` and `triton.heuristics` return."""
    return (JITFunction, Autotuner, Heuristics, *interpreted_classes())


def interpreted_classes() -> tuple[type[Any], ...]:
    """The class of kernels made under TRITON_INTERPRET=1; none if there cannot be such a kernel yet.

    Its module imports numpy, which Triton does not declare (3.6 to 3.9); without the interpreter nobody needs it.
    """
    if _INTERPRETER not in sys.modules and not triton.knobs.runtime.interpret:
        return ()
    return (importlib.import_module(_INTERPRETER).InterpretedFunction,)


def kernel_in_wrapper(value: object) -> Any:
    """The kernel inside what `torch.library.wrap_triton` returned; None for anything else."""
    is_wrapper = issubclass(type(value), TraceableTritonKernelWrapper)  # isinstance would ask a proxy for its class
    return cast("Any", value).kernel if is_wrapper else None


def calling_frame() -> FrameType:
    """The frame that called the caller. `inspect.stack` would read source files, which is too slow for a launch."""
    return sys._getframe(2)


def unsupported_autotune_arguments_are_ignored() -> bool:
    """Whether the user asked Inductor to ignore autotune settings that it does not support (torch 2.6 on)."""
    from torch._inductor import config

    return bool(config.unsafe_ignore_unsupported_triton_autotune_args)


def target_here() -> GPUTarget | None:
    """The GPU that Triton compiles for; None without one, where its driver raises a RuntimeError (3.2 to 3.9)."""
    try:
        return triton.runtime.driver.active.get_current_target()
    except RuntimeError:
        return None


def refuses_cpu_tensors(error: Exception) -> bool:
    """Whether an error of a launch says that there is no GPU, or that a tensor is not on it (Triton 3.2 to 3.9)."""
    return "active drivers" in str(error) or "cannot be accessed from Triton" in str(error)


def settings_of(kernel: JITFunction[Any]) -> dict[str, Any]:
    """The arguments of `triton.jit` that decide what *kernel* compiles to, as its author gave them.

    `repr` and `launch_metadata` are left out: they name a kernel and describe a launch to a profiler.
    """
    names = ("version", "do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline")
    return {name: getattr(kernel, name) for name in names}


def new_kernel(like: JITFunction[Any], function: FunctionType, source: str) -> Any:
    """A JITFunction with the settings of *like*, of another function and source.

    Triton keeps `repr=` in a private attribute and a table of kernels by name, which the new one must not enter
    (3.6 to 3.9).
    """
    from triton.runtime import jit

    table: dict[str, Any] = getattr(jit, "_triton_jit_function_registry", {})
    before = dict(table)
    parameters = inspect.signature(function).parameters
    settings = settings_of(like)
    for setting in ("do_not_specialize", "do_not_specialize_on_alignment"):
        # Each is a name or a position.
        given = (like.arg_names[one] if isinstance(one, int) else one for one in settings[setting])
        settings[setting] = [name for name in given if name in parameters]
    kernel = type(like)(function, repr=getattr(like, "_repr", None), launch_metadata=like.launch_metadata, **settings)
    table.clear()
    table.update(before)
    kernel._unsafe_update_src(source)
    return kernel


def another_kernel(kernel: JITFunction[Any]) -> Any:
    """A kernel that differs from *kernel* in nothing but that it is another object, and so is its function."""
    function: Any = kernel.fn
    like: Any = FunctionType(function.__code__, function.__globals__, None, function.__defaults__, function.__closure__)
    like.__kwdefaults__ = function.__kwdefaults__
    found: Any = copy.copy(kernel)
    found.fn = functools.update_wrapper(like, function)
    return found


class _Recorder(TracingTritonHOPifier):
    """What `wrap_triton` records a launch with, and tensor descriptors, which torch up to 2.14 takes from Dynamo only.

    The node of a launch has the Tensor of a descriptor as its argument, and the size of a block beside it
    (`torch/_higher_order_ops/triton_kernel_wrap.py`, torch 2.10 to 2.15). When the launch runs,
    `TensorDescriptor.from_tensor` makes the descriptor again, so it must be one of a whole Tensor.
    """

    def call_HOP(  # noqa: N802 - torch's name
        self, variable: Any, grids: list[Any], combined_args: dict[str, Any], *others: Any
    ) -> None:
        blocks = _blocks(combined_args)
        # torch 2.15 has two more arguments, by which it tells options from parameters, and takes descriptors here too.
        if not blocks or len(others) > 1:
            super().call_HOP(variable, grids, combined_args, *others)
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
    found = {name: value for name, value in arguments.items() if isinstance(value, TensorDescriptor)}
    return {name: create_tma_stable_metadata(list(value.block_shape)) for name, value in found.items()}


def _with_bases(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: described_tensor(value) for name, value in arguments.items()}


def record_launch(kernel: Any, grid: Any, arguments: dict[str, Any]) -> None:
    """Record `wrap_triton(kernel)[grid](**arguments)` in the graph being traced."""
    named = dict(arguments)
    positional = [named.pop(name) for name in itertools.takewhile(named.__contains__, kernel.arg_names)]
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


def dtype_of_reinterpreted(value: Any) -> torch.dtype | None:
    """The dtype for which a kernel takes the elements of what `triton.reinterpret` returned.

    None if torch has none, or one of another size.
    """
    dtype = value.dtype
    if not isinstance(dtype, torch.dtype):
        dtype = _DTYPES.get(dtype.name, getattr(torch, dtype.name, None))
    return None if dtype is None or dtype.itemsize != value.base.dtype.itemsize else dtype


def described_tensor(value: Any) -> Any:
    """The Tensor of a tensor descriptor or of a reinterpreted Tensor; any other value as it is."""
    return value.base if isinstance(value, TensorDescriptor | TensorWrapper) else value


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


def of_whole_tensor(value: Any) -> Any:
    """A tensor descriptor over a Tensor of its own sizes and strides: its base, or a view.

    A reinterpreted Tensor becomes a view of that dtype; any other value is returned as it is.
    """
    if isinstance(value, TensorWrapper):
        return value.base.view(dtype_of_reinterpreted(value))
    if not isinstance(value, TensorDescriptor):
        return value
    base, shape, strides = value.base, list(value.shape), list(value.strides)
    if list(base.shape) == shape and list(base.stride()) == strides:
        return value
    return dataclasses.replace(value, base=base.as_strided(shape, strides))


def is_launch(target: object) -> bool:
    """Whether the target of a graph node is a Triton launch, functional or mutating."""
    return target in (triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation)


def launched_kernel(index: int) -> Any:
    """The kernel with the number *index*, which the node of a launch holds in its place."""
    return kernel_side_table.get_kernel(index)


def writes_nothing(launch: torch.fx.Node) -> bool:
    """Whether torch finds no write in the kernel of a launch, the node of a graph that make_fx recorded."""
    held: dict[str, Any] = dict(launch.kwargs)
    given = {name: one.meta["val"] if isinstance(one, torch.fx.Node) else one for name, one in held["kwargs"].items()}
    numbers = held["kernel_idx"], held["constant_args_idx"]
    return not get_mutated_tensors(*numbers, given, held["tma_descriptor_metadata"])


def constants_and_blocks(launch: torch.fx.Node) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """The constant arguments of a launch, the node of a graph, and the size of a block for each tensor descriptor."""
    held: Any = launch.kwargs
    blocks = {name: maybe_unpack_tma_stable_metadata(one) for name, one in held["tma_descriptor_metadata"].items()}
    sizes = {name: [int(size) for size in block[0]] for name, block in blocks.items() if block is not None}
    return dict(kernel_side_table.get_constant_args(held["constant_args_idx"])), sizes
