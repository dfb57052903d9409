# SPDX-License-Identifier: Apache-2.0
"""Several ranks decide alone about a graph that exchanges nothing, and together about the others."""

from __future__ import annotations

import inspect
import logging
import random
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from _python import python
from magi_backend import explain, wait
from magi_backend._hot import ranks
from magi_backend._hot.background import jobs
from magi_backend._hot.ranks import Exchange, Round, exchange_of
from magi_backend._torch_compat import distributed, state
from magi_backend._torch_compat.compiling import assigned
from magi_backend._torch_compat.state import compile_lock
from magi_backend.errors import BackendError
from magi_backend.records import describe_input
from torch import Tensor
from torch.fx import GraphModule


Made = Callable[[], list[tuple[int, ...]]]
HashStore: Any = vars(dist)["HashStore"]
HOT: dict[str, Any] = {"magi.hot_sizes": 2, "magi.hot_after": 2}


class Store:
    """A store between ranks, in which anything may happen on other ranks before each access."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.store, self.meanwhile, self.is_gone = HashStore(), meanwhile, False

    def __getattr__(self, name: str) -> Any:
        self.meanwhile()
        if self.is_gone:
            msg = "connection reset by peer"
            raise RuntimeError(msg)
        return getattr(self.store, name)


class World:
    """Ranks of one process that take steps in a random order: calls of a graph, and what their threads do.

    No rank's calls are more than *lead* ahead of another's, as if they waited in collectives. It stands in for
    `_torch_compat.distributed`.
    """

    def __init__(self, count: int, seed: int, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(ranks, "distributed", self)
        self.random, self.current, self.count = random.Random(seed), 0, count
        self.shared, self.lead = Store(self.meanwhile), self.random.choice((1, 2, 40))
        self.due, self.calls, self.depth = dict.fromkeys(range(count), 3), Counter[int](), 0
        self.rounds: dict[int, Round] = {}
        self.threads: dict[int, Generator[None, None, str]] = {}
        self.refused: dict[int, str] = {}
        self.ran: dict[int, dict[int, bool]] = defaultdict(dict)
        """Whether each rank ran the code of the size, for each call."""
        self.all_run_the_same = True
        self.dead: set[int] = set()
        self.fails: dict[int, str] = {}
        self.stays_quiet: set[int] = set()

    def members(self, group: str) -> tuple[int, ...]:
        return tuple(range(self.count))

    def rank(self) -> int:
        return self.current

    def store(self) -> Store:
        return self.shared

    def operations(self, group: str, device: str) -> int:
        return 2 * self.calls[self.current]

    def meanwhile(self) -> None:
        if self.depth < 3 and self.random.random() < 0.4:
            self.step()

    def step(self) -> None:
        """Something happens on some rank."""
        before, self.depth = self.current, self.depth + 1
        rank = self.random.randrange(self.count)
        if rank not in self.dead and (rank not in self.rounds or not self.rounds[rank]._lock.locked()):
            self.current = rank
            if self.random.random() < 0.5:
                self.call(rank)
            elif rank in self.threads and inspect.getgeneratorstate(self.threads[rank]) != inspect.GEN_RUNNING:
                self.look(rank)
        self.current, self.depth = before, self.depth - 1

    def call(self, rank: int) -> None:
        number = self.calls[rank]
        if number - min(self.calls[each] for each in range(self.count)) >= self.lead:
            return
        if number == self.due[rank]:
            taken = Exchange(group="g", device="cpu")
            self.rounds[rank] = Round(taken, "graph/8", lambda why: self.refused.__setitem__(rank, why))
            if rank not in self.stays_quiet:
                self.rounds[rank].take = lambda: None
                self.threads[rank] = self.rounds[rank].steps(self.fails.get(rank, ""))
        runs = self.ran[number - 1].get(rank, False) or (rank in self.rounds and self.rounds[rank].takes_over())
        self.ran[number][rank] = runs
        self.all_run_the_same &= len({*self.ran[number].values()}) == 1
        self.calls[rank] += 1

    def look(self, rank: int) -> None:
        """What the thread of *rank* does at a time."""
        try:
            next(self.threads[rank])
        except StopIteration as end:
            why = end.value
        else:
            return
        del self.threads[rank]
        if why:
            self.rounds[rank].refuse(why)

    def give_up(self, rank: int) -> None:
        self.current = rank
        if rank in self.threads and (why := self.rounds[rank].give_up()):
            self.rounds[rank].refuse(why)
        self.threads.pop(rank, None)

    def runs(self) -> bool:
        return all(self.ran[self.calls[rank] - 1].get(rank, False) for rank in range(self.count))


@pytest.mark.parametrize("seed", range(150))
def test_all_ranks_change_in_the_same_call(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2 + seed % 3, seed, monkeypatch)

    for _ in range(20_000):
        world.step()
        assert world.all_run_the_same
        if world.runs():
            break

    assert world.runs()
    assert not world.refused


@pytest.mark.parametrize("seed", range(150))
def test_a_rank_that_dies_or_gives_up_at_any_time_runs_no_other_code_than_the_others(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(3, seed, monkeypatch)
    late = world.random.randrange(3)

    for number in range(3000):
        world.step()
        if number == seed * 3 and world.random.random() < 0.5:
            world.dead.add(late)
        rank = world.random.randrange(3)
        runs = world.ran[world.calls[rank] - 1].get(rank, False)
        if world.random.random() < (0.3 if runs else 0.002):
            world.give_up(rank)
        assert world.all_run_the_same
    for rank in range(3):
        world.give_up(rank)

    assert not world.threads
    assert not any(runs.get(rank) for rank in world.refused for runs in world.ran.values())


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["other sizes", "no code", "never due"])
def test_no_rank_changes_if_they_cannot_agree(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(3, seed, monkeypatch)
    if kind == "other sizes":
        world.due[1] += 1
    elif kind == "no code":
        world.fails[1] = "the compiler is ill"
    else:
        world.stays_quiet.add(1)

    for _ in range(3000):
        world.step()
    for rank in range(3):
        world.give_up(rank)

    assert not any(any(runs.values()) for runs in world.ran.values())
    expected = {
        "other sizes": "the ranks did not see them in the same call",
        "no code": "on rank 1: the compiler is ill",
        "never due": "there was no answer from the ranks 1 for 300 s",
    }[kind]
    assert {*world.refused.values()} == {expected}


def test_where_the_store_is_gone_no_rank_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has acknowledged, so the others may have changed."""
    world = World(1, 0, monkeypatch)
    while 0 not in world.rounds or world.rounds[0]._switch is None:
        world.step()
    world.shared.is_gone, world.shared.meanwhile = True, lambda: None
    world.rounds[0]._runs = False

    world.calls[0] = world.rounds[0]._switch
    with pytest.raises(BackendError, match="the store of the process group does not answer"):
        world.call(0)


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this rank alone, where there is another rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(distributed, "ranks", lambda: 2)
    yield
    wait()
    dist.destroy_process_group()


def reduced(x: Tensor, group: Any = None) -> Tensor:
    """The sum of *x* over the ranks of *group*, which is that of all by default."""
    everyone: Any = dist.group.WORLD
    result: Tensor = functional.all_reduce(x, "sum", group or everyone)
    return result


def summed(x: Tensor) -> Tensor:
    return reduced(x.cos() * 2).sin()


def centred(x: Tensor) -> Tensor:
    return x - reduced(x.mean())


def gram(x: Tensor) -> Tensor:
    return x @ x.t()


@torch.library.custom_op("magi_ranks::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x.clone()


opaque.register_fake(torch.empty_like)


def test_a_mesh_among_the_inputs_is_described() -> None:
    """From torch 2.13 on, a graph of DTensors takes their mesh, which has a shape and no dtype."""
    mesh = types.SimpleNamespace(shape=(2,))

    assert describe_input(mesh) == str(mesh)
    assert describe_input(torch.ones(2)) == "float32[2]"


def exchanged(fn: Callable[[Tensor], Tensor], *boundaries: str) -> Any:
    """What the graph of *fn* exchanges, an `Exchange` or None."""
    found: list[Exchange | None] = []

    def read(gm: GraphModule, _: object) -> Callable[..., Any]:
        found.append(exchange_of(gm, boundaries))
        return gm.forward

    torch.compile(fn, backend=read, dynamic=True, fullgraph=True)(torch.randn(4, 3))
    return found[0]


@pytest.mark.usefixtures("one_of_two")
def test_what_a_graph_exchanges() -> None:
    assert exchanged(gram) is None
    tied = exchanged(summed)
    assert (tied.why, tied.group, len(tied.alike)) == ("", dist.group.WORLD.group_name, 2)  # type: ignore[union-attr]
    assert exchanged(centred).alike == frozenset()


@pytest.mark.usefixtures("one_of_two")
def test_what_cannot_be_read_is_taken_for_an_exchange() -> None:
    why = exchanged(opaque).why
    assert why.startswith("whether magi_ranks::opaque waits for other ranks cannot be read from it; name")
    assert exchanged(opaque, "magi_ranks::opaque") is None

    other = dist.new_group([0])
    several = exchanged(lambda x: reduced(reduced(x), other))
    assert several.why == "it exchanges in 2 process groups, which do not count together"


@pytest.mark.usefixtures("one_of_two")
def test_a_collective_in_a_body_that_may_not_run_says_nothing_about_the_sizes() -> None:
    found = exchanged(lambda x: torch.utils.checkpoint.checkpoint(summed, x, use_reentrant=False))

    assert (found.why, found.alike) == ("", frozenset())


@pytest.mark.usefixtures("one_of_two")
def test_a_rank_decides_alone_about_a_graph_that_exchanges_nothing(made: Made) -> None:
    compiled = torch.compile(gram, backend="magi", dynamic=True, options=HOT)
    with compile_lock():  # the call that is due does not compile, because the other rank would wait for it
        for count in (7, 4, 4, 4):
            compiled(torch.randn(count, 3))
    wait()

    assert [size[0] for size in made()] == [4]
    x = torch.randn(4, 3)
    torch.testing.assert_close(compiled(x), gram(x))


@pytest.mark.usefixtures("one_of_two")
def test_code_that_exchanges_runs_from_a_later_call_on(made: Made) -> None:
    explained = explain(summed, dynamic=True, options=HOT)
    for count in (7, 4):  # explain calls three times
        explained(torch.randn(count, 3))
    wait()
    assert [size[0] for size in made()] == [7, 4]

    reports = [explained(torch.randn(4, 3)) for _ in range(ranks.AHEAD)]

    first, last = (each.compilations[0].sizes for each in (reports[0], reports[-1]))
    assert first is not None
    assert last is not None
    assert first.hits == 0 < last.hits


@pytest.mark.usefixtures("one_of_two")
def test_no_more_sizes_than_may_have_code_are_decided_about(made: Made) -> None:
    compiled = torch.compile(summed, backend="magi", dynamic=True, options=HOT)

    for count in (7, 4, 4, 5, 5, 6, 6, 8, 8, 8, 8):
        compiled(torch.randn(count, 3))
    wait()

    assert [size[0] for size in made()] == [4, 5]


@pytest.mark.usefixtures("one_of_two")
def test_sizes_that_may_differ_between_ranks_get_no_code(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    explained = explain(centred, dynamic=True, options=HOT)
    for count in (7, 4, 4, 4, 4):
        report = explained(torch.randn(count, 3))
    wait()

    assert made() == []
    sizes = report.compilations[0].sizes
    assert sizes is not None
    assert "ranks may see different x.size()[0] (s" in sizes.advice
    caplog.clear()
    torch.compile(lambda x: centred(x) + 1, backend="magi", dynamic=True, options=HOT)(torch.randn(4, 3))
    (warning,) = (each.getMessage() for each in caplog.records if each.levelno == logging.WARNING)
    assert "no size gets code because it comes back: ranks may see different x.size()[0]" in warning


@pytest.mark.usefixtures("one_of_two")
@pytest.mark.parametrize("fn", [gram, summed])
def test_eager_answers_the_first_call_of_a_graph_that_exchanges_nothing(fn: Callable[[Tensor], Tensor]) -> None:
    explained = explain(fn, dynamic=True, options={"magi.first_call": "eager"})
    (compilation,) = explained(torch.randn(4, 3)).compilations

    assert compilation.eager is not None
    if fn is gram:
        assert compilation.eager.calls == 3  # explain compares
    else:
        expected = "compiled in the call, because it exchanges with other ranks, which must run the same code"
        assert compilation.eager.note == expected


@pytest.mark.usefixtures("one_of_two")
def test_the_thread_asks_no_rank() -> None:
    """An option of torch would gather what all ranks know, in the middle of their calls."""
    failures: list[str] = []

    def gather() -> None:
        try:
            with assigned(state.is_beside_others, True):
                dist.all_gather_object([None], 1)
        except RuntimeError as error:
            failures.append(str(error))

    jobs.add("gather", gather)
    wait()

    assert (
        "an option makes the compiler wait for the other ranks, in torch.distributed.all_gather_object" in failures[0]
    )
    everyone: list[Any] = [None]
    dist.all_gather_object(everyone, 1)
    assert everyone == [1]


PROGRAM = """
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from magi_backend import wait
from magi_backend._hot import ranks, table
from torch import nn

kind, rank, count, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), f"file://{sys.argv[4]}"
dist.init_process_group("gloo", rank=rank, world_size=count, init_method=store)
options = {"magi.hot_sizes": 1, "magi.hot_after": 2, "magi.progress": False}
length, tables, begin, offer = 5, [], table.SizeTable.__post_init__, ranks.Round.offer
table.SizeTable.__post_init__ = lambda self: (begin(self), tables.append(self))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.second(self.first(x).relu()).sin()


class Summed(Model):
    def forward(self, x):
        return functional.all_reduce(super().forward(x) * (rank + 1), "sum", group)


class Centred(Model):
    def forward(self, x):
        y = super().forward(x)
        return y - functional.all_reduce(y.mean(), "sum", group)


expected, model = Model(), Model()
if kind == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
    length += rank
elif kind == "fsdp":
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.first)
    model = fully_shard(model)
    length += rank
elif kind == "dtensor":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    model = parallelize_module(model, init_device_mesh("cpu", (count,)), plan)
else:
    groups = [dist.new_group([first, first + 1]) for first in range(0, count, 2)]
    group = groups[rank // 2]
    length += rank // 2  # the ranks of a group see the same sizes
    expected = model = Summed()
if kind == "other sizes":
    expected = model = Centred()
    length += rank
elif kind == "slow" and rank == 1:
    ranks.Round.offer = lambda *args: (time.sleep(3), offer(*args))
elif kind == "due later":
    options["magi.hot_after"] += rank
elif kind == "dies":
    ranks.SECONDS = 2.0
    if rank == 1:
        ranks.Round.offer = lambda *args: None
compiled = torch.compile(model, backend="magi", dynamic=True, options=options)


def call(length):
    begun = time.monotonic()
    x = torch.ones(length, 4)
    y = compiled(x)
    torch.testing.assert_close(y, expected(x))
    if kind in ("ddp", "fsdp", "dtensor"):
        y.sum().backward()
    return time.monotonic() - begun


for each in (9, length, length, *([length] if kind == "due later" else [])):
    call(each)
if kind == "dies" and rank == 1:
    os._exit(0)
if kind == "slow":
    assert max(call(length) for _ in range(50)) < 2  # no call waits for the other rank
begun = time.monotonic()
wait()
assert time.monotonic() - begun < 60
if kind != "dies":
    for _ in range(100):
        call(length)
    dist.barrier()
    dist.destroy_process_group()
(sizes,) = tables
print(*sizes.codes, *[size.failed for size in sizes._others.values() if size.failed], sizes._blocked)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ddp", ["(5,)", "(6,)"]),
        ("fsdp", ["(5,)", "(6,)"]),
        ("dtensor", ["(5,)", "(5,)"]),
        ("two groups", ["(5,)", "(5,)", "(6,)", "(6,)"]),
        ("slow", ["(5,)", "(5,)"]),
        ("due later", ["the ranks did not see them in the same call"] * 2),
        ("other sizes", ["ranks may see different x.size()[0]"] * 2),
        ("dies", ["there was no answer from the ranks 1 for 2 s", ""]),
    ],
)
def test_ranks(kind: str, expected: list[str], tmp_path: Path) -> None:
    program, count = tmp_path / "program.py", len(expected)
    program.write_text(PROGRAM)
    shared = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path.parent / "cache"), "OMP_NUM_THREADS": "1"}

    with ThreadPoolExecutor(count) as pool:
        store = tmp_path / "store"
        processes = [pool.submit(python, program, kind, rank, count, store, env=shared) for rank in range(count)]
    for process, text in zip(processes, expected, strict=True):
        last = process.result().strip().rpartition("\n")[2]  # gloo prints too, up to torch 2.10
        assert last.startswith(text), last
