# SPDX-License-Identifier: Apache-2.0
"""On a GPU: Triton kernels seen through, CUDA graphs with and without splits, and the VAE example."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from magi_backend import explain, magi_register_custom_op
from torch import Tensor


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@dataclass(frozen=True)
class Affine:
    scale: float = 2.0
    shift: float = 1.0


@triton.jit
def affine_kernel(x, out, n, scale, shift, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * scale + shift, at < n)


def _launch(x: Tensor, cfg: Affine) -> Tensor:
    out = torch.empty_like(x)
    affine_kernel[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), cfg.scale, cfg.shift, BLOCK=256)
    return out


def _save(ctx: object, inputs: tuple[object, ...], output: Tensor) -> None:
    ctx.cfg = inputs[1]  # type: ignore[attr-defined]


@magi_register_custom_op(
    "magi_gpu::affine", setup_context_fn=_save, backward_fn=lambda ctx, grad: (grad * ctx.cfg.scale, None)
)
def affine(x: Tensor, cfg: Affine) -> Tensor:
    """A dataclass operator that launches a kernel, takes its fake from its body, and has a backward."""
    return _launch(x, cfg)


@magi_register_custom_op("magi_gpu::boundary", is_subgraph_boundary=True)
def boundary(x: Tensor, cfg: Affine) -> Tensor:
    return _launch(x, cfg)


CFG = Affine(3.0, -1.0)


def test_a_dataclass_operator_with_a_kernel_and_a_backward_is_seen_through() -> None:
    def fn(x: Tensor) -> Tensor:
        return affine(x.sin(), CFG).cos()

    explained = explain(fn, dynamic=True)
    explained(torch.randn(100, 7, device="cuda", requires_grad=True))
    report = explained(torch.randn(33, 5, device="cuda", requires_grad=True))

    assert report.agrees, report
    (op,) = report.compilations[0].ops
    assert "1 Triton kernel" in op.description
    forward = next(graph for graph in report.compilations[0].graphs if graph.kind == "forward")
    assert "magi_gpu.affine" not in forward.externs
    assert any("affine_kernel" in kernel for kernel in forward.kernels)


@pytest.mark.parametrize("operator", [affine, boundary], ids=["whole", "split"])
def test_cuda_graphs(operator: object) -> None:
    def fn(x: Tensor, weight: Tensor) -> Tensor:
        return operator(x @ weight, CFG).relu() @ weight  # type: ignore[operator, no-any-return]

    compiled = torch.compile(fn, backend="magi", mode="reduce-overhead")
    weight = torch.randn(64, 64, device="cuda")
    with torch.no_grad():
        for seed in range(5):
            x = torch.randn(16, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(x, weight), fn(x, weight), rtol=1e-4, atol=1e-3)


def test_cuda_graphs_are_captured() -> None:
    from torch.profiler import ProfilerActivity, profile

    compiled = torch.compile(
        lambda x: (affine(x, CFG) @ x).relu(), backend="magi", options={"magi.mode": "reduce-overhead"}
    )
    x = torch.randn(64, 64, device="cuda")
    with torch.no_grad():
        for _ in range(4):
            compiled(x)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
            compiled(x)

    assert any("cudaGraphLaunch" in event.key for event in seen.key_averages())


def test_the_vae_example(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    program = Path(__file__).parent.parent / "examples" / "vae_decode.py"

    done = subprocess.run(
        [sys.executable, program, "--out", tmp_path], capture_output=True, text=True, check=False, timeout=600
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiled and eager agree" in done.stdout
