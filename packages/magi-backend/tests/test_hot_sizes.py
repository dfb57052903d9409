# SPDX-License-Identifier: Apache-2.0
"""Sizes that come back get code of their own: which calls take it, when it is made and dropped, and what never fails.

The functions here are matrix products, for which Inductor writes no kernel: they compile in a moment.
"""

from __future__ import annotations

import gc
import itertools
import linecache
import logging
import re
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from magi_backend import explain, magi_register_custom_op
from magi_backend._hot import captured, table
from magi_backend._hot.captured import MOST_PARAMETERS, GraphInputs, SizeInput, make_dispatch, why_not_now
from magi_backend._hot.table import SizeTable
from magi_backend.records import SizesOutcome
from magi_opschema import ObjectHandle, register_object
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode


HOT: dict[str, Any] = {"magi.hot_sizes": 2, "magi.hot_after": 2}
Made = Callable[[], list[tuple[int, ...]]]


def gram(x: Tensor) -> Tensor:
    return x @ x.t()


def hot(fn: Callable[..., Any] = gram, **options: Any) -> Callable[..., Any]:
    """*fn* compiled for any size, and for sizes that come back."""
    asked = HOT | {f"magi.{name}": value for name, value in options.items()}
    return torch.compile(fn, backend="magi", dynamic=True, options=asked)


def right(compiled: Callable[..., Any], fn: Callable[..., Any], *calls: tuple[Any, ...]) -> None:
    """Each of *calls* returns what *fn* returns."""
    for given in calls:
        ours, theirs = compiled(*given), fn(*given)
        torch.testing.assert_close(ours, theirs)
        assert ours.requires_grad == theirs.requires_grad


def rows(*counts: int) -> list[tuple[Tensor]]:
    return [(torch.randn(count, 3),) for count in counts]


def test_a_size_that_comes_back_gets_code_and_others_do_not(made: Made) -> None:
    compiled = hot(hot_after=3)

    for count, expected in ((4, []), (5, []), (4, []), (4, [(4, 3)]), (4, []), (5, []), (6, []), (5, [(5, 3)])):
        right(compiled, gram, *rows(count))
        assert made() == expected, count


def test_nothing_is_made_and_nothing_wraps_the_call_when_it_is_off(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    from magi_backend._hot import entry

    wrapped: list[object] = []
    monkeypatch.setattr(entry, "SizeTable", lambda *args, **kwargs: wrapped.append(args))
    compiled = torch.compile(gram, backend="magi", dynamic=True)

    for _ in range(5):
        compiled(torch.randn(4, 3))

    assert made() == []
    assert wrapped == []


@pytest.fixture
def has_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code is made for every size that came back; which of them pay is the matter of test_hot_budget."""
    monkeypatch.setattr(SizeTable, "_has_paid", lambda self, size: True)


def test_a_size_whose_code_was_dropped_gets_it_again(made: Made, has_paid: None) -> None:
    compiled = hot()

    for counts, expected in (((4, 4, 5, 5), [4, 5]), ((6, 6, 6), [6]), ((4, 5, 4, 5, 6), None), ((4, 5, 6), None)):
        right(compiled, gram, *rows(*counts))
        found = [size[0] for size in made()]
        assert found and set(found) <= {4, 5, 6} if expected is None else found == expected


FORMS: dict[str, Callable[[int], Tensor]] = {
    "view": lambda count: torch.randn(count + 2, 3)[1 : count + 1],
    "transposed": lambda count: torch.randn(3, count).t(),
    "strided": lambda count: torch.randn(count, 6)[:, ::2],
    "expanded": lambda count: torch.randn(count, 1).expand(count, 3),
    "no leaf": lambda count: torch.randn(count, 3, requires_grad=True) * 2,
}
CALLS: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]], list[int]]] = {
    form: (gram, [(of(count),) for count in (4, 4, 4, 5)], [4]) for form, of in FORMS.items()
} | {
    "an int that is not a size": (
        lambda x, n: gram(x) @ gram(x) * n,
        [(torch.randn(4, 3), n) for n in (5, 6, 5, 6, 6, 5, 7)],
        [5, 6],
    ),
    "a float, which stays an input": (
        lambda x, scale: gram(x) * scale,
        [(torch.randn(4, 3), scale) for scale in (2.5, 3.5, 0.5, -1.0)],
        [4],
    ),
}


@pytest.mark.parametrize("kind", CALLS)
def test_arguments_of_every_kind(kind: str, made: Made) -> None:
    fn, calls, sizes = CALLS[kind]
    right(torch.compile(fn, backend="magi", dynamic=True, fullgraph=True, options=HOT), fn, *calls)

    found = [set(size) for size in made()]
    assert len(found) == len(sizes)
    assert all(size in each for size, each in zip(sizes, found, strict=True))


def test_equal_sizes_that_share_memory_otherwise_are_told_apart() -> None:
    def write(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x @ y

    def inputs(*, shared: bool) -> tuple[Tensor, Tensor]:
        x = torch.arange(16.0).reshape(4, 4)
        return (x, x) if shared else (x, torch.arange(16.0).reshape(4, 4))

    compiled = hot(write)

    for shared in (False, False, True, True, True, False, True, False):
        ours, theirs = inputs(shared=shared), inputs(shared=shared)
        torch.testing.assert_close(compiled(*ours), write(*theirs))
        torch.testing.assert_close(ours, theirs)


def test_an_input_whose_form_the_graph_changes(made: Made) -> None:
    def turn(x: Tensor) -> Tensor:
        x.t_()
        return gram(x)

    compiled = hot(turn)

    for (ours,) in rows(4, 4, 4, 5):
        theirs = ours.clone()
        torch.testing.assert_close(compiled(ours), turn(theirs))
        assert ours.shape == theirs.shape

    assert len(made()) == 1


def test_forward_and_backward_of_a_call_come_from_one_code(made: Made, has_paid: None) -> None:
    """The code is made, and dropped, between the forward of a call and its backward."""
    weight = torch.randn(3, 3, requires_grad=True)

    def model(x: Tensor) -> Tensor:
        return (x @ weight @ weight).sum()

    compiled = hot(model, hot_sizes=1)
    inputs = [torch.randn(count, 3, requires_grad=True) for count in (4, 4, 4, 5, 5, 5, 4)]
    losses = [compiled(x) for x in inputs]

    assert [size[0] for size in made()] == [4, 5, 4]
    ours = [torch.autograd.grad(loss, [x, weight]) for loss, x in zip(losses, inputs, strict=True)]
    theirs = [torch.autograd.grad(model(x), [x, weight]) for x in inputs]
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_runs_what_the_forward_ran(use_reentrant: bool, made: Made) -> None:
    """Layers share a graph, so code for their size is made between the forward of one and its recomputation."""

    def layer(weight: Tensor, x: Tensor) -> Tensor:
        return x @ weight @ weight.t() @ weight

    weights = [torch.randn(3, 3) / 3 for _ in range(4)]  # twelve of them in a row keep their size

    def gradients(call: Callable[..., Any], x: Tensor) -> list[Any]:
        leaves = [leaf.clone().requires_grad_() for leaf in (x, *weights)]
        value: Any = leaves[0]
        for weight in leaves[1:]:
            value = checkpoint(call, weight, value, use_reentrant=use_reentrant)
        value.square().sum().backward()
        return [leaf.grad for leaf in leaves]

    run = hot(layer, hot_after=3)
    for (x,) in rows(4, 4, 5, 4):
        torch.testing.assert_close(gradients(run, x), gradients(layer, x))

    assert made()


def test_hooks_of_the_user_do_not_prevent_it(made: Made) -> None:
    compiled = hot()

    with torch.autograd.graph.save_on_cpu():
        for _ in range(3):
            x = torch.randn(4, 3, requires_grad=True)
            (ours,) = torch.autograd.grad(compiled(x).sum(), x)
            (theirs,) = torch.autograd.grad(gram(x).sum(), x)
            torch.testing.assert_close(ours, theirs)

    assert len(made()) == 1


class Runner:
    def __init__(self, scale: float) -> None:
        self.scale = scale


def test_an_object_handle_stays_an_input(ns: str, made: Made) -> None:
    """Objects of one class share the code for a size, as they share the graph."""

    @magi_register_custom_op(f"{ns}::scale", infer_output_meta_fn=["x"])
    def scale(x: Tensor, runner: ObjectHandle[Runner]) -> Tensor:
        out: Tensor = x * runner.scale
        return out

    def fn(runner: Runner, x: Tensor) -> Tensor:
        return gram(scale(x, runner))

    runners = [Runner(float(factor)) for factor in range(1, 6)]
    for runner in runners:
        register_object(runner, weak=True)
    compiled = torch.compile(fn, backend="magi", dynamic=True, fullgraph=True, options=HOT)
    x = torch.randn(4, 3)
    right(compiled, fn, *((runner, x) for runner in runners * 2))

    assert made() == [(4, 3)]


def test_pieces_between_boundary_operators(ns: str, made: Made) -> None:
    @magi_register_custom_op(f"{ns}::exchange", is_subgraph_boundary=True)
    def exchange(x: Tensor) -> Tensor:
        return x.clone()

    def model(x: Tensor, weight: Tensor) -> Tensor:
        half = x.shape[0] // 2
        first = exchange(x @ weight)
        return exchange(first[:half]) @ weight * half

    weight = torch.randn(3, 3)
    right(hot(model), model, *((torch.randn(count, 3), weight) for count in (4, 4, 6, 4)))

    assert made() == [(4, 3)]


def test_the_first_call_of_the_code_for_a_size_is_checked(made: Made) -> None:
    report = explain(gram, options=HOT | {"magi.check": True}, dynamic=True)(torch.randn(4, 3))

    _, check = report.compilations[0].checks
    (size,) = made()
    assert re.fullmatch(rf"\w+={size[0]}, \w+={size[1]}", check.piece)


def test_the_first_call_is_static_and_the_graph_after_it_is_not(made: Made) -> None:
    """As ``torch.compile`` does by itself: only the graph that it makes at the second size has a symbol."""
    right(torch.compile(gram, backend="magi", options=HOT), gram, *rows(4, 5, 6, 6, 6))

    assert made() == [(6,)]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_grad_modes(mode: Any, made: Made) -> None:
    compiled = hot()

    for _ in range(3):
        with mode():
            x = torch.randn(4, 3, requires_grad=mode is not torch.inference_mode)
            right(compiled, gram, (x,))
            assert compiled(x).requires_grad == (mode is torch.enable_grad)

    assert len(made()) == 1


def test_autocast_of_the_capture_holds(made: Made) -> None:
    compiled = hot()

    for _ in range(4):
        x = torch.randn(4, 3)
        with torch.autocast("cpu", torch.bfloat16):
            assert compiled(x).dtype == torch.bfloat16
        assert compiled(x).dtype == torch.float32

    assert len(made()) == 2


def test_a_default_device_and_random_numbers_are_left_alone() -> None:
    compiled = hot(lambda x: gram(x) + torch.ones(x.shape[0], 1))
    x = torch.randn(4, 3)
    with torch.device("cpu"):
        torch.manual_seed(0)
        expected = torch.randn(2)
        torch.manual_seed(0)
        for _ in range(4):
            compiled(x)
        torch.testing.assert_close(torch.randn(2), expected)


@pytest.mark.usefixtures("tried")
def test_a_failure_warns_once_and_the_code_for_any_size_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    explained = explain(gram, options=HOT, dynamic=True)
    for rows in (4, 5, 4):
        report = explained(torch.randn(rows, 3))
        assert report.agrees

    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert re.fullmatch(
        r"graph \d: no code could be made for the sizes \w+=4, \w+=3, which run the code for any size: "
        "RuntimeError: the compiler is ill",
        warnings[0],
    )
    sizes = outcome(report)
    assert [use.note for use in sizes.uses] == ["RuntimeError: the compiler is ill"] * 2
    assert "no code could be made for them" in sizes.advice


def test_after_three_failures_a_graph_is_left_alone(tried: list[object]) -> None:
    compiled = hot()

    for rows in range(4, 10):
        for _ in range(3):
            compiled(torch.randn(rows, 3))

    assert len(tried) == 3


def outcome(report: Any) -> SizesOutcome:
    sizes: SizesOutcome | None = report.compilations[-1].sizes
    assert sizes is not None
    return sizes


def test_sizes_found_in_the_data_stay_symbolic_and_the_report_says_so() -> None:
    reason = "is known only when the operator has run"

    def fn(x: Tensor) -> Tensor:
        return gram(x[x.sum(1).nonzero()[:, 0]])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        explained = explain(fn, options=HOT, dynamic=True)
        explained(torch.randn(4, 3))
        report = explained(torch.randn(4, 3))

    assert report.agrees
    assert reason in outcome(report).symbolic
    assert reason in str(report)
    assert reason in report.to_html()


def test_the_report_counts_and_advises_when_it_is_off() -> None:
    explained = explain(gram, dynamic=True)
    explained(torch.randn(4, 3))
    report = explained(torch.randn(5, 3))

    sizes = outcome(report)
    assert [path for _, path in sizes.symbols] == ["x.size()[0]", "x.size()[1]"]
    assert [(use.calls, use.hits, use.has_code) for use in sizes.uses] == [(3, 0, False), (3, 0, False)]
    assert "came back and ran the code for any size in 3 calls" in sizes.advice
    assert "magi.hot_sizes" in str(report)
    assert "magi.hot_sizes" in report.to_html()


def test_the_report_tells_what_has_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "perf_counter", itertools.count().__next__)
    explained = explain(gram, options=HOT, dynamic=True)
    explained(torch.randn(4, 3))
    report = explained(torch.randn(4, 3))

    (use,) = outcome(report).uses
    assert (use.calls, use.hits, use.has_code) == (6, 5, True)
    assert use.seconds == 1
    assert outcome(report).advice == ""
    pieces = [graph.piece for graph in report.compilations[0].graphs]
    assert pieces == ["", ", ".join(f"{symbol}={number}" for symbol, number in use.sizes)]
    assert not report.compilations[0].graphs[1].symbols


def test_nothing_grows_with_ever_new_sizes() -> None:
    compiled = hot(lambda x, n: gram(x) * n)

    def call(start: int) -> int:
        for n in range(start, start + 1000):
            compiled(torch.ones(2 + n % 30, 3), n)
        gc.collect()
        return len(gc.get_objects())

    call(2)
    before = call(2000)
    assert call(4000) - before < 200


def test_a_dropped_function_takes_its_code_with_it() -> None:
    of_other_tests = frozenset(linecache.cache)
    model = nn.Linear(3, 3)
    compiled = hot(model)
    for _ in range(3):
        compiled(torch.randn(4, 3))
    held = weakref.ref(model.weight)
    files = [name for name in linecache.cache.keys() - of_other_tests if name.startswith("<magi_backend sizes")]
    assert files

    del compiled, model
    torch.compiler.reset()
    gc.collect()

    assert held() is None
    assert not [name for name in linecache.cache if name in files]


@pytest.mark.skipif(torch.__version__.startswith(("2.10.", "2.11.")), reason="torch.compile fails in several threads")
def test_two_threads(made: Made) -> None:
    compiled = hot(hot_sizes=4, hot_after=3)
    compiled(torch.randn(2, 3))

    def wrong(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(count, 3, generator=generator) for count in (4, 5, 6) * 20]
        return [x.shape[0] for x in inputs if not torch.allclose(compiled(x), gram(x), atol=1e-5)]

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(wrong, range(3))) == [[], [], []]
    for count in (4, 5, 6):  # no thread waits for another one that compiles, so the last calls may have come before
        compiled(torch.randn(count, 3))
    assert sorted(size[0] for size in made()) == [4, 5, 6]


def test_no_guard_is_added_to_the_captured_graph(made: Made) -> None:
    compiled = torch.compile(gram, backend="magi", dynamic=True, options=HOT)
    compiled(torch.randn(4, 3))

    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (4, 4, 5, 6, 5, 7, 4, 128):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(compiled(x), gram(x), atol=1e-4, rtol=1e-4)

    assert len(made()) == 2


def test_modes_and_transforms_see_no_compilation() -> None:
    assert why_not_now() == ""
    with FlopCounterMode(display=False):
        assert "a dispatch mode or a function transform" in why_not_now()
    reasons: list[str] = []

    def note(x: Tensor) -> Tensor:
        reasons.append(why_not_now())
        return x

    torch.func.vmap(note)(torch.ones(2))
    assert "a dispatch mode or a function transform" in reasons[0]


def test_a_captured_cuda_stream_is_left_alone(monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    compiled = torch.compile(gram, backend="magi", dynamic=True, options=HOT | {"magi.compile_sizes": ({"x": (8, 3)},)})
    with monkeypatch.context() as patch:
        patch.setattr(captured, "is_stream_captured", lambda: True)
        for _ in range(3):
            compiled(torch.randn(4, 3))
        assert made() == []
    compiled(torch.randn(4, 3))
    assert len(made()) == 2


def inputs(count: int, *places: int, differentiates: bool = False) -> GraphInputs:
    names = tuple(f"x{place}" for place in range(count))
    return GraphInputs(
        names, names, tuple(SizeInput(place, f"s{place}", names[place]) for place in places), differentiates
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
    dispatch = make_dispatch(
        inputs(count, *places, differentiates=differentiates),
        "a model",
        find=codes.get,
        other=lambda key, args: (key, args),
        general=lambda *args: args,
        under_hooks=lambda hooks, key, args: (hooks, key, args),
    )
    args = tuple(range(count))

    assert dispatch(*args) == [arg for arg in args if arg not in places]
    assert Code.hits == 1
    changed = (7777, *args[1:])
    assert dispatch(*changed) == ((7777, *places[1:]), changed)
    unhashable: Any = ([], *args[1:])
    assert dispatch(*unhashable) == unhashable


def test_a_traceback_shows_the_source() -> None:
    def other(key: Any, args: Any) -> None:
        raise ValueError(key)

    nothing: Any = None
    dispatch = make_dispatch(inputs(2, 0), "my model", find={}.get, other=other, general=nothing, under_hooks=nothing)
    with pytest.raises(ValueError, match="5") as caught:
        dispatch(5, 6)

    text = "".join(traceback.format_exception(caught.value))
    assert "in sizes_of_my_model" in text
    assert "return other(key, (size0, input1,))" in text
