# SPDX-License-Identifier: Apache-2.0
"""The time and the memory of calls on a device, and who may measure there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


QUEUED_SECONDS, MOST_QUEUED = 0.25, 20
WARM_UPS = 3


@dataclass(frozen=True)
class Clock:
    """Times calls on *device*, "cuda" or "cpu"."""

    device: str

    def wait(self) -> None:
        """Until the GPU has done what it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def make_room(self) -> None:
        """Give cached memory back, and count its peak anew."""
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        """The most memory in use since `make_room`; None for a processor."""
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else None

    def seconds(self, call: Callable[[], Any], calls: int = 1) -> float:
        """Wall time of each of *calls* calls, the first of which finds an idle device."""
        self.wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self.wait()
        return (time.perf_counter() - start) / calls

    def seconds_in_turn(self, call: Callable[[], Any], calls: int) -> float:
        """`seconds` after as many calls that do not count, since another arm had the GPU before.

        The arm behind eager code, which leaves the GPU idle for a quarter of the time, was up to 3 % ahead of arms
        whose kernels take as long (wan_dit, flux, sd3 and pixart on one H200).
        """
        self.seconds(call, calls)
        return self.seconds(call, calls)


def calls_in_a_queue(seconds_alone: float, queued_seconds: float = QUEUED_SECONDS) -> int:
    """Enough calls that waiting for the first launch does not count."""
    return min(MOST_QUEUED, max(1, round(queued_seconds / seconds_alone)))


def time_in_turn(
    rows: Sequence[dict[str, Any]],
    calls: Sequence[Callable[[], Any]],
    commands: Iterable[str],
    clock: Clock,
    *,
    queued_seconds: float,
) -> None:
    """Give each of *rows* the seconds of its call: some of a call alone, and those of a queue for each command."""
    counts = []
    for row, call in zip(rows, calls, strict=True):
        row["alone_seconds"] = [clock.seconds(call) for _ in range(WARM_UPS)]
        counts.append(calls_in_a_queue(min(row["alone_seconds"]), queued_seconds))
        row["seconds"] = []
    for _ in commands:
        for row, call, count in zip(rows, calls, counts, strict=True):
            row["seconds"].append(clock.seconds_in_turn(call, count))


def stay_on_one_core() -> None:
    """Run this thread on the last of its cores, as the other arms do.

    Launch-bound arms with the same kernels have differed by half on different cores, now one ahead and now the other.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


class Turns:
    """Turns at the GPU for processes that compile at the same time, by a lock on *lock_file*; none are taken if empty.

    A kernel's configuration that is measured beside other kernels wins or loses by chance: on a busy GPU a kernel of
    10 us has taken 120 us with any configuration.
    """

    def __init__(self, lock_file: str) -> None:
        from filelock import FileLock  # torch itself requires it

        self._lock = FileLock(lock_file) if lock_file else None
        self.waited_seconds = 0.0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nothing else runs on the GPU; a thread may enter this more than once."""
        if self._lock is None:
            yield
            return
        started = time.perf_counter()
        with self._lock.acquire(poll_interval=0.01):
            self.waited_seconds += time.perf_counter() - started
            yield
            torch.cuda.synchronize()

    @contextmanager
    def for_first_calls(self) -> Iterator[None]:
        """Compiled graphs run alone, in whose first call Inductor measures kernels, and so do templates it measures."""
        from torch._inductor.output_code import CompiledFxGraph
        from torch._inductor.runtime.benchmarking import benchmarker

        run, measure = CompiledFxGraph.__call__, benchmarker.benchmark_gpu

        def run_alone(graph: Any, inputs: Any) -> Any:
            with self.alone():
                return run(graph, inputs)

        def measure_alone(*arguments: Any, **options: Any) -> Any:
            with self.alone():
                return measure(*arguments, **options)

        CompiledFxGraph.__call__ = run_alone  # type: ignore[assignment, method-assign]
        benchmarker.benchmark_gpu = measure_alone  # type: ignore[method-assign]
        try:
            yield
        finally:
            CompiledFxGraph.__call__ = run  # type: ignore[method-assign]
            benchmarker.benchmark_gpu = measure  # type: ignore[method-assign]


@contextmanager
def true_float32() -> Iterator[None]:
    """Products and convolutions of float32 without TF32."""
    convolutions, products = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = convolutions, products
