# SPDX-License-Identifier: Apache-2.0
"""An op of Triton kernels that gets CPU tensors says so by name, with both ways out; with a CPU body it works."""

from __future__ import annotations

import pytest
import torch
import tritonwrap_patterns as patterns
from graph_questions import Ops
from magi_tritonwrap import CpuTensorError, translate_cpu_errors, triton_op
from magi_tritonwrap.testing import aot_graphs
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed


WAYS_OUT = r'launches Triton kernels, which need a GPU.*register_kernel\(op, "cpu"\), or set TRITON_INTERPRET=1'

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU Triton has a driver")


def test_cpu_tensors_without_a_body_for_them(ops: Ops) -> None:
    name = f"{ops.namespace}::on_cpu"
    op = triton_op(name, patterns.module_level, mutates_args=())
    with pytest.raises(CpuTensorError, match=f"^{name} {WAYS_OUT}"):
        op(torch.ones(4))
    with pytest.raises(BackendCompilerFailed, match=f"{name} {WAYS_OUT}"):
        aot_graphs(op, torch.ones(4), device="cpu")

    op.register_kernel("cpu")(patterns.twice)
    assert torch.equal(op(torch.ones(4)), torch.full((4,), 2.0))
    (graph,) = aot_graphs(op, torch.ones(4), device="cpu")
    assert op._opoverload in {node.target for node in graph.graph.nodes}


def test_a_body_that_launches_nothing_for_cpu_tensors_is_traced(ops: Ops) -> None:
    def body(x: Tensor) -> Tensor:
        return x * 2 if x.device.type == "cpu" else patterns.module_level(x)

    op = triton_op(f"{ops.namespace}::branches", body, mutates_args=(), schema="(Tensor x) -> Tensor")
    assert torch.equal(op(torch.ones(4)), torch.full((4,), 2.0))
    (graph,) = aot_graphs(op, torch.ones(4), device="cpu")
    assert torch.ops.aten.mul.Tensor in {node.target for node in graph.graph.nodes}
    assert torch.equal(torch.compile(op, fullgraph=True)(torch.ones(4)), torch.full((4,), 2.0))


def test_other_errors_and_other_devices_stay_as_they_are() -> None:
    def refuses(x: object) -> None:
        raise ValueError("x is too small")

    def no_driver(x: object) -> None:
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    with pytest.raises(ValueError, match="^x is too small$"):
        translate_cpu_errors(refuses, "mylib::op")(torch.ones(2))
    for other in (torch.ones(2, device="meta"), 3):
        with pytest.raises(RuntimeError, match="^0 active drivers"):
            translate_cpu_errors(no_driver, "mylib::op")(other)
