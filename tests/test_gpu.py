# SPDX-License-Identifier: Apache-2.0
"""On a GPU: kernels forward and backward in float64's sight, splits, streams, CUDA graphs, and the VAE."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _models
import pytest
import torch
import triton
import triton.language as tl
from _packages import check_elsewhere
from magi_backend import aot_compile, explain, magi_register_custom_op, wait
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Affine:
    scale: float = 2.0
    shift: float = 1.0


@triton.jit
def sine_kernel(x, out, n, scale, shift, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.sin(tl.load(x + at, at < n) * scale + shift), at < n)


@triton.jit
def sine_backward_kernel(x, grad, out, n, scale, shift, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slope = tl.cos(tl.load(x + at, at < n) * scale + shift) * scale
    tl.store(out + at, tl.load(grad + at, at < n) * slope, at < n)


def _launch(kernel: Any, cfg: Affine, *inputs: Tensor) -> Tensor:
    out = torch.empty_like(inputs[0])
    grid = (triton.cdiv(out.numel(), 256),)
    kernel[grid](*(x.contiguous() for x in inputs), out, out.numel(), cfg.scale, cfg.shift, BLOCK=256)
    return out


@magi_register_custom_op("magi_gpu::sine_backward")
def sine_backward(x: Tensor, grad: Tensor, cfg: Affine) -> Tensor:
    return _launch(sine_backward_kernel, cfg, x, grad)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.cfg = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return sine_backward(ctx.saved_tensors[0], grad, ctx.cfg), None


@magi_register_custom_op("magi_gpu::sine", setup_context_fn=_save, backward_fn=_backward)
def sine(x: Tensor, cfg: Affine) -> Tensor:
    """A dataclass operator that launches a kernel, takes its fake from its body, and has a kernel for its backward."""
    return _launch(sine_kernel, cfg, x)


@magi_register_custom_op("magi_gpu::boundary", is_subgraph_boundary=True)
def boundary(x: Tensor, cfg: Affine) -> Tensor:
    return _launch(sine_kernel, cfg, x)


CFG = Affine(3.0, -1.0)


def sine_reference(x: Tensor) -> Tensor:
    """What both operators compute with `CFG`, without a kernel."""
    return (x * 3.0 - 1.0).sin()


@pytest.mark.notices_broken_kernels
@pytest.mark.parametrize("how", ["eager", "inductor", "magi"])
def test_kernels_forward_and_backward_against_float64(how: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return sine(x.exp(), CFG) * 2

    run = fn if how == "eager" else torch.compile(fn, backend=how, fullgraph=True, dynamic=True)
    for shape in ((100, 7), (33, 5)):
        x = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).requires_grad_()
        exact = x.detach().double().requires_grad_()
        expected = sine_reference(exact.exp()) * 2

        out = run(x)

        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        (expected_grad,) = torch.autograd.grad(expected.square().sum(), exact)
        torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-3, atol=1e-3)


def test_a_dataclass_operator_with_a_kernel_and_a_backward_is_seen_through() -> None:
    def fn(x: Tensor) -> Tensor:
        return sine(x.sin(), CFG).cos()

    explained = explain(fn, dynamic=True)
    explained(torch.randn(100, 7, device="cuda", requires_grad=True))
    report = explained(torch.randn(33, 5, device="cuda", requires_grad=True))

    assert report.agrees, report
    (op,) = (op for op in report.compilations[0].ops if op.name == "magi_gpu::sine")
    assert "1 Triton kernel" in op.description
    assert not op.stays
    forward, backward = (
        next(graph for graph in report.compilations[0].graphs if graph.kind == kind) for kind in ("forward", "backward")
    )
    assert "magi_gpu.sine" not in forward.externs
    assert any("sine_kernel" in kernel for kernel in forward.kernels)
    assert any("sine_backward_kernel" in kernel for kernel in backward.kernels)


@triton.autotune([triton.Config({"BLOCK": block}) for block in (128, 512)], key=["n"])
@triton.jit
def tuned_kernel(x, out, n, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * scale, at < n)


@magi_register_custom_op("magi_gpu::tuned")
def tuned(x: Tensor, cfg: Affine) -> Tensor:
    out = torch.empty_like(x)
    tuned_kernel[lambda meta: (triton.cdiv(out.numel(), meta["BLOCK"]),)](x, out, out.numel(), cfg.scale)
    return out


class Launching(torch.nn.Module):
    """A kernel with a fixed block, and one that is tuned."""

    def forward(self, x: Tensor) -> Tensor:
        return tuned(sine(x.exp(), CFG), Affine(2.0)) + 1


def test_launches_are_in_a_package_that_runs_without_triton(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", min=2, max=4096)
    x = torch.randn(64, 7, device="cuda")
    package = aot_compile(Launching(), tmp_path / "model.pt2", (x,), ({0: batch},))

    values = [torch.randn(size, 7, device="cuda") for size in (2, 33, 4096)]
    check_elsewhere(package, [(value, sine_reference(value.exp()) * 2 + 1) for value in values], tmp_path)


def test_explaining_replays_the_random_numbers_of_the_gpu() -> None:
    dropout, x = torch.nn.Dropout(), torch.randn(64, 64, device="cuda")
    state = torch.cuda.get_rng_state()

    # Inductor draws as eager does when it is told to.
    report = explain(dropout, {"fallback_random": True})(x)

    assert report.agrees, report
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.parametrize(
    ("operator", "how"),
    [(sine, {"options": {"magi.mode": "reduce-overhead"}}), (boundary, {"mode": "reduce-overhead"})],
    ids=["whole", "split"],
)
def test_cuda_graphs(operator: object, how: Any) -> None:
    def fn(x: Tensor, weight: Tensor, op: Any) -> Tensor:
        return op(x @ weight, CFG).relu() @ weight  # type: ignore[no-any-return]

    def op_without_kernel(x: Tensor, cfg: Affine) -> Tensor:
        return sine_reference(x)

    compiled = torch.compile(fn, backend="magi", **how)
    weight = torch.randn(64, 64, device="cuda")
    with torch.no_grad():
        for seed in range(5):
            x = torch.randn(16, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
            torch.compiler.cudagraph_mark_step_begin()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
                out = compiled(x, weight, operator)
            torch.testing.assert_close(out, fn(x, weight, op_without_kernel), rtol=1e-3, atol=2e-3)
    assert operator is boundary or any("cudaGraphLaunch" in event.key for event in seen.key_averages())


@pytest.mark.notices_broken_kernels
def test_pieces_between_boundary_operators() -> None:
    def fn(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            x = boundary(x @ weight, CFG) + x
        return x

    compiled = torch.compile(fn, backend="magi", fullgraph=True, dynamic=True)
    weight = torch.randn(32, 32, device="cuda") / 8
    for rows in (16, 9):
        x = expected = torch.randn(rows, 32, device="cuda")
        for _ in range(3):
            expected = sine_reference(expected @ weight) + expected

        torch.testing.assert_close(compiled(x, weight), expected, rtol=1e-3, atol=2e-3)


@pytest.mark.notices_broken_kernels
def test_two_streams() -> None:
    compiled = torch.compile(lambda x: sine(x.exp(), CFG) + 1, backend="magi", fullgraph=True)
    inputs = [torch.randn(1 << 16, device="cuda") for _ in range(8)]
    compiled(inputs[0])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    results = []
    for index, x in enumerate(inputs):
        with torch.cuda.stream(streams[index % 2]):
            results.append(compiled(x))
    torch.cuda.synchronize()

    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, sine_reference(x.exp()) + 1, rtol=1e-3, atol=1e-3)


def test_code_that_is_made_beside_the_calls_is_tuned_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    original: Any = CachingAutotuner.benchmark_all_configs
    benchmarked: list[str] = []

    def noted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        benchmarked.append(kernel.fn.__name__)
        return original(kernel, *args, **kwargs)

    def turned(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(x.t()) + y  # tiles of two dimensions have several configurations

    monkeypatch.setattr(CachingAutotuner, "benchmark_all_configs", noted)
    options: Any = {"magi.hot_sizes": 1, "magi.hot_after": 2, "magi.hot_in_background": True}
    compiled = torch.compile(turned, backend="magi", dynamic=True, options=options)

    def call(rows: int) -> None:
        x, y = torch.randn(rows, 333, device="cuda"), torch.randn(333, rows, device="cuda")
        torch.testing.assert_close(compiled(x, y), turned(x, y))

    call(640)
    assert benchmarked, "the code for any size is tuned in the call"
    call(512)
    call(512)
    assert wait(120)
    benchmarked.clear()
    for _ in range(600):  # more launches than it takes to try each configuration
        call(512)
    assert not benchmarked


@pytest.mark.parametrize("backend", ["inductor", "magi"])
def test_vae_decode_at_several_sizes(backend: str) -> None:
    pytest.importorskip("diffusers")
    model = _models.vae().eval().requires_grad_(False)
    exact = _models.vae().eval().requires_grad_(False).double().cuda()
    compiled = torch.compile(model.cuda(), backend=backend, dynamic=True)

    with torch.no_grad():
        for size in ((1, 4, 8, 8), (2, 4, 12, 8), (1, 4, 16, 24)):
            latents = torch.randn(size, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                result = compiled(latents)
            torch.testing.assert_close(result.double(), exact(latents.double()), rtol=1e-3, atol=1e-3)
