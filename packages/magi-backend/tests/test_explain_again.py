# SPDX-License-Identifier: Apache-2.0
"""``explain`` on functions that draw random numbers, that are compiled already, or that differ from eager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from magi_backend import explain, magi_compile
from magi_backend.errors import OptionError, TargetError
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass


@dataclass(frozen=True)
class CosBecomesSin(CustomGraphPass):
    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default):
            node.target = torch.ops.aten.sin.default

    def uuid(self) -> None:
        return None


def dropouts(x: Tensor) -> Tensor:
    y, z = F.dropout(x.relu(), 0.5), F.dropout(x.sin(), 0.25)
    return F.dropout(y + z, 0.1) * 2


def like(x: Tensor) -> Tensor:
    return torch.rand_like(x) * x + torch.randn_like(x)


def whole_numbers(x: Tensor) -> Tensor:
    return torch.randint(0, 9, x.shape) + torch.randint_like(x, 5) + x


def bernoulli(x: Tensor) -> Tensor:
    return torch.bernoulli(torch.sigmoid(x)) * x


def multinomial(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.multinomial(x.softmax(-1), 2), x * 2


def slowly(*fns: Callable[..., Any]) -> list[Any]:
    """A slow test for each of *fns*."""
    return [pytest.param(fn, marks=pytest.mark.slow, id=fn.__name__) for fn in fns]


@pytest.mark.parametrize("grad", [pytest.param(False, marks=pytest.mark.slow), True], ids=["inference", "training"])
@pytest.mark.parametrize("fn", [dropouts, *slowly(like, whole_numbers, bernoulli, multinomial)])
def test_random_numbers_are_eagers(fn: Callable[[Tensor], Any], grad: bool) -> None:
    report = explain(fn)(torch.randn(4, 8, requires_grad=grad))

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
        lambda x: F.dropout(x, 0.5) + x.cos(), backend="magi", options={"post_grad_custom_pre_pass": CosBecomesSin()}
    )

    assert not explain(compiled)(torch.randn(64, 8)).agrees


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)).sin()).sum()  # type: ignore[no-any-return]


def test_every_wrong_gradient_is_listed_by_name_and_the_way_on_is_shown() -> None:
    report = explain(Two(), {"post_grad_custom_pre_pass": CosBecomesSin()})(torch.randn(3, 4))

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
    ],
)
def test_what_another_backend_compiled_is_refused(compile_it: Callable[..., Any], name: str) -> None:
    with pytest.raises(TargetError) as caught:
        explain(compile_it(dropouts))

    assert str(caught.value) == (
        f"explain: dropouts was compiled by the backend {name!r}, and what that did is not on record here. Explain the "
        'function itself: explain(dropouts), or what torch.compile(dropouts, backend="magi") returns.'
    )


def test_a_module_that_stock_compiled_in_place_is_refused() -> None:
    model = Two()
    model.compile()

    with pytest.raises(TargetError, match="Two was compiled by the backend 'inductor'"):
        explain(model)


def compiled_function() -> Callable[..., Any]:
    return torch.compile(lambda x: x.sin() + 1, backend="magi")


def compiled_module() -> Callable[..., Any]:
    return torch.compile(Two(), backend="magi", dynamic=True)


def compiled_in_place() -> Callable[..., Any]:
    model = Two()
    model.compile(backend="magi")
    return model


def by_magi_compile() -> Callable[..., Any]:
    return magi_compile(lambda x: x.sin() + 1, dynamic_arg_dims={"x": 0})


def module_by_magi_compile() -> Callable[..., Any]:
    return magi_compile(Two(), dynamic_arg_dims={"x": 0})


@pytest.mark.parametrize(
    "make", [compiled_function, compiled_module, compiled_in_place, by_magi_compile, module_by_magi_compile]
)
def test_what_was_compiled_and_called_before_is_reported(make: Callable[[], Callable[..., Any]]) -> None:
    compiled, x = make(), torch.randn(3, 4)
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


@pytest.mark.parametrize("repeats", [-1, 1.5, True, "2"])
def test_repeats_is_a_number(repeats: Any) -> None:
    with pytest.raises(OptionError, match=r"explain: repeats=.* is not a number of calls; it takes 0, 1, 2"):
        explain(torch.sin, repeats=repeats)


def test_hooks_and_the_forward_of_a_module_stay_what_they_were() -> None:
    model, seen = Two(), []
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.first.register_forward_hook(lambda module, args, output: seen.append(1))
    x = torch.randn(3, 4)

    assert explain(model, repeats=0)(x).agrees
    assert "forward" not in vars(model)
