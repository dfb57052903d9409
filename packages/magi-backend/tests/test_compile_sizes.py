# SPDX-License-Identifier: Apache-2.0
"""Sizes that the user names: code for them at the first call, and an error where they do not fit the graph."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from magi_backend import BackendError, CompileConfig, explain
from magi_backend._hot.table import SizeTable
from magi_backend.errors import CompileSizesError, ConfigError
from torch import Tensor


def gram(x: Tensor) -> Tensor:
    return x @ x.t()


def compiled_for(fn: Any, *sizes: dict[str, Any], **keywords: Any) -> Any:
    options: Any = {"magi.compile_sizes": sizes}
    return torch.compile(fn, backend="magi", dynamic=True, options=options, **keywords)


def test_they_are_compiled_at_the_first_call_and_taken(made: Any) -> None:
    compiled = compiled_for(gram, {"x": (8, 3)}, {"x": (16, 3)})

    compiled(torch.randn(4, 3))
    assert made() == [(8, 3), (16, 3)]
    for rows in (8, 16, 4, 4, 4, 4):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), gram(x))
    assert made() == []


def test_they_are_not_for_the_graph_of_a_size_of_one(made: Any) -> None:
    compiled = compiled_for(lambda x: x.sum(1), {"x": (4, 3, 5)})

    for rows in (1, 2, 4):
        x = torch.randn(4, rows, 5)
        torch.testing.assert_close(compiled(x), x.sum(1))

    assert made() == [(4, 3, 5)]


@pytest.mark.parametrize("weight", [torch.tensor(2.0), torch.randn(3, 3)], ids=["open", "fixed"])
def test_they_are_not_for_the_graph_of_equal_sizes(weight: Tensor, made: Any) -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * 2 if weight.dim() == 0 else x @ weight

    compiled = compiled_for(scaled, {"x": (4, 3)})
    for rows in (3, 2, 4):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), scaled(x))

    ((size, *_),) = (sorted(sizes, reverse=True) for sizes in made())
    assert size == 4


def test_the_report_says_that_they_were_requested() -> None:
    report = explain(gram, options={"magi.compile_sizes": ({"x": (8, 3)},)}, dynamic=True)(torch.randn(8, 3))

    sizes = report.compilations[0].sizes
    assert sizes is not None
    assert [(use.calls, use.hits, use.note) for use in sizes.uses] == [(3, 3, "asked for")]


def test_they_are_never_dropped(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SizeTable, "_has_paid", lambda self, size: True)
    options: Any = {"magi.compile_sizes": ({"x": (8, 3)},), "magi.hot_sizes": 1, "magi.hot_after": 1}
    compiled = torch.compile(gram, backend="magi", dynamic=True, options=options)

    for rows in (4, 5, 6, 8, 8):
        compiled(torch.randn(rows, 3))

    assert made() == [(8, 3), (4, 3), (5, 3), (6, 3)]


def test_inputs_inside_others_and_ints_are_named_too(made: Any) -> None:
    def scaled(batch: dict[str, Tensor], n: int) -> Tensor:
        return gram(batch["pixels"]) @ batch["pixels"] * n

    compiled = compiled_for(scaled, {"batch['pixels']": (8, 3), "n": 7})
    for rows, n in ((4, 5), (8, 7)):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled({"pixels": x}, n), scaled({"pixels": x}, n))

    assert sorted(made()[0]) == [3, 7, 8]


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"y": (8, 3)}, "no input of the graph is called 'y'. Give a shape"),
        ({"xs": (8, 3)}, "no input of the graph is called 'xs' (did you mean 'x'?). Give"),
        ({"x": (8, 3, 1)}, "x = (8, 3, 1), but it has 2 dimensions"),
        ({"x": 8}, "x = 8, but it has 2 dimensions"),
        ({"n": (8,)}, "n = (8,), but it is an int"),
        ({"x": (8, 3)}, "leaves n ("),
        ({"x": (8, 3), "w": (4, 2), "n": 3}, "w.shape[0] is 4, but the same symbol"),
        ({"x": (8, 3), "w": (3, 5), "n": 3}, "w.shape[1] is 5, but the graph was captured with 2 fixed there"),
        ({"x": (1, 3), "w": (3, 2), "n": 3}, "breaks what the graph was captured for: 2 <="),
        ({"x": (7, 3), "w": (3, 2), "n": 3}, "breaks what the graph was captured for:"),
    ],
)
def test_what_does_not_fit_is_an_error_that_lists_the_inputs(sizes: dict[str, Any], sentence: str) -> None:
    w = torch.randn(3, 2)
    torch._dynamo.mark_static(w, 1)

    def model(x: Tensor, w: Tensor, n: int) -> Tensor:
        return (x @ w).reshape(-1, x.shape[0] // 2, 2).reshape(x.shape[0] // 2, 4) * n

    with pytest.raises(CompileSizesError) as caught:
        compiled_for(model, sizes, fullgraph=True)(torch.randn(6, 3), w, 5)

    text = str(caught.value)
    assert text.startswith("magi.compile_sizes: ")
    assert sentence in text
    assert re.search(r"Its inputs are: x \((\w+), (\w+)\); w \(\2, 2\); n (\w+)", text), text
    assert isinstance(caught.value, BackendError)


def test_a_function_that_is_two_graphs_takes_sizes_for_each(made: Any) -> None:
    def broken(x: Tensor, y: Tensor) -> Tensor:
        first = gram(x)
        torch._dynamo.graph_break()
        return first.sum() + gram(y)

    compiled = compiled_for(broken, {"x": (8, 3)}, {"y": (6, 3), "first": (8, 8)})
    x, y = torch.randn(8, 3), torch.randn(6, 3)

    torch.testing.assert_close(compiled(x, y), broken(x, y))
    assert sorted(map(sorted, made())) == [[3, 6, 8], [3, 8]]


@pytest.mark.parametrize("value", [{"x": (1, 2)}, ["x"], ({"x": "1,2"},), ({"x": (1, -2)},), ({"x": (1.5,)},), ({},)])
def test_malformed_sizes_name_the_setting(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"compile_sizes = .* takes a sequence of dicts of input to shape or number"):
        CompileConfig(compile_sizes=value)
    with pytest.raises(ConfigError, match=r"magi\.compile_sizes = .* takes a sequence of dicts"):
        torch.compile(gram, backend="magi", options={"magi.compile_sizes": value})(torch.ones(2, 2))
