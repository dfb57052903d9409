# SPDX-License-Identifier: Apache-2.0
"""The collectors that are open where a compilation starts, its log, and the other work of the process."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from magi_backend import _torch_compat
from magi_backend._settings import Request
from magi_backend.records import Compilation, GraphBreak, OpUse, describe_input

from .folder import EntryFile, Folder, Process, file_stem, folder_of, from_plain, this_process, to_plain
from .hidden import graph_break, recompilation, without_fractions
from .log import CompilationLog


@dataclass(frozen=True)
class BrokenAt:
    """A graph break, and how often it happened."""

    at: GraphBreak
    times: int


@dataclass(frozen=True)
class GivenUp:
    """A function that Dynamo did not capture, or not again."""

    function: str
    place: str
    """Its file and first line."""
    reason: str
    """The first line of Dynamo's error."""
    times: int
    is_raised: bool = False
    """Whether the caller got that error."""

    @property
    def is_at_limit(self) -> bool:
        """Whether Dynamo compiles it no more; torch 2.10 writes recompile_limit."""
        return "recompile limit" in self.reason.replace("_", " ")

    @property
    def became(self) -> str:
        """What happened to it then."""
        if self.is_raised:
            return "failed"
        return "runs in Python where no graph fits" if self.is_at_limit else "runs in Python"


@dataclass(frozen=True)
class ProcessRecord:
    """What one process compiled, besides the graphs of this backend, and the functions that Dynamo did not capture."""

    process: Process
    others: int = 0
    """The number of graphs that other backends compiled."""
    breaks: tuple[BrokenAt, ...] = ()
    """The graph breaks of all functions, also of those for other backends."""
    given_up: tuple[GivenUp, ...] = ()


class ProcessFile:
    """The record of this process while it grows. Dynamo calls it for every function that it has captured."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._pid = os.getpid()
        self._path = folder.path / "processes" / f"{file_stem()}.json"
        self._lock = threading.Lock()
        self._breaks: Counter[GraphBreak] = Counter()
        self._given_up: Counter[GivenUp] = Counter()
        self._seen_breaks = 0
        self._written: ProcessRecord | None = None
        self.logs: weakref.WeakSet[CompilationLog] = weakref.WeakSet()
        """Those of the compilations in the folder whose code may still be called."""
        atexit.register(self._end)
        self.write()

    def note(self, end: _torch_compat.frames.FrameEnd) -> None:
        """Count what Dynamo did, and write the record if something is new."""
        if end.failure and not end.calls:
            reason = without_fractions(end.failure).splitlines()[0]
            with self._lock:
                self._given_up[GivenUp(end.function, end.place, reason, 1, end.is_raised)] += 1
        self.write()

    def _end(self) -> None:
        if os.getpid() == self._pid:
            for log in list(self.logs):
                log.write_counts()
            self.write()

    def write(self) -> None:
        """Write the record to its file if it has changed; a process that was forked since has a file of its own."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            found = _torch_compat.frames.graph_breaks()
            if len(found) < self._seen_breaks:  # torch._dynamo.reset() forgets them
                self._seen_breaks = 0
            self._breaks.update(map(graph_break, found[self._seen_breaks :]))
            self._seen_breaks = len(found)
            record = ProcessRecord(
                this_process(),
                max(_torch_compat.frames.captured_graphs() - _ours.total(), 0),
                tuple(BrokenAt(at, times) for at, times in self._breaks.items()),
                tuple(replace(what, times=times) for what, times in self._given_up.items()),
            )
            if record != self._written:
                self._written = record
                self._folder.write(self._path, json.dumps(to_plain(record)))


_ours: Counter[str] = Counter()


def count_ours() -> None:
    """Count a graph that Dynamo captured in this process for this backend, on record or not."""
    with _lock:
        _ours["graphs"] += 1


_files: dict[tuple[Folder, int], ProcessFile] = {}
_lock = threading.Lock()


def process_file(place: str) -> ProcessFile:
    """The record of this process in the folder *place*, which Dynamo calls from now on, on this thread."""
    folder = folder_of(place)
    with _lock:
        file = _files.get((folder, os.getpid()))
        if file is None:
            file = _files[folder, os.getpid()] = ProcessFile(folder)
    return file


def processes(place: Path) -> Iterator[ProcessRecord]:
    """The records of the processes that wrote into the folder *place*, in the order in which they began."""
    for path in sorted((place / "processes").glob("*.json")):
        yield from_plain(ProcessRecord, json.loads(path.read_text()))


@dataclass(eq=False)
class Collector:
    """The compilations that started while it was open, in order."""

    fresh: bool = False
    eager_random: bool = False
    """Whether compilations use the random numbers of eager mode from here on."""
    dtypes: set[torch.dtype] = field(default_factory=set)
    """The dtypes of the tensors in the captured graphs."""
    logs: list[CompilationLog] = field(default_factory=list)
    """They may still grow."""

    def __len__(self) -> int:
        return len(self.logs)

    def compilations(self) -> tuple[Compilation, ...]:
        """A record of each compilation as it is now."""
        return tuple(replace(log.snapshot(), index=index) for index, log in enumerate(self.logs))


_collector: ContextVar[Collector | None] = ContextVar("magi_collector", default=None)


@contextlib.contextmanager
def collecting(collector: Collector) -> Iterator[Collector]:
    """A context in which every compilation that starts on this thread is added to *collector*."""
    token = _collector.set(collector)
    try:
        yield collector
    finally:
        _collector.reset(token)


class _Frame(threading.local):
    """The compilations of the function that Dynamo is capturing on this thread."""

    def __init__(self) -> None:
        self.logs: list[CompilationLog] = []
        self.files: set[ProcessFile] = set()


_frame = _Frame()


def _frame_ended(end: _torch_compat.frames.FrameEnd) -> None:
    logs, _frame.logs = _frame.logs, []
    for log in logs:
        log.update(frame_seconds=end.seconds)
    for file in _frame.files:
        file.note(end)


@contextlib.contextmanager
def open_log(
    gm: GraphModule, example_inputs: Sequence[Any], request: Request, ops: tuple[OpUse, ...]
) -> Iterator[CompilationLog]:
    """A context with the log of one compilation; times, cache use and a failure are filled in at its end."""
    collector, report = _collector.get(), request.config.report
    index = len(collector) if collector is not None else 0
    compilation = Compilation(
        index=index,
        label=request.label or f"graph {index}",
        nodes=sum(node.op.startswith("call_") for node in gm.graph.nodes),
        inputs=tuple(describe_input(value) for value in example_inputs),
        ops=ops,
        settings=tuple((name, repr(value), request.config.origin(name)) for name, value in request.config.items()),
        capture_seconds=_torch_compat.frames.capture_seconds(),
    )
    log = CompilationLog(
        compilation,
        fresh=collector is not None and collector.fresh,
        watched=collector is not None,
        eager_random=collector is not None and collector.eager_random,
        file=EntryFile(report) if report else None,
    )
    if collector is not None:
        collector.logs.append(log)
        collector.dtypes |= _torch_compat.nodes.dtypes_in(gm)
    if log.keeps_texts:
        with log.spending():
            log.update(**_capture(gm), captured=log.kept(gm))
            _frame.logs.append(log)
            if report:
                file = process_file(report)
                file.logs.add(log)
                _frame.files.add(file)
            _torch_compat.frames.when_frames_end(_frame_ended)
    try:
        with log.compiling():
            yield log
    except _torch_compat.compiling.restarts():
        # Dynamo will capture the function again.
        log.forget()
        if collector is not None:
            collector.logs.remove(log)
        raise
    count_ours()


def _capture(gm: GraphModule) -> dict[str, Any]:
    """What Dynamo reports about the function from which it captured *gm*."""
    frame, stopped = _torch_compat.frames.captured_frame(), _torch_compat.frames.stopped_by(gm)
    return {
        "compile_id": frame.compile_id,
        "function": frame.function,
        "place": frame.place,
        "recompiled": recompilation(frame.recompiled, _torch_compat.nodes.static_sizes(gm)),
        "stopped": None if stopped is None else graph_break(stopped),
    }
