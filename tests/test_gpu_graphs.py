# SPDX-License-Identifier: Apache-2.0
"""On a GPU: CUDA graphs for sizes that vary (``magi.graphs``), as torch's trees record and replay them."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from magi_backend import explain
from torch import Tensor, nn


pytestmark = pytest.mark.gpu


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The functions that torch recorded, in order, each by a number of its own."""
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    original: Any = CUDAGraphTreeManager.record_function
    made: list[int] = []
    # A manager of torch's counts from 0, and there may be several in a test.
    numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
    counter = itertools.count()

    def counted(manager: Any, inputs: Any, function: Any) -> Any:
        made.append(numbers.setdefault(manager.ids_to_funcs[function].model, next(counter)))
        return original(manager, inputs, function)

    torch.compiler.reset()
    monkeypatch.setattr(CUDAGraphTreeManager, "record_function", counted)
    yield made
    torch.compiler.reset()


def held() -> int:
    """How many functions have a recorded graph in the trees of the current device."""
    from torch._inductor.cudagraph_trees import get_manager

    manager: Any = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return 0 if manager is None else sum(bool(nodes) for nodes in manager.roots.values())


def tables() -> str:
    """What is known of the sizes, for the message of a failure."""
    lines = []
    found: list[Any] = [each for each in gc.get_objects() if type(each).__name__ == "RecordingTable"]
    for table in found:
        known = [f"{name}={getattr(table, name)!r}" for name in ("_failures", "_blocked", "_compile_seconds")]
        lines.append(f"{table.label}: {', '.join(known)}, budget {table._budget():.4f} s, {table._waiting}")
        lines += [f"  {key}: {size}" for key, size in (table._hot() | table._others).items()]
    return "\n".join(lines)


def steps(x: Tensor) -> Tensor:
    for _ in range(8):
        x = torch.sin(x) @ torch.eye(x.shape[1], device=x.device, dtype=x.dtype) + 1
    return x


def compiled(fn: Callable[..., Any], graphs: int = 2, **options: Any) -> Callable[..., Any]:
    given = {"magi.graphs": graphs} | {name.replace("__", "."): value for name, value in options.items()}
    return torch.compile(fn, backend="magi", dynamic=True, options=given)


def rows(count: int) -> Tensor:
    return torch.randn(count, 16, device="cuda")


@torch.no_grad()
def test_only_as_many_sizes_as_asked_for_are_recorded(recorded: list[int]) -> None:
    fn = compiled(steps)

    for _ in range(6):
        for count in (5, 3, 8, 4):
            x = rows(count)  # an input that moves
            torch.testing.assert_close(fn(x), steps(x))

    assert len(recorded) == 2
    assert held() == 2


@torch.no_grad()
def test_a_recording_leaves_other_calls_the_memory_that_torch_keeps(recorded: list[int]) -> None:
    fn = compiled(steps)
    torch.empty(2**28, device="cuda", dtype=torch.uint8)  # freed at once, and kept by torch
    kept = torch.cuda.memory_reserved()
    for _ in range(6):
        fn(rows(5))
    assert recorded
    assert torch.cuda.memory_reserved() >= kept
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < kept, "a call of the user's empties it"


@torch.no_grad()
def test_the_least_useful_graph_is_dropped_and_its_memory_is_used_again(recorded: list[int]) -> None:
    """Sizes come for good one after another, the largest first, and only one may have a graph."""
    from torch._inductor.cudagraph_trees import get_cudagraph_segments, get_manager

    fn = compiled(steps, graphs=1)
    graphs: list[weakref.ref[Any]] = []
    pools, pool_bytes, calls = [], [], []

    for count in (1024, 128, 512, 256, 1024):  # small enough for launches to take most of the time
        x, before, start = rows(count), len(recorded), time.monotonic()
        calls.append(0)
        # A size must pay for its recording. The first one makes torch's pool as well, and the budget has to earn that.
        while len(recorded) == before and time.monotonic() - start < 40:
            for _ in range(50):
                fn(x)
            calls[-1] += 50
        for _ in range(1000):
            fn(x)
        torch.testing.assert_close(fn(x), steps(x), msg=f"{count} rows after {calls} calls")
        gc.collect()
        torch.cuda.synchronize()
        manager: Any = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
        seen = f"{count} rows, calls until each recording: {calls}, recorded: {recorded}\n{tables()}"
        assert manager is not None, f"torch has no pool: {seen}"
        nodes = [node for each in manager.roots.values() for node in each]
        assert len(recorded) == before + 1, f"recorded once: {seen}"
        assert len(nodes) == 1, f"{len(nodes)} graphs: {seen}"
        alive = [number for number, graph in enumerate(graphs) if graph() is not None]
        assert not alive, f"dropped graphs that still exist: {alive}: {seen}"
        graphs.append(weakref.ref(nodes[0].graph))
        del nodes
        pools.append(manager.cuda_graphs_thread_pool)
        segments = get_cudagraph_segments(pools[-1])
        pool_bytes.append(sum(segment["total_size"] for segment in segments))

    assert len(set(recorded)) == 5, f"each size has had a graph, and the first one another: {seen}"
    assert len({*map(tuple, pools)}) == 1, f"one pool: {pools}"
    assert pool_bytes[0] > 0, f"what the largest needs: {pool_bytes}"
    assert max(pool_bytes) <= 2 * pool_bytes[0], f"the others need no more, but for gaps between them: {pool_bytes}"


def test_gradients_of_sizes_with_and_without_a_graph(recorded: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).cuda()
    fn = compiled(model)

    for step in range(8):
        for count in (5, 3, 8, 4):
            x = rows(count).requires_grad_()
            model.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            wanted = [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]
            x.grad = None
            model.zero_grad()
            ours = fn(x).square().sum()
            ours.backward()
            found = [x.grad, *(p.grad for p in model.parameters())]
            torch.testing.assert_close([ours, *found], [loss, *wanted], msg=f"step {step}, {count} rows")

    assert 1 <= len(set(recorded)) <= 4, "two forward and two backward"
    assert held() <= 4


@torch.no_grad()
def test_buffers_and_inputs_that_are_written_to(recorded: list[int]) -> None:
    class Cache(nn.Module):
        sum: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sum", torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            self.sum += x.sum(0)
            return x * 2 + self.sum

    ours, theirs = Cache().cuda(), Cache().cuda()
    fn = compiled(ours)
    for _ in range(6):
        for count in (5, 3, 8):
            x = rows(count)
            torch.testing.assert_close(fn(x), theirs(x))
    torch.testing.assert_close(ours.sum, theirs.sum)
    assert len(recorded) == 2

    torch.compiler.reset()
    in_place = compiled(lambda x: x.mul_(2).sin())
    for _ in range(6):
        for count in (5, 3):
            x = rows(count)
            twin = x.clone()
            torch.testing.assert_close(in_place(x), twin.mul_(2).sin())
            torch.testing.assert_close(x, twin)


@torch.no_grad()
def test_random_numbers_differ_between_replays_and_follow_the_seed(recorded: list[int]) -> None:
    fn = compiled(lambda x: torch.nn.functional.dropout(x, 0.5))
    x = torch.ones(512, 16, device="cuda")
    drawn = [fn(x).clone() for _ in range(8)]
    assert len(recorded) == 1
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(drawn))

    seeded = []
    for _ in range(2):
        torch.manual_seed(5)
        seeded.append(fn(x).clone())
    assert torch.equal(*seeded)


@torch.no_grad()
def test_an_output_that_lives_on_is_as_in_torch(recorded: list[int]) -> None:
    fn, x = compiled(steps), rows(5)
    for _ in range(5):
        fn(x)
    kept = fn(x)
    copy = kept.clone()
    other = rows(7)
    without = fn(other)  # no graph: it overwrites nothing
    torch.testing.assert_close(kept, copy)

    torch.testing.assert_close(without, steps(other))

    fn(rows(5))  # as in torch, this one may overwrite what is not cloned

    torch.testing.assert_close(copy, steps(x))


@torch.no_grad()
def test_a_stream_of_the_caller(recorded: list[int]) -> None:
    fn, side = compiled(steps), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(6):
            x = rows(5)
            torch.testing.assert_close(fn(x), steps(x))
    torch.cuda.current_stream().wait_stream(side)
    assert len(recorded) == 1


@torch.no_grad()
def test_another_thread_runs_without_a_graph(recorded: list[int]) -> None:
    fn, x = compiled(steps), rows(5)
    fn(x)
    found: list[Any] = []

    def calls() -> None:
        with torch.no_grad():
            found.extend(fn(x).clone() for _ in range(5))

    def call_on_thread() -> None:
        found.clear()
        thread = threading.Thread(target=calls)
        thread.start()
        thread.join()
        assert len(found) == 5
        for each in found:
            torch.testing.assert_close(each, steps(x))

    call_on_thread()
    assert recorded == []

    for _ in range(12):
        kept = fn(x)
    copy = kept.clone()
    assert len(recorded) == 1
    x = rows(5)  # what a replay would give, in the memory of what is kept
    call_on_thread()
    torch.testing.assert_close(kept, copy, msg="the other thread replayed the graph of this one")


@torch.no_grad()
def test_a_hot_size_is_recorded_with_its_code(recorded: list[int]) -> None:
    explained = explain(steps, dynamic=True, options={"magi.graphs": 2, "magi.hot_sizes": 1, "magi.hot_after": 6})
    x = rows(64)
    for _ in range(20):
        report = explained(x)

    assert 1 <= len(recorded) <= 3
    (outcome,) = report.compilations[0].recordings
    assert outcome.kind == "forward"
    assert outcome.sizes.hits > 0
    assert "CUDA graphs, forward" in str(report)
    assert held() <= 2


@torch.no_grad()
def test_the_report_says_why_nothing_is_recorded(recorded: list[int]) -> None:
    def on_both(x: Tensor) -> Tensor:
        return (x.cpu().sin().cuda() + 1).cos()

    with torch._inductor.config.patch(graph_partition=False):
        explained = explain(on_both, dynamic=True, options={"magi.graphs": 2})
        for _ in range(5):
            report = explained(rows(5))

    assert recorded == []
    assert report.compilations[0].graphs[0].unrecorded
    assert "no CUDA graph of inference: " in str(report)


@torch.no_grad()
def test_pieces_between_what_no_graph_can_hold(recorded: list[int]) -> None:
    def partitioned(x: Tensor) -> Tensor:
        return steps(steps(x).cpu().sin().cuda())

    fn = compiled(partitioned, graphs=4)
    for _ in range(8):
        for count in (5, 3, 8):
            x = rows(count)
            torch.testing.assert_close(fn(x), partitioned(x), rtol=1e-4, atol=1e-4)

    assert len(set(recorded)) <= 4
    assert held() <= 4


@torch.no_grad()
def test_first_calls_by_eager_and_graphs(recorded: list[int]) -> None:
    from magi_backend import wait

    fn = compiled(steps, magi__first_call="eager")
    x = rows(5)
    torch.testing.assert_close(fn(x), steps(x))
    assert wait()
    for _ in range(6):
        x = rows(5)
        torch.testing.assert_close(fn(x), steps(x))

    assert len(recorded) == 1
