# SPDX-License-Identifier: Apache-2.0
"""Processes that compile a case each, all at the same time, and then measure in turn."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


Row = dict[str, Any]
Measure = Callable[..., list[Row]]

_READY, _REPEAT, _REPORT = "ready", "repeat", "report"


@dataclass(frozen=True)
class Job:
    """A case in a process of its own: *measure* of the *arguments* and an iterator of commands.

    `measure` compiles, then takes one command after another: the first makes it ready to measure, each later one has it
    measure once. When they end it returns its rows. `arm` and `case` name those rows.
    """

    case: str
    arm: str
    measure: Measure
    arguments: tuple[Any, ...]

    @property
    def file_name(self) -> str:
        return f"{self.case}-{self.arm}".translate(str.maketrans(":+=/ ", "_____"))


@dataclass(frozen=True)
class Limits:
    """How many processes compile at once, how many live at once, and the seconds that one may take for a step.

    `seconds` is for all that is compiled, from now on.
    """

    compiling: int
    living: int
    compile_seconds: float
    step_seconds: float
    repeats: int
    seconds: float = math.inf


class Worker:
    """The process of a job, with empty caches of its own below *folder*."""

    def __init__(self, job: Job, folder: Path, preload: Sequence[str]) -> None:
        self.job, self.caches = job, folder / "caches" / job.file_name
        self.log = folder / "logs" / f"{job.file_name}.txt"
        self.rows: list[Row] | None = None
        self.reason = ""
        for place in (self.caches, self.log.parent):
            place.mkdir(parents=True, exist_ok=True)
        # Else torch asks the driver for a GPU while the server imports it, and no process forked from it may use one.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        self.connection, theirs = context.Pipe()
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(self.caches), "TRITON_CACHE_DIR": str(self.caches / "triton")}
        self.process = context.Process(target=_run, args=(job, theirs, str(self.log), environment), daemon=True)
        self.started = time.monotonic()
        self.process.start()
        theirs.close()

    @property
    def lives(self) -> bool:
        """Whether it takes commands still."""
        return self.rows is None and not self.reason

    def hear(self, seconds: float) -> None:
        """Wait for what it says next; it is at an end when it says nothing for so long."""
        try:
            if not self.connection.poll(seconds):
                self.end(f"nothing for {seconds:.0f} s")
                return
            said = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            self.end(f"the process ended, code {self.process.exitcode}")
            return
        if isinstance(said, list):
            self.rows = said
        elif said != _READY:
            self.end(said)

    def ask(self, command: str, seconds: float) -> None:
        """Give it *command*, and wait until it has done that."""
        if self.lives:
            try:
                self.connection.send(command)
            except OSError:
                self.end("the process ended")
            else:
                self.hear(seconds)

    def end(self, reason: str) -> None:
        """Give it up."""
        self.reason = reason
        self.process.kill()

    def result(self) -> list[Row]:
        """Its rows; where it failed, one with the reason."""
        if self.rows is not None:
            return self.rows
        return [{"arm": self.job.arm, "case": self.job.case, "seconds": [], "reason": self.reason[:400]}]


def measured(
    groups: Iterable[Sequence[Job]], limits: Limits, folder: Path, preload: Sequence[str]
) -> Iterator[tuple[Worker, list[Row]]]:
    """The rows of every job as they come; the jobs of a group measure in turn, one repeat each a round.

    Every second round goes backwards, so that no arm always follows the same one.

    No process compiles while another measures. So many groups compile together as may live together. A job that failed,
    or that needs no turn, has its rows at once.
    """
    until = time.monotonic() + limits.seconds
    for wave in _waves(groups, limits.living):
        waiting: dict[Job, Worker] = {}
        for worker in _compiled([job for group in wave for job in group], limits, until, folder, preload):
            if worker.lives:
                waiting[worker.job] = worker
            else:
                yield worker, worker.result()
        for group in wave:
            in_turn = [waiting[job] for job in group if job in waiting]
            # The first command makes a process ready to measure.
            for turn in range(1 + limits.repeats):
                for worker in in_turn[:: -1 if turn % 2 else 1]:
                    worker.ask(_REPEAT, limits.step_seconds)
            for worker in in_turn:
                worker.ask(_REPORT, limits.step_seconds)
                yield worker, worker.result()
                worker.process.kill()


def _waves(groups: Iterable[Sequence[Job]], living: int) -> Iterator[list[Sequence[Job]]]:
    wave: list[Sequence[Job]] = []
    for group in groups:
        if wave and sum(map(len, wave)) + len(group) > living:
            yield wave
            wave = []
        wave.append(group)
    if wave:
        yield wave


def _compiled(
    jobs: Sequence[Job], limits: Limits, until: float, folder: Path, preload: Sequence[str]
) -> Iterator[Worker]:
    """A worker for each job as soon as it waits, is done or has failed; none for what has not begun by *until*."""
    compiling: list[Worker] = []
    todo = list(reversed(jobs))
    while compiling or (todo and time.monotonic() < until):
        while todo and len(compiling) < limits.compiling and time.monotonic() < until:
            compiling.append(Worker(todo.pop(), folder, preload))
        wait([worker.connection for worker in compiling], timeout=1.0)
        for worker in list(compiling):
            age = time.monotonic() - worker.started
            if worker.connection.poll():
                worker.hear(0)
            elif age > limits.compile_seconds or time.monotonic() > until:
                worker.end(f"not compiled after {age:.0f} s")
            else:
                continue
            compiling.remove(worker)
            print(f"{age:6.1f} s  {worker.job.case} {worker.job.arm} {worker.reason[:200]}".rstrip(), flush=True)
            yield worker


def _run(job: Job, connection: Connection, log: str, environment: dict[str, str]) -> None:
    """What the process of *job* does."""
    os.environ.update(environment)
    with Path(log).open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    try:
        said: Any = job.measure(*job.arguments, commands=_commands(connection))
    except Exception as error:  # noqa: BLE001 (the parent reports it as the case's)
        traceback.print_exc()
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(said)


def _commands(connection: Connection) -> Iterator[str]:
    """The commands to repeat; before each the parent hears that this process waits."""
    while True:
        connection.send(_READY)
        try:
            command = connection.recv()
        except EOFError:  # the parent is gone
            sys.exit(1)
        if command != _REPEAT:
            return
        yield command
