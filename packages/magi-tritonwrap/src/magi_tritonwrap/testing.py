# SPDX-License-Identifier: Apache-2.0
"""Test see-through on a machine without a GPU: a driver that only knows its target, and the graph AOTAutograd makes."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from ._torch_compat.kernels import constants_and_blocks, is_launch, launched_kernel, tensor_descriptors_taken
from ._torch_compat.tracing import fake_tensors, keeping_graphs


_NUMBERS = itertools.count()
_FIRST_WITH_DESCRIPTORS = 90


class StubDriver:
    """A Triton driver that knows only which GPU to compile for.

    torch finds out which tensors a kernel writes by compiling it to Triton IR, which asks the driver for its target.
    """

    def __init__(self, target: GPUTarget | None = None) -> None:
        self._target = target or GPUTarget("cuda", 90, 32)

    def get_current_target(self) -> GPUTarget:
        """The GPU that kernels are compiled for."""
        return self._target


@contextmanager
def stub_driver(target: GPUTarget | None = None) -> Iterator[StubDriver]:
    """Make Triton compile as for a GPU; nothing can be launched on it.

    Args:
        target: the GPU; by default one of compute capability 9.0 with warps of 32.
    """
    stub = StubDriver(target)
    config = triton.runtime.driver
    previous = config._active  # noqa: SLF001 - reading `active` would create a driver, and there is none
    config.set_active(stub)
    chosen = stub.get_current_target()
    try:
        with tensor_descriptors_taken(chosen.backend == "cuda" and chosen.arch >= _FIRST_WITH_DESCRIPTORS):
            yield stub
    finally:
        config._active = previous  # noqa: SLF001 - set_active(None) means the same, and mypy's stub forbids it


def aot_graphs(
    fn: Callable[..., Any], *inputs: Any, dynamic: bool | None = None, device: str = "cuda"
) -> list[torch.fx.GraphModule]:
    """Compile *fn* up to AOTAutograd, on fake tensors, and return the graphs that Inductor would be given.

    The graphs are not run, so they may write into inputs or read data.

    Args:
        fn: the function to compile, `fullgraph=True`.
        inputs: arguments of *fn*; tensors are replaced by fake ones of the same shape, dtype and `requires_grad`.
        dynamic: as in `torch.compile`.
        device: where the fake tensors are. A CPU build of torch aborts on gradients of fake CUDA tensors (seen on
            2.13); fake CPU tensors show the same launches, unless an op has another body for CPUs.

    Example:
        >>> with stub_driver():
        ...     graphs = aot_graphs(lambda x: x + 1, torch.ones(4))
        >>> [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
        ['aten.add.Tensor']
    """
    graphs: list[torch.fx.GraphModule] = []
    with fake_tensors():
        fakes = [_fake(value, device) if isinstance(value, torch.Tensor) else value for value in inputs]
        torch.compile(_alone(fn), backend=keeping_graphs(graphs), fullgraph=True, dynamic=dynamic)(*fakes)
    return graphs


def _alone(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return *fn* called from separate code and globals, so that compilations are counted and cleaned up separately.

    A separate name keeps Dynamo from marking a size as dynamic because it differs from an earlier call's.
    """

    def program(*inputs: Any) -> Any:
        return fn(*inputs)

    return FunctionType(
        program.__code__.replace(co_name=f"program_{next(_NUMBERS)}"),
        {"__name__": __name__, "__builtins__": builtins},
        "program",
        None,
        program.__closure__,
    )


def _fake(value: torch.Tensor, device: str) -> torch.Tensor:
    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return fake.requires_grad_(value.requires_grad)


@dataclass(frozen=True)
class GraphLaunch:
    """One Triton launch in a graph.

    Attributes:
        kernel: the JITFunction or Autotuner that is launched.
        grids: a grid for each config.
        cloned: parameters of the kernel that it writes; functionalisation clones their tensors.
        arguments: names of the parameters that the graph passes.
        constants: values that a graph cannot hold, such as dtypes.
        blocks: for each parameter that is a `TensorDescriptor`, the size of its block; its tensor is in *arguments*.
    """

    kernel: Any
    grids: list[Any]
    cloned: list[str]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    blocks: dict[str, list[int]]


def launches_of(graph: torch.fx.GraphModule) -> list[GraphLaunch]:
    """The launches in a graph, in order, functional or mutating."""
    return [
        GraphLaunch(
            launched_kernel(node.kwargs["kernel_idx"]),
            list(node.kwargs["grid"]),
            list(node.kwargs.get("tensors_to_clone", ())),
            dict(node.kwargs["kwargs"]),
            *constants_and_blocks(node),
        )
        for node in graph.graph.nodes
        if is_launch(node.target)
    ]
