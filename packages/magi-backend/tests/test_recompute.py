# SPDX-License-Identifier: Apache-2.0
"""How often operators run in a training step: compute-sensitive ones once, whatever asks for them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from magi_backend import explain, magi_register_custom_op
from torch import Tensor
from torch.utils.checkpoint import checkpoint


calls: list[str] = []


def register(name: str, body: Callable[[Tensor], Tensor], *, sensitive: bool = True) -> Any:
    return magi_register_custom_op(
        f"magi_backend_recompute::{name}",
        infer_output_meta_fn=["x"],
        setup_context_fn=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
        backward_fn=lambda ctx, grad: grad * 2 * ctx.saved_tensors[0],
        is_compute_sensitive=sensitive,
    )(body)


def square(x: Tensor) -> Tensor:
    calls.append("square")
    return x * x


OPS = {"sensitive": register("sensitive", square), "cheap": register("cheap", square, sensitive=False)}
WEIGHT = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))


def runs(name: str, *, checkpointed: bool, budget: float | None) -> int:
    """How often the body of the operator runs in one forward and backward of a compiled block."""

    def block(x: Tensor) -> Tensor:
        return torch.sin(OPS[name](torch.sin(x @ WEIGHT)).cos()).exp()

    def fn(x: Tensor) -> Tensor:
        y = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        return y.sum()

    options: dict[str, Any] = {} if budget is None else {"magi.memory_budget": budget}
    compiled = torch.compile(fn, backend="magi", options=options or None)
    x = torch.randn(8, 16, requires_grad=True)
    compiled(x).backward()  # compiles, and checks the operator's fake
    calls.clear()
    compiled(x).backward()
    return len(calls)


@pytest.mark.parametrize(
    ("checkpointed", "budget", "cheap_runs"), [(False, None, 1), (True, None, 2), (False, 0.5, 2), (True, 0.0, 2)]
)
def test_a_compute_sensitive_operator_runs_once(checkpointed: bool, budget: float | None, cheap_runs: int) -> None:
    assert runs("cheap", checkpointed=checkpointed, budget=budget) == cheap_runs
    assert runs("sensitive", checkpointed=checkpointed, budget=budget) == 1


def saved(budget: float | None) -> list[str]:
    """The operators whose outputs the forward of a small stack gives to its backward."""
    options = {"magi.progress": False} | ({} if budget is None else {"magi.memory_budget": budget})
    weights = [WEIGHT.clone().requires_grad_() for _ in range(2)]

    def fn(x: Tensor) -> Tensor:
        for weight in weights:
            x = torch.tanh(torch.sin(x @ weight).exp() + 1) * x
        return x

    found: list[list[str]] = []

    def look(graph: torch.fx.Graph) -> None:
        found.append([str(node.target) for node in graph.output_node().all_input_nodes])

    report = explain(fn, {**options, "post_grad_custom_pre_pass": look})(torch.randn(8, 16, requires_grad=True))
    assert report.agrees
    return found[0]


def test_with_a_budget_products_are_saved_and_the_rest_is_recomputed() -> None:
    everything, least = saved(None), saved(0.0)

    assert "aten.mm.default" in least
    assert not {*least} & {"aten.sin.default", "aten.exp.default"}
    assert 0 < len(least) <= len(everything)


@triton.jit
def square_kernel(x, out):  # type: ignore[no-untyped-def]
    value = tl.load(x)
    tl.store(out, value * value)


def square_or_launch(x: Tensor) -> Tensor:
    """The compiler sees through it, so that no node of the graph is a call of it."""
    if x.numel() > 1:
        return x * x
    out = torch.empty_like(x)
    square_kernel[(1,)](x, out)
    return out


seen = register("seen", square_or_launch)


@pytest.mark.parametrize(
    "op",
    [OPS["sensitive"], torch.ops.magi_backend_recompute.sensitive, seen, torch.ops.magi_backend_recompute.seen],
    ids=["function", "packet", "function-seen-through", "packet-seen-through"],
)
def test_the_report_says_what_is_saved(op: Callable[[Tensor], Tensor]) -> None:
    report = explain(lambda x: op(x.sin()).sum())(torch.randn(4, requires_grad=True))

    reasons = [p.reason for g in report.compilations[0].graphs for p in g.passes if p.name == "SelectiveRecompute"]
    assert reasons[0] == "1 compute-sensitive outputs and 0 products are saved"
    assert report.compilations[0].ops[0].compute_sensitive
