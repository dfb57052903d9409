# SPDX-License-Identifier: Apache-2.0
"""What a run compiled, read from the folder that ``magi.report`` named."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from magi_backend._records.folder import Entry, Folder, Process, entries, with_texts
from magi_backend._records.plain import to_plain
from magi_backend._records.run import BrokenAt, GivenUp, ProcessRecord, processes
from magi_backend.errors import ReportError

from .advice import advice_on
from .capture import capture_line
from .names import called


if TYPE_CHECKING:
    from collections.abc import Iterator

    from .compare import Comparison


@dataclass(frozen=True)
class Note:
    """Something to look at.

    Attributes:
        indices: The compilations that it is about; empty for one that is about the whole run.
        text: What happened.
        advice: What to do about it, or empty.
    """

    indices: tuple[int, ...]
    text: str
    advice: str


@dataclass(frozen=True)
class RunReport:
    """What was compiled in a run, in all its processes.

    Attributes:
        entries: Each compilation by backend magi, in the order in which they started, numbered by ``index``.
        processes: What each process compiled besides: how much by other backends, graph breaks.
    """

    entries: tuple[Entry, ...]
    processes: tuple[ProcessRecord, ...]

    @property
    def title(self) -> str:
        """The program."""
        program = self.entries[0].process.program or "a run"
        return f"{Path(program.split(' ')[0]).name or program}, compiled by magi"

    @property
    def subtitle(self) -> str:
        """The versions of torch."""
        return f"torch {', '.join(dict.fromkeys(entry.process.torch for entry in self.entries))}"

    @property
    def breaks(self) -> tuple[BrokenAt, ...]:
        """Every graph break of all processes, the most frequent one first."""
        return tuple(sorted((b for each in self.processes for b in each.breaks), key=lambda found: -found.times))

    @property
    def given_up(self) -> tuple[GivenUp, ...]:
        """The functions that Dynamo left to Python, in all processes."""
        return tuple(one for each in self.processes for one in each.given_up)

    def who(self, process: Process) -> str:
        """``rank 3`` of a process that has a rank, else ``process 4711``."""
        return f"rank {process.rank}" if process.rank else f"process {process.pid}"

    def ours(self, process: Process) -> int:
        """How many compilations of the backend magi *process* has."""
        return sum(entry.process == process for entry in self.entries)

    def notes(self) -> tuple[Note, ...]:
        """What to look at first; what is the same for several compilations is said once."""
        indices: dict[tuple[str, str], list[int]] = {}
        for index, text, advice in self._noted():
            indices.setdefault((text, advice), []).extend([] if index is None else [index])
        return tuple(Note(tuple(those), *said) for said, those in indices.items())

    def _noted(self) -> Iterator[tuple[int | None, str, str]]:
        for entry in self.entries:
            one, name = entry.compilation, called(entry.compilation)
            if not entry.finished:
                yield one.index, f"{name} was being compiled when the process ended.", ""
            elif one.error:
                yield one.index, f"{name} failed: {one.error.splitlines()[0]}", ""
            if any(not check.agrees for check in one.checks):
                yield one.index, f"{name} differs from eager.", ""
            if again := one.recompiled:
                yield one.index, f"{name} was compiled again: {again.guard}.", advice_on(again)
            if slow := capture_line(one):
                yield one.index, f"{name}: {slow}", ""
        for found in self.breaks:
            yield None, f"Graph break at {found.at}.", " ".join(found.at.hints[:1])
        for given_up in self.given_up:
            yield None, f"{given_up.function} ({given_up.place}) runs in Python: {given_up.reason}", ""

    def compared_with(self, after: RunReport) -> Comparison:
        """What changed from this run to *after*: graphs, passes, kernels, settings and times."""
        from .compare import compared

        return compared(self, after)

    def to_text(self, width: int = 120) -> str:
        """The index, what to look at first, and each compilation, as plain text."""
        from .text import as_text, run_as_renderable

        return as_text(run_as_renderable(self), width)

    def to_json(self, indent: int | None = 2) -> str:
        """All of it as JSON."""
        return json.dumps(to_plain(self), indent=indent)

    def to_html(self) -> str:
        """All of it as one HTML page that needs no other file."""
        from .html import run_as_html

        return run_as_html(self)

    def __str__(self) -> str:
        return self.to_text()


def read_report(folder: str | Path) -> RunReport:
    """Read what ``magi.report``, or ``MAGI_COMPILE_REPORT``, wrote into *folder*; also while the run goes on.

    Raises:
        ReportError: No compilation is there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     compiled = torch.compile(torch.sin, backend="magi", options={"magi.report": folder})
        ...     _ = compiled(torch.ones(3))
        ...     report = read_report(folder)
        >>> len(report.entries)
        1
    """
    place = Path(folder)
    found = list(entries(place)) if place.is_dir() else []
    if not found:
        msg = (
            f"{place} holds no compilation. Run the program with MAGI_COMPILE_REPORT={place}; only what "
            'backend="magi" compiles is kept.'
        )
        raise ReportError(msg)
    text_of = Folder(place).text
    numbered = (
        replace(entry, compilation=replace(with_texts(entry.compilation, text_of), index=index))
        for index, entry in enumerate(found)
    )
    return RunReport(tuple(numbered), tuple(processes(place)))
