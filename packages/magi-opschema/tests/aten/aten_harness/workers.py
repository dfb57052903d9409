# SPDX-License-Identifier: Apache-2.0
"""Forked processes that do the work, one for each task: a crash or a hang costs one check, never the run.

Forking keeps what the parent loaded: kernels that a user registered, torch's test database, captured calls. A child
runs on one thread, because the threads of its parent do not survive a fork.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing as mp
import multiprocessing.connection as mpc
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch


_fork = mp.get_context("fork")
_MOST_DEATHS = 12
Task = TypeVar("Task")
Result = TypeVar("Result")


class Note:
    """A line of text in memory shared with the parent: what a child is doing, which can be read after it died.

    The child dies if it is doing one thing for longer than *seconds*.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._memory = mmap.mmap(-1, 2048)

    def write(self, text: str) -> None:
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        data = text.encode()[:2047] + b"\0"
        self._memory[: len(data)] = data

    def read(self) -> str:
        return self._memory[:].partition(b"\0")[0].decode(errors="replace")


@dataclass(frozen=True)
class Death:
    """A child that ended without a result: what it was doing, and how it ended."""

    doing: str
    how: str


class _Child:
    def __init__(
        self, task: Any, deaths: list[Death], work: Callable[[Any, Note, frozenset[str]], Any], seconds: float
    ) -> None:
        self.task, self.deaths, self.note = task, deaths, Note(seconds)
        self.pipe, theirs = _fork.Pipe(duplex=False)
        left_out = frozenset(death.doing for death in deaths)
        self.process = _fork.Process(target=_serve, args=(theirs, lambda: work(task, self.note, left_out)))
        self.process.start()
        theirs.close()

    def end(self) -> tuple[bytes, str]:
        """What the child sends, nothing if it died, and how it ended."""
        with contextlib.suppress(EOFError):
            return self.pipe.recv_bytes(), ""
        self.process.join()
        code = self.process.exitcode or 0
        if -code == signal.SIGALRM:
            return b"", f"hung for {self.note.seconds:.0f} s"
        return b"", f"crashed with {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def run_tasks(
    tasks: Sequence[Task], work: Callable[[Task, Note, frozenset[str]], Result], *, seconds: float
) -> Iterator[tuple[Task, Result | None, list[Death]]]:
    """Do *work* on every task in a forked child, and yield each result with the deaths that it cost.

    There is a child for each processor that this process may use. If one dies, its task starts once more, without what
    the dead children were doing; after twelve deaths, its result is None.
    """
    jobs = len(os.sched_getaffinity(0))
    waiting: deque[tuple[Task, list[Death]]] = deque((task, []) for task in tasks)
    running: dict[Any, _Child] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                child = _Child(*waiting.popleft(), work, seconds)
                running[child.pipe] = child
            for pipe in mpc.wait(list(running)):
                child = running.pop(pipe)
                sent, how = child.end()
                child.process.kill()
                deaths = child.deaths if sent else [*child.deaths, Death(child.note.read(), how)]
                if sent:
                    yield child.task, pickle.loads(sent), deaths
                elif len(deaths) < _MOST_DEATHS:
                    waiting.appendleft((child.task, deaths))
                else:
                    yield child.task, None, deaths
    finally:
        for child in running.values():
            child.process.kill()


def _serve(pipe: mpc.Connection, work: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    # C++ code warns on descriptor 2 about unusual inputs; Python's own stderr stays.
    sys.stderr = os.fdopen(os.dup(2), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process
    # As bytes of plain pickle: a pipe would pass a file descriptor for a tensor, which is closed with this process.
    pipe.send_bytes(pickle.dumps(work()))
    os._exit(0)  # without the exit handlers of the parent
