# SPDX-License-Identifier: Apache-2.0
"""The code that Inductor writes for a GPU that is not there, from fake CUDA tensors."""

from __future__ import annotations

import contextlib
import importlib.util
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from magi_tritonwrap.testing import stub_driver
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode


H200 = types.SimpleNamespace(
    major=9,
    minor=0,
    name="no GPU",
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=1 << 36,
    L2_cache_size=50 << 20,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    gcnArchName="",
)
"""What a GPU that is not there says of itself."""


class Generated(Exception):
    """Ends a compilation when Inductor has written the code."""


@contextlib.contextmanager
def pretended_gpu(load: Callable[[GraphLowering], Any] | None = None) -> Iterator[list[str]]:
    """Inductor writes code for a GPU that is not there, and *load* takes its place where it would load the code.

    By default the code is added to the list that is yielded, and `Generated` is raised.
    """
    codes: list[str] = []

    def stop(graph: GraphLowering) -> None:
        code: Any = graph.codegen()[0]
        codes.append(getattr(code, "value", code))
        raise Generated

    with (
        mock.patch.object(GraphLowering, "compile_to_module", load or stop),
        # They trace patterns on the GPU.
        mock.patch("torch._inductor.fx_passes.joint_graph.lazy_init", return_value=None),
        mock.patch("torch._inductor.fx_passes.post_grad.lazy_init", return_value=None),
        mock.patch("torch._inductor.scheduler.has_triton", return_value=True),
        mock.patch.object(CudaInterface.Worker, "get_device_properties", return_value=H200),
        mock.patch.object(CudaInterface, "get_device_properties", return_value=H200),
        mock.patch.object(CudaInterface, "get_compute_capability", return_value=90),
        mock.patch.object(CudaInterface, "is_bf16_supported", return_value=True),
        mock.patch("torch.cuda.get_device_properties", return_value=H200),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        mock.patch("torch.cuda.current_device", return_value=0),
        torch._inductor.config.patch(fx_graph_cache=False, pattern_matcher=False),
        stub_driver(),
    ):
        yield codes


def generated(
    fn: Callable[..., Any],
    *tensors: Tensor,
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> str:
    """The code that Inductor writes for *fn* of *tensors* on a GPU; of one of 256 elements where none is given.

    *tensors* say what theirs are like.
    """
    if torch.__version__.startswith("2.10."):
        pytest.skip("torch 2.10 compiles no function of tensors that are fake (`detect_fake_mode`)")
    with pretended_gpu() as codes, FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty(256, device="cuda", dtype=dtype)]
        if tensors:
            given = [torch.empty(tensor.shape, device="cuda", dtype=tensor.dtype) for tensor in tensors]
        with pytest.raises(Exception, match="Generated"):
            torch.compile(fn, fullgraph=True, **how)(*given)
    return codes[0]


def module_of(source: str, folder: Path) -> types.ModuleType:
    """The module with this *source*, from a file in *folder*, where Triton looks for the text of a kernel."""
    file = folder / "kernel.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("generated_kernel", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
