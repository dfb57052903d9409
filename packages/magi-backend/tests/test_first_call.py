# SPDX-License-Identifier: Apache-2.0
"""Eager answers the first calls, and the code that is made on another thread answers those after that."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _python import python
from magi_backend import explain, wait
from magi_backend._hot import background
from magi_backend._torch_compat.state import compile_lock
from magi_backend.errors import BoundaryOpError
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint


OPTIONS: dict[str, Any] = {"magi.first_call": "eager"}


def gram(x: Tensor) -> Tensor:
    return x @ x.t()


def compiled(
    fn: Callable[..., Any], options: dict[str, Any] | None = None, *, dynamic: bool = True
) -> Callable[..., Any]:
    return torch.compile(fn, backend="magi", dynamic=dynamic, options=OPTIONS | (options or {}))


def graphs() -> int:
    """How many graphs AOTAutograd was given so far."""
    return int(counters["aot_autograd"]["total"])


@pytest.mark.parametrize("dynamic", [False, True])
def test_code_takes_over_between_two_calls(dynamic: bool) -> None:
    fn, before, x = compiled(gram, dynamic=dynamic), graphs(), torch.randn(4, 3)

    with compile_lock():  # as a compilation that goes on
        for _ in range(3):
            torch.testing.assert_close(fn(x), gram(x))
        assert not wait(seconds=0.01)
        assert graphs() == before
    assert wait()

    assert graphs() == before + 1
    torch.testing.assert_close(fn(x), gram(x))
    assert graphs() == before + 1


def test_a_failed_guard_is_served_the_same_way() -> None:
    fn = compiled(gram)
    fn(torch.randn(4, 3))
    assert wait()
    before = graphs()

    with compile_lock():
        x = torch.randn(4, 3, dtype=torch.float64)
        torch.testing.assert_close(fn(x), gram(x))
        assert graphs() == before
    assert wait()

    assert graphs() == before + 1
    torch.testing.assert_close(fn(x), gram(x))


def test_the_report_counts_the_calls_that_eager_answered() -> None:
    explained = explain(gram, options=OPTIONS, dynamic=True)
    with compile_lock():
        report = explained(torch.randn(4, 3))
        outcome = report.compilations[0].eager
        assert outcome is not None
        assert outcome.calls >= 1
        assert outcome.note == "its code is not made yet"
        assert f"eager answered {outcome.calls} call" in str(report)
        assert not report.compilations[0].graphs
    assert wait()

    report = explained(torch.randn(4, 3))

    after = report.compilations[0].eager
    assert after is not None
    assert (after.calls, after.note) == (outcome.calls, "")
    assert [graph.kind for graph in report.compilations[0].graphs] == ["inference"]
    assert report.compilations[0].seconds > 0


def asks_for_small_sizes(graph: torch.fx.Graph) -> None:
    """A pass that branches on the size of the graph's input, for which torch needs a guard."""
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["val"], Tensor):
            bool(node.meta["val"].shape[0] < 100)


def test_code_that_holds_only_for_some_sizes_is_not_used_for_others() -> None:
    fn, before = compiled(gram, {"post_grad_custom_pre_pass": asks_for_small_sizes}), graphs()
    fn(torch.randn(4, 3))
    assert wait()

    for count, made in ((99, 1), (100, 1), (101, 2), (5, 2), (1000, 2)):
        x = torch.randn(count, 3)
        torch.testing.assert_close(fn(x), gram(x))
        assert wait()
        assert graphs() - before == made + (count >= 100 and made == 1)


class Counter(nn.Module):
    """Writes to a buffer and to its argument in each call."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x.mul_(2)
        return x + self.calls


def test_a_compilation_writes_to_nothing() -> None:
    model = Counter()
    fn, x = compiled(model), torch.ones(3)

    for call in range(1, 5):
        torch.testing.assert_close(fn(x), torch.full((3,), 2.0**call + call))
        assert wait()

    assert model.calls == 4


def test_random_numbers_of_eager_are_those_of_eager_and_are_not_drawn_again() -> None:
    model = nn.Dropout(0.5)
    fn, x = compiled(model), torch.ones(64)
    torch.manual_seed(3)
    wanted = [model(x), torch.rand(2)]

    torch.manual_seed(3)
    answer = fn(x)
    assert wait()

    torch.testing.assert_close([answer, torch.rand(2)], wanted)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_backward_of_eager_may_run_after_code_has_taken_over(dynamic: bool) -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    fn, x = compiled(lambda x: torch.sin(x @ weight).sum(), dynamic=dynamic), torch.randn(4, 3)
    (wanted,) = torch.autograd.grad(torch.sin(x @ weight).sum(), weight)

    by_eager = fn(x)
    assert wait()
    before = counters["inductor"]["fxgraph_cache_miss"]
    by_code = fn(x)
    assert by_code.grad_fn.name().startswith("CompiledFunction")

    for loss in (by_code, by_eager):
        torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], wanted)
    assert counters["inductor"]["fxgraph_cache_miss"] == before, "the backward is made with the forward"


def test_a_recomputation_runs_what_the_forward_ran() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    fn, x = compiled(lambda x: torch.sin(torch.cos(x @ weight))), torch.randn(4, 3, requires_grad=True)
    (wanted,) = torch.autograd.grad(torch.sin(torch.cos(x @ weight)).sum(), weight)

    loss = checkpoint(fn, x, use_reentrant=False).sum()
    assert wait()

    torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], wanted)
    loss = checkpoint(fn, x, use_reentrant=False).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], wanted)


@pytest.mark.usefixtures("tried")
def test_after_a_failure_eager_goes_on_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    explained = explain(gram, options=OPTIONS | {"magi.strict": False}, dynamic=True)

    for _ in range(3):
        report = explained(torch.randn(4, 3))
        assert wait()

    texts = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert texts == ["graph 0: no code could be made, so eager goes on answering: RuntimeError: the compiler is ill"]
    assert "no code could be made: RuntimeError: the compiler is ill" in str(report)


@pytest.mark.usefixtures("tried")
def test_with_strict_calls_raise_the_error_of_the_compilation() -> None:
    fn = compiled(gram, {"magi.strict": True})
    fn(torch.randn(4, 3))
    assert wait()

    for _ in range(2):
        with pytest.raises(RuntimeError, match="^the compiler is ill$"):
            fn(torch.randn(4, 3))


def test_a_mistake_in_the_settings_is_raised_by_the_next_call() -> None:
    fn = compiled(gram, {"magi.strict": False, "magi.boundary_ops": ["ns::none"]})
    fn(torch.randn(4, 3))
    assert wait()

    with pytest.raises(BoundaryOpError, match=r"magi.boundary_ops names 'ns::none'"):
        fn(torch.randn(4, 3))


def test_an_error_of_the_program_starts_no_compilation() -> None:
    fn, before = compiled(torch.linalg.cholesky, dynamic=False), graphs()
    with pytest.raises(RuntimeError, match="positive-definite"):
        fn(-torch.eye(2))
    assert wait()
    assert graphs() == before


IN_CALL: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "known only when the operator has run": (lambda x: x.nonzero() + 1, lambda: (torch.randn(4),)),
    "share memory": (lambda x, y: x.mul_(2).sum() + y.sum(), lambda: _two_views(torch.randn(8, 3))),
    "is a float": (lambda x, scale: x * scale, lambda: (torch.randn(4), 0.5)),
}


def _two_views(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:4], x[4:]


@pytest.mark.parametrize("reason", IN_CALL)
def test_the_report_says_why_a_first_call_compiles(reason: str) -> None:
    fn, inputs = IN_CALL[reason]
    explained = explain(fn, options=OPTIONS, dynamic=True)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = explained(*inputs())

    outcome = report.compilations[0].eager
    assert outcome is not None
    assert outcome.calls == 0
    assert outcome.note.startswith("compiled in the call, because")
    assert reason in outcome.note
    assert report.compilations[0].graphs


def breaks(x: Tensor) -> Tensor:
    y = torch.sin(x)
    torch._dynamo.graph_break()
    return torch.cos(y)


def test_what_is_captured_next_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_QUIET", 60.0)
    fn, before, x = compiled(breaks), graphs(), torch.randn(4)

    torch.testing.assert_close(fn(x), breaks(x))
    assert graphs() == before
    assert wait()

    assert graphs() == before + 2
    torch.testing.assert_close(fn(x), breaks(x))


def test_sizes_become_hot_after_it(made: Callable[[], list[tuple[int, ...]]]) -> None:
    fn = compiled(gram, {"magi.hot_sizes": 2, "magi.hot_after": 2})
    for count in (4, 4, 4):
        x = torch.randn(count, 3)
        torch.testing.assert_close(fn(x), gram(x))
    assert wait()
    assert made() == []

    for count in (4, 4, 5):
        x = torch.randn(count, 3)
        torch.testing.assert_close(fn(x), gram(x))
    assert [size[0] for size in made()] == [4]


def test_the_code_is_checked_in_its_first_call() -> None:
    explained = explain(gram, options=OPTIONS | {"magi.check": True}, dynamic=True)
    report = explained(torch.randn(4, 3))
    assert wait()
    report = explained(torch.randn(4, 3))
    assert [check.agrees for check in report.compilations[0].checks] == [True]


@pytest.mark.kernels
def test_another_process_finds_what_was_made(fresh_caches: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("saved")
    program = (
        "import torch, sys\n"
        "from magi_backend import load, save, wait\n"
        "started = load(sys.argv[1])\n"
        "fn = torch.compile(lambda x: x @ x.t(), backend='magi', dynamic=True, options={'magi.first_call': 'eager'})\n"
        "fn(torch.randn(4, 3)); wait(); save(sys.argv[1])\n"
        "print(len(started.found), len(started.compiled))\n"
    )
    for caches in ("one", "two"):
        env = {"TORCHINDUCTOR_CACHE_DIR": str(folder.with_name(f"{folder.name}_{caches}"))}
        said = python("-c", program, folder, env=env)
    assert said == "1 0\n"


def test_threads_call_while_code_takes_over() -> None:
    fn = compiled(gram)
    wrong: list[AssertionError] = []
    stop = threading.Event()

    def calls(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            while not stop.is_set():
                x = torch.randn(2 + seed, 3, generator=generator)
                torch.testing.assert_close(fn(x), gram(x))
        except AssertionError as error:
            wrong.append(error)

    threads = [threading.Thread(target=calls, args=(seed,)) for seed in range(1, 4)]
    for thread in threads:
        thread.start()
    fn(torch.randn(9, 3))
    made = wait()
    fn(torch.randn(9, 3))
    stop.set()
    for thread in threads:
        thread.join()
    assert made
    assert not wrong


def test_a_child_process_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_QUIET", 60.0)
    fn, x, before = compiled(gram), torch.randn(4, 3), graphs()
    fn(x)

    if (child := os.fork()) == 0:
        status = 1
        try:
            torch.testing.assert_close(fn(x), gram(x))
            status = 0 if wait(120) and graphs() == before + 1 else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0

    assert graphs() == before
    assert wait()
    assert graphs() == before + 1
