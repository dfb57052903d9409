# SPDX-License-Identifier: Apache-2.0
"""A float attribute of a module is a constant until it changes; a float argument is a symbol from the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from magi_backend import explain
from torch import Tensor, nn
from torch.fx import GraphModule


class Captures:
    """How many floats each graph takes that Dynamo captures: tensors without a dimension, as it passes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.floats: list[int] = []
        original = torch._dynamo.output_graph.OutputGraph.call_user_compiler

        def count(output: Any, gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
            tensors = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
            self.floats.append(sum(isinstance(tensor, Tensor) and tensor.dim() == 0 for tensor in tensors))
            return original(output, gm, *args, **kwargs)

        monkeypatch.setattr(torch._dynamo.output_graph.OutputGraph, "call_user_compiler", count)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    return Captures(monkeypatch)


def by_magi(fn: Callable[..., Any], dynamic: bool | None = True) -> Callable[..., Any]:
    return torch.compile(fn, backend="magi", dynamic=dynamic)


class Norm(nn.Module):
    def __init__(self, eps: float = 1e-3) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Stack(nn.Module):
    """Norms with an epsilon each, and a scale in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([Norm(1e-3), Norm(2e-3), Norm(3e-3)])
        self.scales = [0.25]

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(x) * self.scales[0]
        return x


def test_graphs_take_no_float_of_a_module(captures: Captures) -> None:
    x = torch.randn(4, 8)
    assert torch.allclose(by_magi(Stack())(x), Stack()(x))
    assert captures.floats == [0]


def test_stock_takes_them_all_also_beside_the_backend(captures: Captures) -> None:
    by_magi(Stack())(torch.randn(4, 8))
    torch.compile(Stack(), dynamic=True)(torch.randn(4, 8))
    assert captures.floats == [0, 4], "torch makes constants of them: give the defect its end"


def test_a_changed_float_is_a_symbol_from_then_on(captures: Captures) -> None:
    model = Stack()
    compiled, x, norm = by_magi(model), torch.randn(4, 8), model.norms[1]
    assert isinstance(norm, Norm)
    for eps in (1e-3, 0.1, 0.2, 0.3):
        norm.eps = eps
        assert torch.allclose(compiled(x), model(x))
    assert captures.floats == [0, 1]


def test_modules_that_share_a_function_compile_twice(captures: Captures) -> None:
    compiled, x = by_magi(lambda norm, x: norm(x)), torch.randn(4, 8)
    for eps in (1e-3, 2e-3, 3e-3, 4e-3):
        assert torch.allclose(compiled(Norm(eps), x), Norm(eps)(x))
    assert captures.floats == [0, 1]


def test_an_argument_is_a_symbol_at_once(captures: Captures) -> None:
    compiled, x = by_magi(lambda x, scale: x * scale + 1), torch.randn(4, 8)
    for scale in (0.5, 0.7, 0.9):
        assert torch.allclose(compiled(x, scale), x * scale + 1)
    assert captures.floats == [1]


def test_without_dynamic_nothing_changes(captures: Captures) -> None:
    model = Norm()
    compiled, x = by_magi(model, dynamic=None), torch.randn(4, 8)
    for eps in (1e-3, 0.1, 0.2):
        model.eps = eps
        assert torch.allclose(compiled(x), model(x))
    assert captures.floats == [0, 1]


def test_gradients_follow_the_value() -> None:
    model = Norm()
    compiled = by_magi(model)
    for eps in (1e-3, 0.1, 0.2):
        model.eps = eps
        x, y = (torch.linspace(-1, 1, 32).view(4, 8).requires_grad_() for _ in range(2))
        compiled(x).sum().backward()
        model(y).sum().backward()
        assert torch.allclose(x.grad, y.grad, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "reported"), [(Stack(), ["keep_floats_of_modules"]), (nn.ReLU(), [])], ids=["floats", "none"]
)
def test_the_report_says_so(model: nn.Module, reported: list[str]) -> None:
    report = explain(model, dynamic=True)(torch.randn(4, 8))
    named = [repair.name for each in report.compilations for graph in each.graphs for repair in graph.repairs]
    # Saved tensors of symbolic strides are in every such training step.
    assert [name for name in named if name != "keep_saved_strides_symbolic"] == reported
