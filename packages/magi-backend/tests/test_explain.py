# SPDX-License-Identifier: Apache-2.0
"""What a report contains, that it tells a wrong result, and that explaining changes nothing."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from magi_backend import Report, _torch_compat, explain
from magi_backend._records.log import external_calls, generated_kernels
from magi_backend._verify.compare import compare, compare_trees
from magi_backend.errors import OptionError, TargetTypeError
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache


class Counting(nn.Module):
    """A module with a buffer that every call changes, and with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).relu()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def report() -> Report:
    torch.manual_seed(0)
    return explain(Counting(), {"magi.progress": False})(torch.randn(3, 4, requires_grad=True))


def test_outputs_and_gradients_are_compared(report: Report) -> None:
    (call,) = report.calls
    names = [difference.name for difference in call.differences]

    assert report.agrees
    assert names == ["output", "gradient of linear.weight", "gradient of linear.bias", "gradient of argument[0][0]"]
    assert call.inputs == ("float32[3, 4]",)
    assert call.first_seconds > max(call.later_seconds) > 0
    assert (len(call.later_seconds), len(call.eager_seconds)) == (2, 1)


def test_graphs_kernels_and_settings_are_listed(report: Report) -> None:
    (compilation,) = report.compilations

    assert [graph.kind for graph in compilation.graphs] == ["forward", "backward"]
    assert all(graph.seconds > 0 and graph.nodes > 0 for graph in compilation.graphs)
    assert any(graph.kernels for graph in compilation.graphs)
    assert "NDTilingWorkaroundPass" in {outcome.name for graph in compilation.graphs for outcome in graph.passes}
    assert ("progress", "False", "options") in compilation.settings


def test_text(report: Report) -> None:
    text = report.to_text(width=100)

    assert str(report) == report.to_text()
    assert max(map(len, text.splitlines())) <= 100
    for word in (
        "Counting, compiled by magi",
        "forward",
        "backward",
        "NDTilingWorkaroundPass",
        "agree, within",
        "progress",
    ):
        assert word in text
    assert "\x1b" not in text


def test_json(report: Report) -> None:
    data = json.loads(report.to_json())

    assert data["target"] == "Counting"
    assert data["calls"][0]["differences"][0]["agrees"] is True
    assert data["compilations"][0]["graphs"][0]["kind"] == "forward"


class Tags(HTMLParser):
    """Checks that tags are balanced and that nothing is loaded from elsewhere."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in {"src", "href"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_one_page_of_balanced_tags(report: Report) -> None:
    page = report.to_html()
    tags = Tags()
    tags.feed(page)

    assert tags.open == []
    assert tags.links == []
    assert "Counting, compiled by magi" in page


def test_html_escapes_what_it_shows() -> None:
    def fn(x: Tensor) -> Tensor:
        return x + 1

    fn.__qualname__ = "<b>&fn"

    assert "&lt;b&gt;&amp;fn" in explain(fn)(torch.ones(2)).to_html()


def test_explaining_changes_neither_arguments_nor_buffers_nor_grads() -> None:
    model, x = Counting(), torch.randn(3, 4, requires_grad=True)
    before = x.detach().clone()
    state = torch.random.get_rng_state()

    explain(model)(x)

    assert model.calls.item() == 0
    assert model.linear.weight.grad is None
    assert x.grad is None
    assert torch.equal(x, before)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_function_that_writes_to_its_argument() -> None:
    def fn(x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1

    x = torch.ones(3)
    report = explain(fn)(x)

    assert report.agrees
    assert torch.equal(x, torch.ones(3))


def test_a_second_call_joins_the_report() -> None:
    explained = explain(lambda x: x.sin(), dynamic=True)

    explained(torch.ones(3, 4))
    report = explained(torch.ones(5, 6))

    assert [call.compilations for call in report.calls] == [1, 0]
    assert len(report.compilations) == 1
    assert report.compilations[0].graphs[0].symbols


def test_what_is_compiled_already_is_run_as_it_is() -> None:
    compiled = torch.compile(lambda x: x.cos(), backend="magi")
    report = explain(compiled)(torch.ones(3))

    assert report.calls[0].compilations == 1
    later = explain(compiled)(torch.ones(3))
    assert later.calls[0].compilations == 1
    assert "It had been compiled before; for this report it was compiled again." in later.to_text()
    with pytest.raises(OptionError, match=r"is compiled already, so dynamic would have no effect"):
        explain(compiled, dynamic=True)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TargetTypeError, match=r"explain takes a module or a function, and got 3 \(a int\)"):
        explain(3)  # type: ignore[arg-type]


def test_a_graph_break_is_reported() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y.sin()

    report = explain(fn)(torch.ones(3))

    (where,) = report.calls[0].graph_breaks
    line = fn.__code__.co_firstlineno + 2
    assert where.startswith(f"{__file__}:{line}, in fn: ")
    assert "Graph break at " in report.to_text()
    assert f"test_explain.py:{line}, in fn" in report.to_html()


def test_a_failing_compilation_is_in_no_report_but_raised() -> None:
    with pytest.raises(Exception, match="is not a setting"):
        explain(lambda x: x + 1, {"magi.chek": 1})(torch.ones(2))


@pytest.mark.parametrize(
    ("actual", "expected", "agrees"),
    [
        (torch.tensor([1.0]), torch.tensor([1.00001]), True),
        (torch.tensor([1.0]), torch.tensor([1.1]), False),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([float("inf")]), torch.tensor([float("inf")]), True),
        (torch.tensor([float("inf")]), torch.tensor([-float("inf")]), False),
        (torch.tensor([1]), torch.tensor([2]), False),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.zeros(2), torch.zeros(3), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), False),
        (torch.zeros(0), torch.zeros(0), True),
        (None, torch.zeros(2), False),
        (None, None, True),
        (3, 3, True),
    ],
)
def test_compare(actual: object, expected: object, agrees: bool) -> None:
    difference = compare("output", actual, expected)

    assert difference.agrees is agrees
    assert agrees or difference.largest > 0


def test_zeros_do_not_pass_for_small_gradients() -> None:
    gradient = torch.full((3,), 1e-6)

    assert compare("gradient", torch.zeros(3), gradient).agrees
    assert not compare("gradient", torch.zeros(3), gradient, scale=1e-6).agrees


def test_trees_of_different_shape_differ() -> None:
    (difference,) = compare_trees("output", (torch.zeros(1),), [torch.zeros(1)])

    assert not difference.agrees
    assert "structure" in difference.note


def test_names_are_read_from_generated_source() -> None:
    source = "\n".join(
        [
            "cpp_fused_add_0 = async_compile.cpp_pybinding(['float*'], '''",
            "triton_poi_fused_1 = async_compile.triton('triton_', '''",
            "        buf0 = extern_kernels.convolution(a, b)",
            "        buf1 = torch.ops.aten.convolution_backward.default(a)",
            "        extern_kernels.mm(a, b, out=buf2)",
        ]
    )

    assert generated_kernels(source) == ("cpp_fused_add_0", "triton_poi_fused_1")
    assert external_calls(source) == ("convolution", "aten.convolution_backward", "mm")


def test_what_a_pass_did_is_logged_and_traced_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By magi-passes, at one level for all outcomes; the artifact of this backend has what only it knows."""
    artifacts: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(
        _torch_compat.compiling, "trace_artifact", lambda name, payload: artifacts.append((name, payload()))
    )
    torch._dynamo.reset()
    caplog.set_level("INFO", "magi_passes")
    caplog.set_level("INFO", "magi_backend")
    with fresh_cache():
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        torch.autograd.backward(torch.compile(model, backend="magi")(torch.randn(2, 3, 16, 16)).sum())
    lines = [record.getMessage() for record in caplog.records if record.name == "magi_passes"]

    assert len(lines) == len(set(lines)) > 8
    assert {line.partition(": ")[0].rpartition("_")[2] for line in lines if " on graph: " not in line} == {
        "forward",
        "backward",
    }
    assert {record.name for record in caplog.records if "did not run" in record.getMessage()} == {"magi_passes"}
    assert [(name, payload["kind"], "passes" in payload) for name, payload in artifacts] == [
        ("magi_backend", "forward", False),
        ("magi_backend", "backward", False),
    ]
