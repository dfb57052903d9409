# SPDX-License-Identifier: Apache-2.0
"""Examples that hypothesis draws for the fuzzers, and how many: MAGI_FUZZ_PROGRAMS in all, or for MAGI_FUZZ_SECONDS."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st


T = TypeVar("T")
# Each is a test of its own, so that they run side by side.
SHARES = 30


def count_of_a_share(by_default: int) -> int:
    return -(-int(os.environ.get("MAGI_FUZZ_PROGRAMS", by_default)) // SHARES)


def drawn(strategy: st.SearchStrategy[T], number: int, count: int) -> list[T]:
    """*count* examples of *strategy* from the seed *number*."""
    found: list[T] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def draw(example: T) -> None:
        found.append(example)

    draw()
    return found


def in_time(examples: Iterable[T]) -> Iterator[T]:
    """*examples*, until MAGI_FUZZ_SECONDS have passed."""
    end = time.monotonic() + float(os.environ.get("MAGI_FUZZ_SECONDS", "inf"))
    for example in examples:
        if time.monotonic() >= end:
            break
        yield example
