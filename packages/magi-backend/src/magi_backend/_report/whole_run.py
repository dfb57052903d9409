# SPDX-License-Identifier: Apache-2.0
"""What was compiled in a run, in all its processes, and what to look at in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .sections import advice_on, called, capture_line


if TYPE_CHECKING:
    from collections.abc import Iterator

    from magi_backend._records.collect import BrokenAt, GivenUp, ProcessRecord
    from magi_backend._records.folder import Entry, Process


@dataclass(frozen=True)
class Note:
    """One thing to look at.

    Attributes:
        indices: The compilations that it is about; empty for one that is about the whole run.
        text: What happened.
        advice: What to do about it, or empty.
    """

    indices: tuple[int, ...]
    text: str
    advice: str


@dataclass(frozen=True)
class WholeRun:
    """What was compiled in a run, in all its processes.

    Attributes:
        entries: Each compilation by backend magi, in the order in which they started, numbered by ``index``.
        processes: Other work of each process: graphs of other backends, graph breaks.
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
        """``rank 3`` for a process with a rank, ``process 4711`` for any other."""
        return f"rank {process.rank}" if process.rank else f"process {process.pid}"

    def ours(self, process: Process) -> int:
        """How many compilations of the backend magi *process* has."""
        return sum(entry.process == process for entry in self.entries)

    def notes(self) -> tuple[Note, ...]:
        """What to look at first. A note that applies to several compilations is given once."""
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
            for sentence in one.uncut:
                yield one.index, f"{name}: {sentence}", ""
            for graph in one.graphs:
                if graph.fell_back:
                    yield one.index, f"{name} fell back: {graph.title} was {graph.fell_back}.", "Please report it."
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
