# SPDX-License-Identifier: Apache-2.0
"""Other work of one process: graphs of other backends, graph breaks, and functions that Dynamo did not capture."""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from magi_backend import _torch_compat

from .breaks import graph_break
from .folder import Folder, Process, file_stem, folder_of, this_process
from .hidden import without_fractions
from .plain import from_plain, to_plain
from .records import GraphBreak


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True)
class BrokenAt:
    """A graph break, and how often it happened."""

    at: GraphBreak
    times: int


@dataclass(frozen=True)
class GivenUp:
    """A function that Dynamo did not capture, or not again, so that it runs in Python.

    Attributes:
        function: Its name.
        place: Its file and first line.
        reason: The first line of Dynamo's error.
        times: How often.
    """

    function: str
    place: str
    reason: str
    times: int


@dataclass(frozen=True)
class ProcessRecord:
    """What one process compiled, besides the graphs of this backend.

    Attributes:
        process: Which.
        others: The number of graphs that other backends compiled.
        breaks: The graph breaks of all functions, also of those for other backends.
        given_up: The functions that Dynamo left to Python.
    """

    process: Process
    others: int = 0
    breaks: tuple[BrokenAt, ...] = ()
    given_up: tuple[GivenUp, ...] = ()


class ProcessFile:
    """The record of this process while it grows. Dynamo calls it for every function that it has captured."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._pid = os.getpid()
        self._path = folder.path / "processes" / f"{file_stem()}.json"
        self._lock = threading.Lock()
        self._breaks: Counter[GraphBreak] = Counter()
        self._given_up: Counter[tuple[str, str, str]] = Counter()
        self._seen_breaks = 0
        self._written: ProcessRecord | None = None
        atexit.register(self.write)
        self.write()

    def note(self, end: _torch_compat.FrameEnd) -> None:
        """Count what Dynamo did, and write the record if something is new."""
        if end.failure and not end.calls:
            reason = without_fractions(end.failure).splitlines()[0]
            with self._lock:
                self._given_up[end.function, end.place, reason] += 1
        self.write()

    def write(self) -> None:
        """Write the record to its file if it has changed; a process that was forked since has a file of its own."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            found = _torch_compat.graph_breaks()
            if len(found) < self._seen_breaks:  # torch._dynamo.reset() forgets them
                self._seen_breaks = 0
            self._breaks.update(map(graph_break, found[self._seen_breaks :]))
            self._seen_breaks = len(found)
            record = ProcessRecord(
                this_process(),
                max(_torch_compat.captured_graphs() - _ours.total(), 0),
                tuple(BrokenAt(at, times) for at, times in self._breaks.items()),
                tuple(GivenUp(*what, times) for what, times in self._given_up.items()),
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
