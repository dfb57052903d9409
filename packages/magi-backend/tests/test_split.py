# SPDX-License-Identifier: Apache-2.0
"""What two traits of operators do: graphs are split at boundaries, and compute-sensitive operators run once.

Across a boundary results and gradients are the same, writes are in order, and nothing is fused; in a training step a
compute-sensitive operator runs once, whatever asks for it again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from magi_backend import Report, explain, magi_register_custom_op
from magi_backend._records.log import Collector, collecting
from magi_backend.errors import BoundaryOpError
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._higher_order_ops import while_loop
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Scale:
    factor: float = 2.0
    steps: int = 3


@magi_register_custom_op(
    "magi_backend_split::scale",
    infer_output_meta_fn=["x"],
    setup_context_fn=lambda ctx, inputs, output: setattr(ctx, "scale", inputs[1]),
    backward_fn=lambda ctx, grad: (grad * ctx.scale.factor, None),
    is_subgraph_boundary=True,
)
def scale(x: Tensor, cfg: Scale) -> Tensor:
    return x * cfg.factor


@magi_register_custom_op("magi_backend_split::add_to", mutates_args=("x",), is_subgraph_boundary=True)
def add_to(x: Tensor, value: float) -> None:
    x.add_(value)


@magi_register_custom_op("magi_backend_split::two", infer_output_meta_fn=["x", "x"], is_subgraph_boundary=True)
def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x + 2


@magi_register_custom_op("magi_backend_split::plain", infer_output_meta_fn=["x"])
def plain(x: Tensor) -> Tensor:
    return x * 3


def pieces(report: Report) -> tuple[str, ...]:
    return report.compilations[-1].pieces


SCALE = "magi_backend_split::scale"


def test_training_with_dynamic_sizes_and_a_float_from_outside() -> None:
    linear = nn.Linear(8, 8)

    def fn(x: Tensor, cfg: Scale) -> Tensor:
        first, second = linear(x).relu().split(4, -1)
        result: Tensor = (scale(first, cfg) * cfg.factor + second).sin()
        return result

    explained = explain(fn, dynamic=True)
    explained(torch.randn(5, 8, requires_grad=True), Scale())
    report = explained(torch.randn(6, 8, requires_grad=True), Scale(2.5))

    assert report.agrees
    assert pieces(report) == ("piece 0", SCALE, "piece 1")
    kinds = [(graph.piece, graph.kind) for graph in report.compilations[-1].graphs]
    assert set(kinds) == {(f"piece {n}", kind) for n in range(2) for kind in ("forward", "backward")}


def test_writes_keep_their_order_and_views_see_them() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        doubled = x * 2
        flat = doubled.view(-1)
        add_to(doubled, 5.0)
        flat.mul_(3)
        after = doubled + 1
        add_to(x, 1.0)
        flat += 1
        return after, x + doubled, flat

    report = explain(fn, dynamic=True)(torch.randn(5, 8))

    assert report.agrees
    assert "argument[0][0] after the call" in {difference.name for difference in report.calls[0].differences}
    assert pieces(report) == (
        *("piece 0", "magi_backend_split::add_to", "piece 1", "magi_backend_split::add_to", "piece 2"),
    )


def test_boundaries_next_to_each_other_and_at_both_ends() -> None:
    cfg = Scale()
    report = explain(lambda x: scale(scale(x, cfg), cfg))(torch.randn(4))

    assert report.agrees
    assert pieces(report) == (SCALE, SCALE)
    assert report.compilations[0].graphs == ()


def test_pieces_are_not_modules_for_global_hooks(recwarn: pytest.WarningsRecorder) -> None:
    called: list[nn.Module] = []
    with nn.modules.module.register_module_forward_hook(lambda module, args, output: called.append(module)):
        torch.compile(lambda x: scale(x.sin(), Scale()).cos(), backend="magi")(torch.ones(4))

    assert called == []
    assert not recwarn.list


@pytest.mark.kernels
def test_nothing_is_fused_across_a_boundary() -> None:
    cfg = Scale()
    report = explain(lambda x: scale(x.sin() + 1, cfg).cos() * 2)(torch.randn(64))

    assert [len(graph.kernels) for graph in report.compilations[0].graphs] == [1, 1]


@torch.library.custom_op("magi_backend_split::foreign", mutates_args=())
def foreign(x: Tensor) -> Tensor:
    return x * 3


foreign.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    ("call", "named", "title"),
    [
        (plain, (), ""),
        (plain, ["magi_backend_split::plain"], None),
        (lambda x: torch.mul(*two(x)), (), "magi_backend_split::two"),
        (lambda x: torch.ops.magi_backend_split.scale(x, 2.0, 3), (), SCALE),
        (torch.ops.magi_backend_split.foreign, ["magi_backend_split::foreign"], None),
        (foreign, ["magi_backend_split::foreign"], None),
        (lambda x: torch.ops.aten.add(x, 1), ["aten::add"], "aten::add.Tensor"),
        (lambda x: torch.ops.aten.add(x, 1), ["aten::add.Tensor"], None),
        (lambda x: torch.ops.aten.mul_(x, 2), ["aten::mul_.Tensor"], None),
        (lambda x: torch.ops.aten.add(x, 1), ["aten::add.out"], ""),
    ],
)
def test_a_boundary_in_the_middle(call: Any, named: list[str], title: str | None) -> None:
    """Of an attribute of ``torch.ops``, Dynamo captures a call of a packet; torch chooses the overload later."""
    report = explain(lambda x: call(x.sin()).cos(), {"magi.boundary_ops": named})(torch.randn(4))

    title = named[0] if title is None else title
    assert pieces(report) == (("piece 0", title, "piece 1") if title else ())
    assert report.agrees


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_float_argument_at_and_after_a_boundary(fresh_caches: Path, fullgraph: bool) -> None:
    """Each piece reads the float from a tensor, and has its symbol, also if a cache has the piece before it."""

    def fn(x: Tensor, factor: float) -> Tensor:
        result: Tensor = scale(x.relu(), Scale(factor)).sin() * factor
        return result

    for _start in ("cold", "warm"):
        torch.compiler.reset()
        counters.clear()
        compiled = torch.compile(fn, backend="magi", dynamic=True, fullgraph=fullgraph)
        for size, factor in [(3, 2.0), (5, 2.5), (5, 3.5)]:
            x = torch.randn(size, 4)
            torch.testing.assert_close(compiled(x, factor), fn(x, factor))
        assert counters["frames"]["ok"] == counters["frames"]["total"]


def test_a_named_boundary_that_was_registered_again() -> None:
    """The finalizer of the first library clears `torch.ops` in torch 2.13; the name leads to another OpOverload."""

    def register(factor: float) -> Any:
        op = torch.library.custom_op(
            "magi_backend_split::rerun", lambda x: x * factor, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        op.register_fake(torch.empty_like)
        return op

    gc.disable()
    try:
        register(2.0)
        op = register(3.0)
        gc.collect()
        report = explain(lambda x: op(x.sin()).cos(), {"magi.boundary_ops": ["magi_backend_split::rerun"]})(
            torch.randn(4)
        )
    finally:
        gc.enable()
    assert pieces(report) == ("piece 0", "magi_backend_split::rerun", "piece 1")
    assert report.agrees


@pytest.mark.parametrize("name", ["magi_backend_split::plan", "nonsense", "no_such_namespace::op", "::"])
def test_a_boundary_that_was_never_registered_is_named(name: str) -> None:
    with pytest.raises(BoundaryOpError, match=r"magi.boundary_ops names .*, but no such operator is reg") as caught:
        explain(lambda x: x + 1, {"magi.boundary_ops": (name,)})(torch.ones(2))

    if name.endswith("plan"):
        assert "'magi_backend_split::plain'" in str(caught.value)


def _nested_region(op: Any) -> Any:
    region = torch.compiler.nested_compile_region(lambda x: op(x.sin()).cos())
    return lambda x: region(x) + region(x + 1)


def _applied(op: Any) -> Any:
    class Applied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return op(x.sin())  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    apply: Any = Applied.apply
    return lambda x: apply(x) + 1


BODIES: dict[str, tuple[Any, bool]] = {
    "torch.compiler.nested_compile_region": (_nested_region, False),
    "torch.cond": (lambda op: lambda x: torch.cond(x.sum() > 0, op, torch.cos, (x,)), False),
    "torch.utils.checkpoint": (
        lambda op: lambda x: checkpoint(lambda y: op(y.sin()).cos(), x, use_reentrant=False),
        False,
    ),
    "a torch.autograd.Function": (_applied, True),
    "while_loop": (
        lambda op: lambda x: while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, op(y)), (torch.tensor(0), x))[1],
        False,
    ),
}


@pytest.mark.filterwarnings("ignore:remat_using_tags:UserWarning")  # torch 2.10, of a checkpoint without gradients
@pytest.mark.parametrize("is_registered", [True, False])
@pytest.mark.parametrize("written", BODIES)
def test_a_boundary_that_cannot_be_cut_is_said(ns: str, written: str, is_registered: bool) -> None:
    define, trained = BODIES[written]
    name = f"{ns}::inside"

    @magi_register_custom_op(name, infer_output_meta_fn=["x"], is_subgraph_boundary=is_registered)
    def op(x: Tensor) -> Tensor:
        return x.tanh()

    fn: Any = define(op)
    x = torch.randn(4, 4, requires_grad=trained)
    options: dict[str, Any] = {} if is_registered else {"magi.boundary_ops": [name]}
    compiled: Any = torch.compile(fn, backend="magi", options=options)
    with collecting(Collector()) as collector, pytest.warns(UserWarning, match="the graph is not cut there") as warned:
        torch.testing.assert_close(compiled(x), fn(x))
    (said,) = {str(each.message) for each in warned if name in str(each.message)}
    assert f"{name} is a subgraph boundary" in said
    assert written in said
    (compilation,) = collector.compilations()
    (sentence,) = compilation.uncut
    assert sentence in said
    assert sentence.split()[0] in Report("fn", "", (), (compilation,)).to_text()


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
