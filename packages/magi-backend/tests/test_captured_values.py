# SPDX-License-Identifier: Apache-2.0
"""What Dynamo captures: floats of modules are constants until they change, and comparisons do not break the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from magi_backend import explain, magi_compile
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule


@pytest.fixture
def floats(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many floats each graph takes that Dynamo captures: tensors without a dimension, as it passes them."""
    found: list[int] = []
    original = torch._dynamo.output_graph.OutputGraph.call_user_compiler

    def count(output: Any, gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        tensors = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
        found.append(sum(isinstance(tensor, Tensor) and tensor.dim() == 0 for tensor in tensors))
        return original(output, gm, *args, **kwargs)

    monkeypatch.setattr(torch._dynamo.output_graph.OutputGraph, "call_user_compiler", count)
    return found


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


def test_stock_takes_them_all_also_beside_the_backend(floats: list[int]) -> None:
    by_magi(Stack())(torch.randn(4, 8))
    torch.compile(Stack(), dynamic=True)(torch.randn(4, 8))
    assert floats == [0, 4], "torch makes constants of them: give the defect its end"


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_changed_float_is_a_symbol_from_then_on(dynamic: bool | None, floats: list[int]) -> None:
    model = Stack()
    compiled, x, norm = by_magi(model, dynamic), torch.randn(4, 8), model.norms[1]
    assert isinstance(norm, Norm)
    for eps in (1e-3, 0.1, 0.2, 0.3):
        norm.eps = eps
        assert torch.allclose(compiled(x), model(x))
    assert floats == [0, 1]


def test_an_argument_is_a_symbol_at_once(floats: list[int]) -> None:
    compiled, x = by_magi(lambda x, scale: x * scale + 1), torch.randn(4, 8)
    for scale in (0.5, 0.7, 0.9):
        assert torch.allclose(compiled(x, scale), x * scale + 1)
    assert floats == [1]


@pytest.mark.parametrize(
    ("model", "reported"), [(Stack(), ["keep_floats_of_modules"]), (nn.ReLU(), [])], ids=["floats", "none"]
)
def test_the_report_says_so(model: nn.Module, reported: list[str]) -> None:
    report = explain(model, dynamic=True)(torch.randn(4, 8))
    named = [repair.name for each in report.compilations for graph in each.graphs for repair in graph.repairs]
    # Saved tensors of symbolic strides are in every such training step.
    assert [name for name in named if name != "keep_saved_strides_symbolic"] == reported


WORDS = {"rep": "Rep"}


def compared(x: Tensor, entries: list[object]) -> Tensor:
    """Ones and zeros for the answers, as the caches of WAN's decoder are asked for ``"Rep"``."""
    answers = [
        *(x == "Rep", x != "Rep", "Rep" == x, "Rep" != x),  # noqa: SIM300
        *(entries[0] == "Rep", entries[0] != WORDS["rep"], entries[1] == "Rep"),
        *(x == None, x != None, x == ..., x == torch.float32),  # noqa: E711
        *(x == (1, 2), x == ["a"], x == {}, x != (1, 2)),
    ]
    assert all(isinstance(answer, bool) for answer in answers)
    return x * 0 + torch.tensor(sum(2**place for place, answer in enumerate(answers) if answer))


@pytest.mark.parametrize("route", ["torch.compile", "options", "magi_compile"])
def test_answers_are_those_of_eager_code(route: str) -> None:
    if route == "magi_compile":
        run = magi_compile(compared)
    else:
        options: Any = {"magi.progress": False} if route == "options" else None
        run = torch.compile(compared, backend="magi", fullgraph=True, dynamic=True, options=options)
    counters.clear()
    x = torch.ones(2)
    assert torch.equal(run(x, [x, "Rep"]), compared(x, [x, "Rep"]))
    assert not counters["graph_break"]


def test_numbers_and_tensors_are_still_compared_by_element() -> None:
    def fn(x: Tensor, y: Tensor) -> list[Any]:
        return [x == 1, x == 1.0, x == True, x != 1, x == y, 1 == x]  # noqa: E712, SIM300

    x, y = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0])
    for found, wanted in zip(torch.compile(fn, backend="magi", fullgraph=True)(x, y), fn(x, y), strict=True):
        assert torch.equal(found, wanted)


def test_the_report_names_the_repair_where_torch_would_break_the_graph() -> None:
    @magi_compile
    def compiled(x: Tensor, word: str) -> Tensor:
        return x + 1 if x == word else x - 1

    def names(word: str) -> list[str]:
        return [
            r.name for c in explain(compiled)(torch.ones(2), word).compilations for n in c.graphs for r in n.repairs
        ]

    expected = ["compare_with_constants"] if torch.__version__ < "2.13" else []
    assert names("Rep") == expected


@pytest.mark.skipif(torch.__version__ >= "2.13", reason="torch traces the comparison itself")
def test_other_backends_are_left_alone() -> None:
    torch.compile(lambda x: x + (x == "Rep"), backend="magi")(torch.ones(2))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="returned non-Tensor"):
        torch.compile(lambda x: x + (x == "Rep"), backend="eager", fullgraph=True)(torch.ones(2))
