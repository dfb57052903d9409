# SPDX-License-Identifier: Apache-2.0
"""What sizes may cost, on a clock that only calls and compilations move: whatever order the sizes come in.

The table is the real one. Instead of a captured graph it has a model of one, in which everything takes as long as said.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from magi_backend._hot import table as tables
from magi_backend._hot.captured import GraphInputs, SizeInput
from magi_backend._hot.table import SHARE, SizeTable
from magi_backend._torch_compat import values
from torch import Tensor


class World:
    """A graph with one size: what a call and a compilation take, and what they have taken in all."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        hot_sizes: int,
        *,
        general: Callable[[int], float] = lambda size: 1.0,
        own: Callable[[int], float] = lambda size: 0.5,
        compiling: Callable[[int], float] = lambda size: 50.0,
        hot_after: int = 3,
    ) -> None:
        self.now = self.general_alone = self.compiled_seconds = 0.0
        self.made: list[int] = []
        self.hot_sizes, self.own = hot_sizes, own
        patch.setattr(tables, "perf_counter", lambda: self.now)

        def make(key: tuple[int, ...], _: bool) -> Callable[[list[Any]], None]:
            (size,) = key
            self.made.append(size)
            self.compiled_seconds += compiling(size)
            self.pass_by(compiling(size))
            return lambda inputs: self.pass_by(own(size))

        inputs = GraphInputs(("n",), ("n",), (SizeInput(0, "s0", "n"),), differentiates=False)
        self.general = general
        self.table = SizeTable(
            inputs,
            lambda size: self.pass_by(general(size)),
            make,
            hot_sizes=hot_sizes,
            hot_after=hot_after,
            explicit=[],
            label="a model",
            changed=lambda: None,
        )
        self.dispatch = self.table.dispatch()

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def call(self, *sizes: int) -> list[int]:
        """The sizes for which code was made while these were called."""
        before = len(self.made)
        for size in sizes:
            self.dispatch(size)
            self.general_alone += self.general(size)
        return self.made[before:]

    def keeps_its_word(self) -> bool:
        """Whether all has taken little more than without code for single sizes.

        The first codes, and the runs that show that code is slower, may come on top.
        """
        on_trust = self.compiled_seconds if len(self.made) <= self.hot_sizes else 0.0
        timed = self.hot_sizes * tables.MOST_RUNS * max((self.own(size) for size in self.made), default=0.0)
        return self.now <= (1 + SHARE) * self.general_alone + on_trust + timed + 1e-6


CALLS = 10_000
ORDERS: dict[str, Callable[[], Iterator[int]]] = {
    "in turns": lambda: cycle(range(2, 11)),
    "more in turns than are remembered": lambda: cycle(range(2, 200)),
    "three at a time": lambda: (size for first in cycle(range(2, 83)) for size in [first] * 3),
    "a hundred at a time": lambda: (size for first in cycle(range(2, 83)) for size in [first] * 100),
    "another when the first has paid": lambda: chain([2] * 2000, cycle([2] * 101 + [3] * 101)),
    "never the same": lambda: iter(range(2, 2 + CALLS)),
    "by chance": lambda: (random.Random(seed).randint(2, 40) for seed in range(CALLS)),
    "few of them often": lambda: (2 + int(random.Random(seed).paretovariate(1.0)) % 300 for seed in range(CALLS)),
}
GAINS = {
    "half": lambda size: 0.5,
    "none": lambda size: 1.0,
    "a loss": lambda size: 1.5,
    "some": lambda size: size % 3 / 2,
}


@pytest.mark.parametrize("hot_sizes", [1, 2, 8])
@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("order", ORDERS)
def test_no_order_costs_more_than_it_may(
    order: str, gain: str, hot_sizes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, hot_sizes, own=GAINS[gain])
    for size in islice(ORDERS[order](), CALLS):
        world.call(size)
        assert world.keeps_its_word()


@pytest.mark.parametrize("hot_sizes", [1, 2, 8])
@pytest.mark.parametrize("hot_after", [1, 2, 3, 10])
@pytest.mark.parametrize("gain", GAINS)
def test_an_adversary_that_only_calls_sizes_without_code(
    gain: str, hot_after: int, hot_sizes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, hot_sizes, own=GAINS[gain], compiling=lambda size: 3.0, hot_after=hot_after)
    for _ in range(CALLS):
        world.call(next(size for size in range(2, 20) if (size,) not in world.table.codes))
        assert world.keeps_its_word()


def test_slow_code_counts_as_a_loss_before_the_code_for_any_size_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call makes the code, so nothing is known yet of what the code for any size takes."""
    world = World(
        monkeypatch, 1, general=lambda size: 0.5, own=lambda size: 3.0, compiling=lambda size: 0.0, hot_after=1
    )
    for size in [4, 36] * 9:
        world.call(size)
        assert world.keeps_its_word()

    assert world.made == [4]


sizes = st.lists(st.tuples(st.lists(st.integers(2, 100), min_size=1, max_size=8), st.integers(1, 120)), max_size=8)
seconds = st.floats(0.0, 4.0)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 8]), sizes, st.lists(seconds, min_size=3, max_size=7), st.floats(0.0, 200.0), st.data())
def test_any_order(
    hot_sizes: int,
    phases: Sequence[tuple[Sequence[int], int]],
    own: Sequence[float],
    compiling: float,
    data: st.DataObject,
) -> None:
    general = data.draw(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=5))
    with pytest.MonkeyPatch.context() as patch:
        world = World(
            patch,
            hot_sizes,
            general=lambda size: general[size % len(general)],
            own=lambda size: own[size % len(own)],
            compiling=lambda size: compiling,
            hot_after=data.draw(st.integers(1, 4)),
        )
        for turn, times in phases:
            for size in list(turn) * times:
                world.call(size)
                assert world.keeps_its_word()


def test_what_has_paid_gets_the_place_of_what_is_called_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 2)

    assert world.call(*[4, 5] * 500) == [4, 5]
    assert world.call(*[6] * 99) == []
    assert world.call(*[6, 7] * 300) == [6, 7]
    assert world.call(*[6, 7] * 1000) == []
    assert world.now < 0.6 * world.general_alone + 4 * 50


def test_nothing_that_is_called_often_makes_room_for_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)

    assert world.call(*([4] * 9 + [5]) * 1000) == [4]
    assert world.call(*[4, 5] * 1000) == []
    advice = world.table.outcome().advice
    assert advice.endswith("calls: more sizes come back than magi.hot_sizes=1 keeps. Raise it.")
    assert world.call(*([4] + [5] * 9) * 1000) == [5]


def test_few_calls_wait_for_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(values, "synchronize", lambda: waits.append(1))
    world = World(monkeypatch, 2)

    world.call(*range(2, CALLS))
    assert len(waits) < 2 * (CALLS / tables.CALLS_APART + 40)
    waits.clear()
    world.call(*[4] * CALLS)
    assert len(waits) < 2 * 20


def test_code_that_is_slower_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 2, own=lambda size: 1.2 if size == 4 else 0.5)

    assert world.call(*[4, 5] * 1000) == [4, 5]
    assert (4,) not in world.table.codes
    assert world.now < 1000 + 500 + 2 * 50 + 10
    uses = {use.sizes[0][1]: use for use in world.table.outcome().uses}
    assert (uses[4].hits, uses[4].note) == (tables.MOST_RUNS, "its own code is slower than the code for any size")
    assert uses[5].hits == 998
    assert "slower than the code for any size" in world.table.outcome().advice


def test_before_the_first_code_is_timed_calls_pay_with_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of the first size is never run again."""
    world = World(monkeypatch, 1)

    assert world.call(4, 4, 4) == [4]
    assert world.call(*[5] * 2000) == [5]


@pytest.mark.parametrize("hot_sizes", [1, 2, 4])
def test_three_calls_each_of_81_pairs_in_three_rounds(hot_sizes: int, made: Callable[[], list[Any]]) -> None:
    def fn(x: Tensor) -> Tensor:
        return x @ x.t()

    compiled = torch.compile(fn, backend="magi", dynamic=True, options={"magi.hot_sizes": hot_sizes})
    for _ in range(3):
        for height in range(3, 12):
            for width in range(12, 21):  # never square, which would be another graph
                x = torch.randn(height, width)
                for _ in range(3):
                    torch.testing.assert_close(compiled(x), fn(x))

    assert len(made()) == hot_sizes
