# SPDX-License-Identifier: Apache-2.0
"""Time several compiled graphs in turn, on arguments like those that they are compiled for."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock  # torch itself requires it

from magi_passes import _torch_compat
from magi_passes._framework.records import logger
from magi_passes._graph.sizes import hinted


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Run = Callable[[list[Any]], Any]


ROUNDS = 7
QUEUED_SECONDS, MOST_QUEUED = 0.05, 20
MOST_SECONDS_WAITING = 600.0


def seconds_of_a_call(runs: dict[str, Run], examples: Sequence[Any]) -> dict[str, float]:
    """The shortest time of a call of each of *runs*, in seconds, on real arguments shaped like *examples*.

    They run in turn, each once in a round, so that a machine that slows down slows all of them. Many calls are queued
    at a time, so that the wait for a launch on an idle device does not count. A run that fails is left out, with a
    warning.
    """
    arguments = [_real(example) for example in examples]
    devices = {x.device for x in arguments if isinstance(x, torch.Tensor)}
    wait: Callable[[], object] = torch.cuda.synchronize if any(d.type == "cuda" for d in devices) else lambda: None
    best: dict[str, float] = {}
    # The first round also loads kernels; the second says how many calls fill a queue.
    calls = dict.fromkeys(runs, 1)
    with alone_on(devices):
        for turn in range(2 + ROUNDS):
            for name in list(calls):
                try:
                    seconds = _seconds(runs[name], arguments, calls[name], wait)
                except Exception as error:  # noqa: BLE001 (a candidate that does not run is one to leave out)
                    warn_left_out(name, error)
                    del calls[name]
                    best.pop(name, None)
                    continue
                if turn > 0:
                    best[name] = min(seconds, best.get(name, seconds))
                    calls[name] = min(MOST_QUEUED, max(1, round(QUEUED_SECONDS / seconds)))
    return best


@contextmanager
def alone_on(devices: Iterable[torch.device]) -> Iterator[None]:
    """A context in which no other process of the user times graphs on *devices*.

    Two ranks on one machine compile the same graph at the same time, and would slow down each other's runs at random.
    """
    folder = Path(_torch_compat.shared_folder()) / "magi_passes"
    locks = [FileLock(folder / f"{name}.lock") for name in sorted(map(_torch_compat.device_identity, devices))]
    held = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for lock in locks:
            lock.acquire(timeout=MOST_SECONDS_WAITING)  # its Timeout is an OSError
            held.append(lock)
    except OSError as error:
        logger.warning("tuning: other processes may measure at the same time, so times may be wrong: %s", error)
    try:
        yield
    finally:
        for lock in held:
            lock.release()


def _real(example: Any) -> Any:
    """A value that a compiled graph can be called with, shaped like *example*."""
    if not isinstance(example, torch.Tensor):
        return hinted(example)
    shape, stride = [hinted(n) for n in example.shape], [hinted(n) for n in example.stride()]
    value = torch.empty_strided(shape, stride, dtype=example.dtype, device=example.device)
    return value.normal_() if example.dtype.is_floating_point else value.zero_()


def _seconds(run: Run, arguments: Sequence[Any], calls: int, wait: Callable[[], object]) -> float:
    wait()
    start = perf_counter()
    for _ in range(calls):
        run(list(arguments))
    wait()
    return (perf_counter() - start) / calls


def warn_left_out(name: str, error: Exception) -> None:
    """Log a warning that the candidate *name* is left out, and why."""
    logger.warning("tuning: %s failed with %s: %s", name, type(error).__name__, error)
