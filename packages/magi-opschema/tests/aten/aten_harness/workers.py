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
_TASKS_PER_CHILD = 32
"""The number of tasks after which a new child starts, so that memory that tasks leave does not add up."""


class Note:
    """A line of text in memory shared with the parent: what a child is doing, which can be read after it died."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NOTE_SIZE)

    def write(self, text: str) -> None:
        """Replace the text."""
        data = text.encode()[: _NOTE_SIZE - 1] + b"\0"
        self._memory[: len(data)] = data

    def read(self) -> str:
        """The current text."""
        return self._memory[:_NOTE_SIZE].partition(b"\0")[0].decode(errors="replace")


@dataclass(frozen=True)
class Death:
    """A child that ended without a result: what it was doing, and how it ended."""

    doing: str
    how: str


@dataclass
class _Job(Generic[Task]):
    task: Task
    alone: bool
    deaths: list[Death] = field(default_factory=list)


@dataclass
class _Worker(Generic[Task]):
    process: ForkProcess
    pipe: mpc.Connection
    note: Note
    job: _Job[Task]
    begun: int = 0
    last_note: str = ""
    since: float = 0.0

    def begin(self, job: _Job[Task]) -> None:
        """Send the child its next task."""
        self.job = job
        self.begun += 1
        self.since = time.monotonic()
        self.pipe.send((job.task, frozenset(death.doing for death in job.deaths)))

    def dismiss(self) -> None:
        """Tell the child to end."""
        self.pipe.send(None)
        self.process.join()

    def hangs(self, seconds: float) -> bool:
        """Whether the child has been doing one thing for longer than *seconds*."""
        note = self.note.read()
        if note != self.last_note:
            self.last_note, self.since = note, time.monotonic()
        return time.monotonic() - self.since > seconds


def run_tasks(
    tasks: Sequence[Task],
    work: Callable[[Task, Note, frozenset[str]], Result],
    *,
    jobs: int,
    seconds: float,
    alone: Callable[[Task], bool],
    retries: int = 12,
) -> Iterator[tuple[Task, Result | None, list[Death]]]:
    """Do *work* on every task in forked children, and yield each result with the deaths that it cost.

    A child does several tasks, because forking costs more than most of them. If a child dies at a task that was not its
    first, the cause may be an earlier task, so the task starts again in a separate child. If that dies too, the death
    counts, and the task starts once more, without what the dead children were doing.

    Args:
        tasks: What to do.
        work: Called in a child with the task, the note to write, and the notes at which earlier children died.
        jobs: How many children work at a time.
        seconds: How long a note may be unchanged before its child counts as hanging.
        alone: Whether a task gets a child of its own.
        retries: The number of deaths after which a task is given up; its result is then None.

    Yields:
        The task, its result, and its deaths, in the order in which tasks end.
    """
    waiting = deque(_Job(task, alone(task)) for task in tasks)
    running: dict[mpc.Connection, _Worker[Task]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                worker = _start(waiting.popleft(), work)
                running[worker.pipe] = worker
            ready = mpc.wait(list(running), timeout=0.5)
            for pipe in [pipe for pipe in running if pipe in ready]:
                worker = running[pipe]
                job = worker.job
                try:
                    result = pipe.recv()
                except EOFError:
                    del running[pipe]
                    worker.process.join()
                    yield from _again(worker, _ending(worker.process.exitcode), waiting, retries)
                    continue
                if waiting and not (job.alone or waiting[0].alone) and worker.begun < _TASKS_PER_CHILD:
                    worker.begin(waiting.popleft())
                else:
                    del running[pipe]
                    worker.dismiss()
                yield job.task, result, job.deaths
            for pipe, worker in list(running.items()):
                if worker.hangs(seconds) and not pipe.poll():
                    del running[pipe]
                    worker.process.kill()
                    worker.process.join()
                    yield from _again(worker, f"hung for {seconds:.0f} s", waiting, retries)
    finally:
        for worker in running.values():
            worker.process.kill()
            worker.process.join()


def isolated(work: Callable[[], Result], *, seconds: float) -> Result | None:
    """The result of *work* in a child; None if the child crashes, or takes longer than *seconds*."""
    ours, theirs = _fork.Pipe(duplex=False)
    # Tensors are sent as bytes, because pickling would pass a file descriptor that is closed with this process.
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


def _start(job: _Job[Task], work: Callable[[Task, Note, frozenset[str]], Any]) -> _Worker[Task]:
    ours, theirs = _fork.Pipe()
    note = Note()
    process = _fork.Process(target=_serve, args=(theirs, work, note, os.getpid()))
    process.start()
    theirs.close()
    worker = _Worker(process, ours, note, job)
    worker.begin(job)
    return worker


def _serve(pipe: mpc.Connection, work: Callable[[Any, Note, frozenset[str]], Any], note: Note, parent: int) -> None:
    _settle_in()
    while (message := _received(pipe, parent)) is not None:
        task, left_out = message
        pipe.send(work(task, note, left_out))
    os._exit(0)


def _received(pipe: mpc.Connection, parent: int) -> Any:
    # Later children hold the other end of this pipe too, so a killed parent is detected in another way.
    while not pipe.poll(5.0):
        if os.getppid() != parent:
            return None
    return pipe.recv()


def _answer(pipe: mpc.Connection, work: Callable[[], bytes]) -> None:
    _settle_in()
    pipe.send_bytes(work())
    pipe.close()
    os._exit(0)


def _settle_in() -> None:
    """Make a forked child quiet and single-threaded. It ends by `os._exit`, without the exit handlers of its parent."""
    torch.set_num_threads(1)
    # C++ code warns on descriptor 2 about unusual inputs; Python's own stderr stays.
    sys.stderr = os.fdopen(os.dup(2), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _again(
    worker: _Worker[Task], how: str, waiting: deque[_Job[Task]], retries: int
) -> Iterator[tuple[Task, None, list[Death]]]:
    job = worker.job
    if worker.begun > 1:
        waiting.appendleft(_Job(job.task, True, job.deaths))
        return
    job.deaths.append(Death(worker.note.read(), how))
    if len(job.deaths) >= retries:
        yield job.task, None, job.deaths
    else:
        waiting.appendleft(job)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"crashed with {signal.Signals(-code).name}"
    return f"exited with {code}"
