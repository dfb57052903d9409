# SPDX-License-Identifier: Apache-2.0
"""When code for a size is not made, that the wait ends, and what a call goes through."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import pytest
import torch
from magi_backend import explain
from magi_backend._hot.captured import why_not_now
from magi_backend._hot.dispatch import MOST_PARAMETERS, GraphInputs, SizeInput, dispatch_source, make_dispatch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode


HOT: Any = {"magi.hot_sizes": 2, "magi.hot_after": 2}


def gram(x: Tensor) -> Tensor:
    return x @ x.t()


def made(caplog: pytest.LogCaptureFixture) -> int:
    return sum("code for the sizes" in record.getMessage() for record in caplog.records)


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "magi_backend")


def test_no_guard_is_added_to_the_captured_graph(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(gram, backend="magi", dynamic=True, options=HOT)
    compiled(torch.randn(4, 3))

    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (4, 4, 5, 6, 5, 7, 4, 128):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(compiled(x), gram(x), atol=1e-4, rtol=1e-4)

    assert made(caplog) == 2


def test_modes_and_transforms_see_no_compilation() -> None:
    assert why_not_now(same_on_all_ranks=False) == ""
    with FlopCounterMode(display=False):
        assert "a dispatch mode or a function transform" in why_not_now(same_on_all_ranks=True)
    reasons: list[str] = []

    def note(x: Tensor) -> Tensor:
        reasons.append(why_not_now(same_on_all_ranks=True))
        return x

    torch.func.vmap(note)(torch.ones(2))
    assert "a dispatch mode or a function transform" in reasons[0]


def test_no_rank_compiles_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Sizes that come back may come back on one rank only; those that are named are named on all of them."""
    from magi_backend._hot import captured

    monkeypatch.setattr(captured, "ranks", lambda: 2)
    options = HOT | {"magi.compile_sizes": ({"x": (8, 3)},)}
    explained = explain(gram, options=options, dynamic=True)
    explained(torch.randn(4, 3))
    report = explained(torch.randn(4, 3))

    assert made(caplog) == 1
    sizes = report.compilations[0].sizes
    assert sizes is not None
    assert "a rank of 2 that compiles alone makes the others wait" in sizes.advice


def test_a_captured_cuda_stream_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = torch.compile(gram, backend="magi", dynamic=True, options=HOT | {"magi.compile_sizes": ({"x": (8, 3)},)})
    from magi_backend._hot import captured

    with monkeypatch.context() as patch:
        patch.setattr(captured, "is_stream_captured", lambda: True)
        for _ in range(3):
            compiled(torch.randn(4, 3))
        assert made(caplog) == 0
    compiled(torch.randn(4, 3))
    assert made(caplog) == 2


def inputs(count: int, *places: int, differentiates: bool = False) -> GraphInputs:
    names = tuple(f"x{place}" for place in range(count))
    return GraphInputs(
        names, names, tuple(SizeInput(place, f"s{place}", names[place]) for place in places), differentiates
    )


def test_the_source_of_a_dispatcher() -> None:
    assert (
        dispatch_source(inputs(4, 1, 3), "sizes_of_model")
        == """\
def make(find, other, general, under_hooks, saved_tensor_hooks, note_use):
    def sizes_of_model(input0, size1, input2, size3):
        key = (size1, size3,)  # x1, x3
        try:
            code = find(key)
        except TypeError:  # a symbolic size: the call is traced
            return general(input0, size1, input2, size3)
        if code is None:
            return other(key, (input0, size1, input2, size3,))
        try:
            note_use(key)
        except KeyError:  # another thread has dropped it, but this call still runs it
            pass
        code.hits += 1
        inputs = [input0, input2]
        return code.run(inputs)

    return sizes_of_model
"""
    )


@pytest.mark.parametrize("count", [3, MOST_PARAMETERS, MOST_PARAMETERS + 1, 300])
@pytest.mark.parametrize("differentiates", [False, True])
def test_a_dispatcher_passes_on_arguments_that_are_not_sizes(count: int, differentiates: bool) -> None:
    class Code:
        hits = 0

        @staticmethod
        def run(values: list[Any]) -> list[Any]:
            return values

    places = (0, count // 2, count - 1)
    codes = {places: Code}
    seen: list[Any] = []
    dispatch = make_dispatch(
        inputs(count, *places, differentiates=differentiates),
        "a model",
        find=codes.get,
        other=lambda key, args: (key, args),
        general=lambda *args: args,
        under_hooks=lambda hooks, key, args: (hooks, key, args),
        note_use=seen.append,
    )
    args = tuple(range(count))

    assert dispatch(*args) == [arg for arg in args if arg not in places]
    assert Code.hits == len(seen) == 1
    changed = (7777, *args[1:])
    assert dispatch(*changed) == ((7777, *places[1:]), changed)
    unhashable: Any = ([], *args[1:])
    assert dispatch(*unhashable) == unhashable


def test_a_traceback_shows_the_source() -> None:
    def other(key: Any, args: Any) -> None:
        raise ValueError(key)

    nothing: Any = None
    dispatch = make_dispatch(
        inputs(2, 0), "my model", find={}.get, other=other, general=nothing, under_hooks=nothing, note_use=nothing
    )
    with pytest.raises(ValueError, match="5") as caught:
        dispatch(5, 6)

    text = "".join(traceback.format_exception(caught.value))
    assert "in sizes_of_my_model" in text
    assert "return other(key, (size0, input1,))" in text
