# SPDX-License-Identifier: Apache-2.0
"""What it costs to find the code for the sizes of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _results import measure_paired, processor_name
from _workers import Row


CASES = {"16 inputs": 16, "300 inputs": 300}
HOT = 8
REPEATS, CALLS = 41, 5000


def specialisation(inputs: list[Any]) -> list[Any]:
    """Code for one size that returns at once, so that only the way to it takes time."""
    return inputs


def direct(*inputs: Any) -> list[Any]:
    """The same as AOTAutograd gives it to Dynamo: of single inputs, which it puts into a list behind its parameters."""
    every: list[Any] = []
    every.extend(())
    every.extend(inputs)
    return specialisation(every)


def arms(count: int) -> dict[str, Callable[[], object]]:
    """A call through the dispatcher of a graph of *count* inputs, three of them sizes; and a call of its code."""
    from magi_backend.testing import size_dispatcher

    places = (1, count // 2, count - 2)
    dispatch = size_dispatcher(count, places, {(16 + size, 32, 48 + size): specialisation for size in range(HOT)})
    sizes = dict(zip(places, (16 + HOT // 2, 32, 48 + HOT // 2), strict=True))
    given: list[Any] = [sizes.get(place, torch.empty(0)) for place in range(count)]
    static = [value for place, value in enumerate(given) if place not in places]
    return {"dispatch": lambda: dispatch(*given), "direct": lambda: direct(*static)}


def measure_dispatch(tiny: bool, *, commands: Iterator[str]) -> list[Row]:
    """The rows of both arms in each case, timed in pairs in this process."""
    torch.set_num_threads(1)
    next(commands)
    calls, repeats = (50, 3) if tiny else (CALLS, REPEATS)
    rows = []
    for case, count in CASES.items():
        for arm, seconds in measure_paired(arms(count), number=calls, repeats=repeats).items():
            rows.append({"arm": arm, "case": case, "seconds": list(seconds), "device": processor_name()})
    for _ in commands:  # the parent's repeats: all were measured in pairs here
        pass
    return rows
