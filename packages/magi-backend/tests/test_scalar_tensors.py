# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel of the user reads a constant without dimensions, as a package of AOTInductor holds a buffer."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from _pretended_gpu import pretended_gpu
from magi_backend import magi_register_custom_op
from magi_backend._repairs._defect import repaired
from magi_backend._repairs.kernels import KEEP_SCALAR_TENSORS
from magi_tritonwrap.testing import aot_graphs, launches_of
from torch import Tensor
from torch._inductor.compile_fx import compile_fx_inner
from torch._subclasses.fake_tensor import FakeTensorMode


pytestmark = pytest.mark.kernels


@triton.jit
def scaled(x, scale, out):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * 16 + tl.arange(0, 16)
    tl.store(out + at, tl.load(x + at) * tl.load(scale))


@magi_register_custom_op("scalar_tensors::multiplied")
def multiplied(x: Tensor, scale: Tensor) -> Tensor:
    out = torch.empty_like(x)
    scaled[(x.numel() // 16,)](x, scale, out)
    return out


def code_with_a_constant() -> str:
    """What Inductor writes for the graph of `multiplied` where *scale* is a constant."""
    (graph,) = aot_graphs(multiplied, torch.ones(64), torch.tensor(2.0))
    (launch,) = launches_of(graph)
    scale = launch.arguments["scale"]
    graph.register_buffer("scale", torch.tensor(2.0))
    with graph.graph.inserting_before(scale):
        scale.replace_all_uses_with(graph.graph.get_attr("scale"))
    graph.graph.erase_node(scale)
    graph.recompile()
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(Exception, match="Generated") as caught:
        compile_fx_inner(graph, [torch.empty(64, device="cuda")])
    return str(caught.value)


def test_a_kernel_reads_a_constant_without_dimensions() -> None:
    reported: list[str] = []
    with pretended_gpu(), repaired([KEEP_SCALAR_TENSORS], reported.append):
        code = code_with_a_constant()
    assert "scaled_0.run(arg0_1, constant0, buf0" in code
    assert reported == [KEEP_SCALAR_TENSORS.name]


def test_torch_alone_does_not_compile_it() -> None:
    with pretended_gpu(), pytest.raises(AssertionError, match="Constant"):
        code_with_a_constant()
