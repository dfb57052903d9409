# SPDX-License-Identifier: Apache-2.0
"""On a GPU, each pattern runs under Inductor: right numbers, and generated code that launches the kernel itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import tritonwrap_patterns as patterns
from graph_questions import Ops
from magi_tritonwrap import capture_launches, see_through_report, triton_op, wrap_kernels
from magi_tritonwrap.testing import launches_of
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx


pytestmark = pytest.mark.gpu


NOTICE_BROKEN_KERNELS = {"module_level", "helper", "autotune_two_configs", "heuristics_alone", "run_method"}
PATTERNS = [
    pytest.param(name, marks=[pytest.mark.notices_broken_kernels] if name in NOTICE_BROKEN_KERNELS else [])
    for name in patterns.PATTERNS
]


def afresh(fn: Any, **how: Any) -> Any:
    """*fn*, compiled by a compiler that knows nothing yet."""
    torch.compiler.reset()
    return torch.compile(fn, fullgraph=True, **how)


def some_tensor(size: int = 3000) -> Tensor:
    return torch.randn(size, device="cuda")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_under_inductor(ops: Ops, name: str, dynamic: bool) -> None:
    pattern = patterns.PATTERNS[name]
    op = triton_op(f"{ops.namespace}::{name}", pattern.body, mutates_args=(), schema="(Tensor x) -> Tensor")
    x = some_tensor() if name != "launcher_made_at_import" else some_tensor(300)
    torch.testing.assert_close(op(x), pattern.reference(x))

    compiled = afresh(lambda value: op(value.relu()) + 1, dynamic=dynamic)
    result, (code, *_) = run_and_get_code(compiled, x)

    torch.testing.assert_close(result, pattern.reference(x.relu()) + 1)
    assert f"torch.ops.{ops.namespace}" not in code
    assert "triton" in code
    report = see_through_report(op)
    assert report.see_through
    assert not report.fallbacks
    if dynamic and name != "launcher_made_at_import":
        other = some_tensor(5001)
        torch.testing.assert_close(compiled(other), pattern.reference(other.relu()) + 1)


def test_wrapped_function_is_traced_by_dynamo() -> None:
    x = some_tensor()
    compiled = afresh(wrap_kernels(patterns.helper))
    torch.testing.assert_close(compiled(x), x * 2)
    with capture_launches():
        torch.testing.assert_close(patterns.helper(x), x * 2)
    torch.testing.assert_close(afresh(patterns.helper)(x), x * 2)


def test_launches_dropped_and_traced_beside_a_real_driver() -> None:
    x = some_tensor()
    out = torch.zeros_like(x)
    with capture_launches(drop=True) as log:
        patterns.launch_double(x, out)
    assert [launch.name for launch in log.launches] == ["double_kernel"]
    assert not out.any()
    assert len(launches_of(make_fx(wrap_kernels(patterns.helper), tracing_mode="fake")(x))) == 1


@pytest.mark.notices_broken_kernels
def test_gradient_through_a_seen_op(ops: Ops) -> None:
    op = triton_op(f"{ops.namespace}::gradient", patterns.helper, mutates_args=())
    op.register_autograd(lambda ctx, grad: op(grad))
    x = some_tensor().requires_grad_()
    afresh(lambda value: op(value.sin()).square().sum())(x).backward()
    expected = torch.autograd.grad((x.sin() * 2).square().sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.notices_broken_kernels
def test_mutation_through_a_seen_op(ops: Ops) -> None:
    def double_in_place(x: Tensor) -> None:
        patterns.double_kernel[patterns.blocks(x.numel())](x, x, x.numel(), BLOCK=128)

    op = triton_op(f"{ops.namespace}::in_place", double_in_place, mutates_args=("x",))
    x = some_tensor()

    def program(value: Tensor) -> Tensor:
        y = value + 1
        op(y)
        return y + 1

    torch.testing.assert_close(afresh(program)(x), (x + 1) * 2 + 1)
    buffer = some_tensor()
    expected = buffer * 2
    afresh(lambda value: op(value))(buffer)  # noqa: PLW0108 - Dynamo wants a Python function
    torch.testing.assert_close(buffer, expected)


def test_compile_cache_across_resets(ops: Ops, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    op = triton_op(f"{ops.namespace}::cached", patterns.helper, mutates_args=())
    x = some_tensor()
    for expected in ("autograd_cache_miss", "autograd_cache_hit"):
        counters.clear()
        torch.testing.assert_close(afresh(lambda value: op(value) + 3)(x), x * 2 + 3)
        assert counters["aot_autograd"][expected] == 1
    assert see_through_report(op).cache == "keyed"


@triton.jit
def scaled_and_shifted(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * 0.1 + 1.0, at < n)


@pytest.mark.skipif(torch.version.hip is not None, reason="one of another backend")
def test_launch_options_are_those_of_eager(ops: Ops) -> None:
    """A product and a sum that are rounded apart differ from one fused operation in the last bit."""

    def launching(name: str, **options: Any) -> Any:
        def body(x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            scaled_and_shifted[(24,)](x, out, x.numel(), BLOCK=128, **options)
            return out

        return triton_op(f"{ops.namespace}::{name}", body, mutates_args=())

    seen = [launching(f"fuses_{fuses}", enable_fp_fusion=fuses) for fuses in (True, False)]
    seen.append(launching("waits", launch_pdl=True))
    x = some_tensor()
    compiled = afresh(lambda value: [op(value) for op in seen])
    (fused, apart, waited), (code, *_) = run_and_get_code(compiled, x)
    assert torch.equal(fused, seen[0](x))
    assert torch.equal(apart, seen[1](x))
    assert not torch.equal(fused, apart)
    assert torch.equal(waited, seen[2](x))
    assert "'launch_pdl': True" in code
