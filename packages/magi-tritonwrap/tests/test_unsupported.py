# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Kernels and launches that no graph can carry, in code that one cannot edit: the op stays whole and says why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
import triton.language as tl
import tritonwrap_patterns as patterns
from magi_tritonwrap import (
    OpaqueFallbackWarning,
    TritonWrapError,
    make_see_through,
    see_through_report,
    triton_op,
    unsupported_launches,
)
from magi_tritonwrap.testing import aot_graphs, launches_of
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed


if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ops


pytestmark = pytest.mark.usefixtures("stub")


@triton.autotune(configs=[triton.Config({"BLOCK": 128}, pre_hook=lambda args: None)], key=["n"])
@triton.jit
def hooked_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)


def launch(kernel: Any, **options: Any) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[patterns.blocks(x.numel())](x, out, x.numel(), **options)
        return out

    return body


def with_pdl(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    patterns.double_kernel[patterns.blocks(x.numel())](x, out, x.numel(), BLOCK=128, launch_pdl=True)
    return out


HOOKS = {"hooked": hooked_kernel}


def in_a_table(x: Tensor) -> Tensor:
    return launch(HOOKS["hooked"])(x)


def test_a_kernel_that_functions_name_is_refused_at_decoration(ops: Ops) -> None:
    body, reason = launch(hooked_kernel), r"has a triton.Config with pre_hook="
    op = ops.define("refused", body)
    with pytest.raises(TritonWrapError, match=reason):
        make_see_through(op, body)
    with pytest.warns(OpaqueFallbackWarning, match=rf"refused stays opaque to the compiler.*{reason}"):
        report = make_see_through(op, body, on_unsupported="opaque")
    assert not report.see_through
    assert str(report).startswith(f"{ops.namespace}::refused: opaque, Triton kernel ")
    (graph,) = aot_graphs(op, torch.ones(300))
    assert op in {node.target for node in graph.graph.nodes}


ONLY_THE_TRACE: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (with_pdl, "launched with launch_pdl="),
    (launch(patterns.double_kernel, BLOCK=128, enable_fp_fusion=True), "launched with enable_fp_fusion="),
    (launch(patterns.double_kernel, BLOCK=128, disallow_acc_multi_buffer=True), "launched with disallow_acc_multi"),
    (in_a_table, "has a triton.Config with pre_hook="),
]


@pytest.mark.parametrize("how", ["op", "setting", "neither"])
@pytest.mark.parametrize(("body", "reason"), ONLY_THE_TRACE)
def test_what_only_the_trace_tells(body: Callable[[Tensor], Tensor], reason: str, how: str, ops: Ops) -> None:
    op = ops.define("late", body)
    make_see_through(op, body, on_unsupported="opaque" if how == "op" else "error")
    with unsupported_launches("opaque" if how == "setting" else "error"):
        if how == "neither":
            with pytest.raises(BackendCompilerFailed, match=reason):
                aot_graphs(op, torch.ones(300))
            return
        with pytest.warns(OpaqueFallbackWarning, match=f"late stays opaque.*{reason}"):
            (graph,) = aot_graphs(op, torch.ones(300))
    assert launches_of(graph) == []
    assert len(see_through_report(op).fallbacks) == 1


def test_triton_op_takes_it_too(ops: Ops) -> None:
    options: Any = {"mutates_args": (), "schema": "(Tensor x) -> Tensor"}
    with pytest.raises(TritonWrapError):
        triton_op(f"{ops.namespace}::hooked", launch(hooked_kernel), **options)
    with pytest.warns(OpaqueFallbackWarning):
        op = triton_op(f"{ops.namespace}::hooked", launch(hooked_kernel), on_unsupported="opaque", **options)
    assert not see_through_report(op).see_through
