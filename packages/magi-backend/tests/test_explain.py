# SPDX-License-Identifier: Apache-2.0
"""What a report contains, that it tells a wrong result, and that explaining changes nothing.

Also of functions that draw random numbers, and of those that are compiled already.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _wrong import COS_BECOMES_SIN
from magi_backend import Report, _torch_compat, explain, magi_compile
from magi_backend._records.log import external_calls, generated_kernels
from magi_backend.errors import TargetError
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


def test_text_and_json(report: Report) -> None:
    text, data = report.to_text(width=100), json.loads(report.to_json())

    assert str(report) == report.to_text()
    assert max(map(len, text.splitlines())) <= 100
    words = ("forward", "backward", "NDTilingWorkaroundPass", "agree, within", "progress")
    assert [word for word in ("Counting, compiled by magi", *words) if word not in text] == []
    assert "\x1b" not in text
    assert data["target"] == "Counting"
    assert data["calls"][0]["differences"][0]["agrees"] is True
    assert data["compilations"][0]["graphs"][0]["kind"] == "forward"


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


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_buffers_are_put_back_after_an_error(kind: type[BaseException]) -> None:
    def interrupt(*_: object) -> None:
        raise kind

    model = Counting()
    model.linear.register_forward_pre_hook(interrupt)

    with pytest.raises(kind):
        explain(model)(torch.ones(3, 4))

    assert model.calls.item() == 0


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_function_without_operators_has_nothing_to_compile(is_compiled: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        return x

    report = explain(torch.compile(fn, backend="magi") if is_compiled else fn)(torch.ones(3))

    assert (report.compilations, report.agrees) == ((), True)
    assert "There was nothing to compile: Dynamo found no operator in the function" in report.to_text()
    assert "There was nothing to compile" in report.to_html()


def test_a_second_call_joins_the_report() -> None:
    explained = explain(lambda x: x.sin(), dynamic=True)

    explained(torch.ones(3, 4))
    report = explained(torch.ones(5, 6))

    assert [call.compilations for call in report.calls] == [1, 0]
    assert len(report.compilations) == 1
    assert report.compilations[0].graphs[0].symbols


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


def test_names_are_read_from_generated_source() -> None:
    source = "\n".join(
        [
            "cpp_fused_add_0 = async_compile.cpp_pybinding(['float*'], '''",
            "triton_poi_fused_1 = async_compile.triton('triton_', '''",
            "        buf0 = extern_kernels.convolution(a, b)",
            "        buf1 = torch.ops.aten.convolution_backward.default(a)",
            "        extern_kernels.mm(a, b, out=buf2)",
            "call_1_m_op_default_CPU = getattr(torch.ops.m.op.default, 'magi_direct', lambda _: f)('CPU')",
            "        buf3 = call_1_m_op_default_CPU(buf2)",
        ]
    )

    assert generated_kernels(source) == ("cpp_fused_add_0", "triton_poi_fused_1")
    assert external_calls(source) == ("convolution", "aten.convolution_backward", "mm", "m.op")


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


def dropouts(x: Tensor) -> Tensor:
    y, z = F.dropout(x.relu(), 0.5), F.dropout(x.sin(), 0.25)
    return F.dropout(y + z, 0.1) * 2


@pytest.mark.parametrize("grad", [pytest.param(False, marks=pytest.mark.slow), True], ids=["inference", "training"])
def test_random_numbers_are_eagers(grad: bool) -> None:
    report = explain(dropouts)(torch.randn(4, 8, requires_grad=grad))

    assert report.agrees
    assert "It draws random numbers. They are eager's here (fallback_random)" in report.to_text(width=200)


def test_results_with_random_numbers_are_not_compared() -> None:
    compiled = torch.compile(lambda x: F.dropout(x, 0.5), backend="magi")
    report = explain(compiled)(torch.randn(64, 8))

    assert report.agrees
    text = report.to_text(width=300)
    assert "by default not those of eager, so its results cannot be compared" in text
    assert "DIFFER" not in text
    (compilation,) = report.compilations
    assert ("fallback_random", "True") not in {row[:2] for row in compilation.settings}


def test_a_defect_in_a_function_with_random_numbers_is_reported() -> None:
    compiled = torch.compile(
        lambda x: F.dropout(x, 0.5) + x.cos(), backend="magi", options={"post_grad_custom_pre_pass": COS_BECOMES_SIN}
    )

    assert not explain(compiled)(torch.randn(64, 8)).agrees


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)).sin()).sum()  # type: ignore[no-any-return]


def test_every_wrong_gradient_is_listed_by_name_and_the_way_on_is_shown() -> None:
    report = explain(Two(), {"post_grad_custom_pre_pass": COS_BECOMES_SIN})(torch.randn(3, 4))

    (call,) = report.calls
    wrong = {f"gradient of {name}" for name in ("first.weight", "first.bias", "second.weight", "second.bias")}
    assert {difference.name for difference in call.wrong} == wrong
    for text in (report.to_text(width=200), report.to_html()):
        assert all(f"DIFFER: {name} by " in text for name in wrong)
        assert "magi.check" in text


def test_an_output_in_another_layout_is_a_line() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y, y.t().contiguous().t() if torch.compiler.is_compiling() else y * 1

    report = explain(fn)(torch.randn(3, 4))

    assert report.agrees
    assert report.calls[0].layouts == ("output[1] has strides (1, 3) where eager's are (4, 1)",)
    assert "output[1] has strides (1, 3)" in report.to_text()


@pytest.mark.parametrize(
    ("compile_it", "name"),
    [
        (torch.compile, "inductor"),
        (lambda fn: torch.compile(fn, backend="eager"), "eager"),
        (lambda fn: torch.compile(fn, backend=lambda gm, _: gm), "<lambda>"),
        (lambda _: compiled_in_place("inductor"), "inductor"),
    ],
)
def test_what_another_backend_compiled_is_refused(compile_it: Callable[..., Any], name: str) -> None:
    given = compile_it(dropouts)
    fn = "Two" if isinstance(given, Two) else "dropouts"
    with pytest.raises(TargetError) as caught:
        explain(given)

    assert str(caught.value) == (
        f"explain: {fn} was compiled by the backend {name!r}, and what that did is not on record here. Explain the "
        f'function itself: explain({fn}), or what torch.compile({fn}, backend="magi") returns.'
    )


def compiled_in_place(backend: str = "magi") -> Callable[..., Any]:
    model = Two()
    model.compile(backend=backend)
    return model


MAKERS: dict[str, Callable[[], Callable[..., Any]]] = {
    "function": lambda: torch.compile(lambda x: x.sin() + 1, backend="magi"),
    "module": lambda: torch.compile(Two(), backend="magi", dynamic=True),
    "in place": compiled_in_place,
    "by magi_compile": lambda: magi_compile(lambda x: x.sin() + 1, dynamic_arg_dims={"x": 0}),
    "module by magi_compile": lambda: magi_compile(Two(), dynamic_arg_dims={"x": 0}),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_was_compiled_and_called_before_is_reported(kind: str) -> None:
    compiled, x = MAKERS[kind](), torch.randn(3, 4)
    with torch.no_grad():
        compiled(x)
        counters = torch._dynamo.utils.counters["stats"]
        report = explain(compiled)(x)
        before = counters["unique_graphs"]
        compiled(x)

    assert report.agrees
    assert len(report.compilations) == 1
    assert report.compilations[0].graphs
    assert report.calls[0].again
    assert "It had been compiled before; for this report it was compiled again." in report.to_text()
    assert counters["unique_graphs"] == before, "explaining it made Dynamo forget it"


def test_a_function_can_be_explained_more_often_than_dynamo_compiles_it() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin()

    for _ in range(10):
        assert len(explain(fn, repeats=0)(torch.ones(3)).compilations) == 1
    assert len(explain(torch.compile(fn, backend="magi"))(torch.ones(3)).compilations) == 1


@pytest.mark.parametrize(("repeats", "expected"), [(0, 2), (1, 3), (2, 4), (5, 10)])
def test_the_function_runs_as_often_as_is_said(repeats: int, expected: int) -> None:
    runs: list[int] = []

    def fn(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        note()
        return x + 1

    @torch._dynamo.disable
    def note() -> None:
        runs.append(1)

    report = explain(fn, repeats=repeats)(torch.ones(3))

    assert len(runs) == expected
    assert len(report.calls[0].later_seconds) == repeats


def test_hooks_and_the_forward_of_a_module_stay_what_they_were() -> None:
    model, seen = Two(), []
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.first.register_forward_hook(lambda module, args, output: seen.append(1))
    x = torch.randn(3, 4)

    assert explain(model, repeats=0)(x).agrees
    assert "forward" not in vars(model)
