# SPDX-License-Identifier: Apache-2.0
"""Forked processes that do the work: a crash or a hang costs one check, never the run.

Forking keeps what the parent loaded: kernels that a user registered, torch's test database, captured calls. A child
runs on one thread, because the threads of its parent do not survive a fork.
"""

from __future__ import annotations

import io
import mmap
import multiprocessing as mp
import multiprocessing.connection as mpc
import os
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.context import ForkProcess


_fork = mp.get_context("fork")
Task = TypeVar("Task")
Result = TypeVar("Result")

_NOTE_SIZE = 2048


class Note:
    """A line of text in memory shared with the parent: what a child is doing, readable after it died."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NOTE_SIZE)

    def write(self, text: str) -> None:
        """Replace the text."""
        data = text.encode()[: _NOTE_SIZE - 1] + b"\0"
        self._memory[: len(data)] = data

    def read(self) -> str:
        """The text as it stands."""
        return self._memory[:_NOTE_SIZE].partition(b"\0")[0].decode(errors="replace")


@dataclass(frozen=True)
class Death:
    """A child that ended without an answer: what it was doing, and how it ended."""

    doing: str
    how: str


@dataclass
class _Worker(Generic[Task]):
    process: ForkProcess
    pipe: mpc.Connection
    note: Note
    task: Task
    dead: list[str] = field(default_factory=list)
    last_note: str = ""
    since: float = 0.0


def run_tasks(
    tasks: Sequence[Task],
    work: Callable[[Task, Note, frozenset[str]], Result],
    *,
    jobs: int,
    seconds: float,
    retries: int = 12,
) -> Iterator[tuple[Task, Result | None, list[Death]]]:
    """Do *work* on every task in forked children, and yield each result with the deaths that it cost.

    A child that dies is replaced by one that starts the task again, told to leave out what the dead ones were doing.

    Args:
        tasks: What to do.
        work: Called in a child with the task, the note to write, and the notes at which earlier children died.
        jobs: How many children work at a time.
        seconds: How long a note may stand unchanged before its child counts as hanging.
        retries: After how many deaths a task is given up; its result is None then.

    Yields:
        The task, its result, and its deaths, in the order in which tasks end.
    """
    waiting = deque((task, list[Death]()) for task in tasks)
    running: dict[mpc.Connection, tuple[_Worker[Task], list[Death]]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task, deaths = waiting.popleft()
                worker = _start(task, work, frozenset(death.doing for death in deaths))
                running[worker.pipe] = (worker, deaths)
            ready = mpc.wait(list(running), timeout=0.5)
            for pipe in [pipe for pipe in running if pipe in ready]:
                worker, deaths = running.pop(pipe)
                try:
                    yield worker.task, pipe.recv(), deaths
                    worker.process.join()
                except EOFError:
                    worker.process.join()
                    deaths.append(Death(worker.note.read(), _ending(worker.process.exitcode)))
                    yield from _again(worker.task, deaths, waiting, retries)
            for pipe, (worker, deaths) in list(running.items()):
                if _hangs(worker, seconds) and not pipe.poll():
                    del running[pipe]
                    worker.process.kill()
                    worker.process.join()
                    deaths.append(Death(worker.note.read(), f"hung for {seconds:.0f} s"))
                    yield from _again(worker.task, deaths, waiting, retries)
    finally:
        for worker, _ in running.values():
            worker.process.kill()
            worker.process.join()


def isolated(work: Callable[[], Result], *, seconds: float) -> Result | None:
    """The result of *work* in a child; None where the child crashes, or takes longer than *seconds*."""
    ours, theirs = _fork.Pipe(duplex=False)
    process = _fork.Process(target=_answer, args=(theirs, lambda: _saved(work())), daemon=False)
    process.start()
    theirs.close()
    try:
        if ours.poll(seconds):
            result: Result = torch.load(io.BytesIO(ours.recv_bytes()), weights_only=False)
            return result
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()
    return None


def _start(task: Task, work: Callable[[Task, Note, frozenset[str]], Any], left_out: frozenset[str]) -> _Worker[Task]:
    ours, theirs = _fork.Pipe(duplex=False)
    note = Note()
    process = _fork.Process(target=_answer, args=(theirs, lambda: work(task, note, left_out)))
    process.start()
    theirs.close()
    return _Worker(process, ours, note, task, since=time.monotonic())


def _answer(pipe: mpc.Connection, work: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    # C++ warns on descriptor 2 about inputs that are meant to be odd; Python's own stderr stays.
    sys.stderr = os.fdopen(os.dup(2), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    result = work()
    # Tensors travel as bytes: pickling would hand over a file descriptor that dies with this process.
    pipe.send_bytes(result) if isinstance(result, bytes) else pipe.send(result)
    pipe.close()
    # No interpreter shutdown: the parent's exit handlers are not the child's to run.
    os._exit(0)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _again(
    task: Task, deaths: list[Death], waiting: deque[tuple[Task, list[Death]]], retries: int
) -> Iterator[tuple[Task, None, list[Death]]]:
    if len(deaths) >= retries:
        yield task, None, deaths
    else:
        waiting.appendleft((task, deaths))


def _hangs(worker: _Worker[Any], seconds: float) -> bool:
    note = worker.note.read()
    if note != worker.last_note:
        worker.last_note, worker.since = note, time.monotonic()
    return time.monotonic() - worker.since > seconds


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"crashed with {signal.Signals(-code).name}"
    return f"exited with {code}"
