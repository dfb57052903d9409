# SPDX-License-Identifier: Apache-2.0
"""The report of a run, read from the folder that ``magi.report`` named, and two of them side by side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from magi_backend._records.folder import Entry, Process, entries, to_plain
from magi_backend._records.log import BrokenAt, GivenUp, ProcessRecord, processes
from magi_backend.errors import ReportError
from magi_backend.records import Compilation

from .html import Html, compilation_as_html, details, diff_block, page, section, table
from .sections import (
    DiffLine,
    Line,
    Table,
    advice_on,
    as_text,
    called,
    capture_line,
    changed_lines,
    compilation_as_text,
    counted,
    diff_lines,
    short,
    shown,
    state,
    summary,
    total_seconds,
)


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
class RunReport:
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
        """The functions that Dynamo did not capture, or not again, in all processes."""
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
                yield one.index, f"{name} was compiled again: {again}", advice_on(again)
            if slow := capture_line(one):
                yield one.index, f"{name}: {slow}", ""
        for found in self.breaks:
            yield None, f"Graph break at {found.at}.", " ".join(found.at.hints[:1])
        for given_up in self.given_up:
            hidden = "Guards that fail after this are not seen: mend those that are, and run again."
            said = f"{given_up.function} ({given_up.place}) {given_up.became}: {given_up.reason}"
            yield None, said, hidden if given_up.is_at_limit else ""

    def compared_with(self, after: RunReport) -> Comparison:
        """What changed from this run to *after*: graphs, passes, kernels, settings and times."""
        left, right, pairs = list(self.entries), list(after.entries), []
        for same_inputs in (True, False):
            for old in list(left):
                key = _key(old, same_inputs)
                new = next((entry for entry in right if _key(entry, same_inputs) == key), None)
                if new is not None:
                    left.remove(old)
                    right.remove(new)
                    pairs.append(Pair(old.compilation, new.compilation))
        pairs.sort(key=lambda pair: pair.before.index)
        rest = (tuple(entry.compilation for entry in entries) for entries in (left, right))
        return Comparison(self, after, tuple(pairs), *rest)

    def to_text(self, width: int = 120) -> str:
        """The index, what to look at first, and each compilation as plain text."""
        return as_text(self._text(), width)

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON."""
        return json.dumps(to_plain(self), indent=indent)

    def to_html(self) -> str:
        """The report as one HTML page that needs no other file."""
        compilations = [
            compilation_as_html(entry.compilation, finished=entry.finished, process=self.who(entry.process))
            for entry in self.entries
        ]
        others = map(section, self._others())
        parts = (_tiles(self), _notes(self), _toolbar(self), _index(self), "<h2>Compilations</h2>")
        return page(self.title, self.subtitle, *parts, *compilations, *others)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.to_text())}</pre>"

    def _text(self) -> Iterator[Line | Table]:
        yield Line(f"{self.title}: {len(self.entries)} compilations with {self.subtitle}", "bold")
        others = sum(each.others for each in self.processes)
        if others:
            was, is_ = ("was", "is") if others == 1 else ("were", "are")
            yield Line(f"{counted(others, 'graph')} {was} compiled by other backends, and {is_} not shown.")
        yield Line("")
        yield Table(
            "Compilations",
            ("number", "process", "of", "inputs", "graphs", "kernels", "compiled in"),
            (
                (
                    str(one.index),
                    self.who(entry.process),
                    called(one),
                    summary(one.inputs),
                    str(len(one.graphs)),
                    str(sum(len(graph.kernels) for graph in one.graphs)),
                    state(one, finished=entry.finished) or shown(total_seconds(one)),
                )
                for entry in self.entries
                for one in [entry.compilation]
            ),
        )
        notes = self.notes()
        if notes:
            yield Line("Look at first", "italic")
        for note in notes:
            numbers = ", ".join(map(str, note.indices)) + ": " * bool(note.indices)
            yield Line(f"{numbers}{note.text} {note.advice}".rstrip(), "yellow", indent=1)
        for entry in self.entries:
            yield Line("")
            yield from compilation_as_text(entry.compilation)

    def _others(self) -> Iterator[Table]:
        """What a page says about the processes."""
        yield Table(
            "Graph breaks",
            ("at", "why", "what torch advises", "times"),
            (
                (f"{found.at.place} {found.at.function}", found.at.reason, " ".join(found.at.hints), str(found.times))
                for found in self.breaks
            ),
        )
        yield Table(
            "Functions that Dynamo did not capture",
            ("function", "then", "why", "times"),
            ((f"{each.function} {each.place}", each.became, each.reason, str(each.times)) for each in self.given_up),
        )
        yield Table(
            "Processes",
            ("process", "program", "graphs by magi", "by other backends, not shown"),
            (
                (self.who(each.process), each.process.program, str(self.ours(each.process)), str(each.others))
                for each in self.processes
            ),
        )


def _tiles(run: RunReport) -> str:
    """The numbers of *run*."""
    compilations = [entry.compilation for entry in run.entries]
    numbers = {
        "compilations": len(compilations),
        "of them again": sum(each.recompiled is not None for each in compilations),
        "processes": len(run.processes),
        "compiling": shown(sum(map(total_seconds, compilations))),
        "kernels": sum(len(graph.kernels) for each in compilations for graph in each.graphs),
        "graph breaks": len(run.breaks),
        "by other backends": sum(each.others for each in run.processes),
    }
    return f"<dl class='tiles'>{''.join(f'<div><dt>{name}</dt><dd>{n}</dd></div>' for name, n in numbers.items())}</dl>"


def _notes(run: RunReport) -> str:
    items = ""
    for note in run.notes():
        links = " ".join(f"<a href='#compilation-{index}'>{index}</a>" for index in note.indices)
        start = f"{links}: " if links else ""
        items += f"<li>{start}{escape(note.text)} <span class='soft'>{escape(note.advice)}</span></li>"
    return f"<section class='notes'><h2>Look at first</h2><ul>{items}</ul></section>" if items else ""


def _toolbar(run: RunReport) -> str:
    """The search, the choice of a process if there are several, and the keys."""
    names = list(dict.fromkeys(run.who(entry.process) for entry in run.entries))
    options = "".join(f"<option value='{escape(name)}'>{escape(name)}</option>" for name in names)
    choice = f"<select id='rank' aria-label='Process'><option value=''>all processes</option>{options}</select>"
    keys = "<kbd>/</kbd> search <kbd>j</kbd> <kbd>k</kbd> next, previous <kbd>o</kbd> open <kbd>e</kbd> open all"
    return (
        "<div class='bar-top'><input id='search' type='search' aria-label='Search' "
        f"placeholder='Search functions, kernels, operators, graphs'>{choice if len(names) > 1 else ''}"
        f"<span id='count' class='soft small'></span><span class='soft small keys'>{keys}</span></div>"
    )


def _index(run: RunReport) -> str:
    """A row for each compilation, without the columns that would be empty or the same in every row."""
    rows = []
    for entry in run.entries:
        one = entry.compilation
        kinds = Counter(graph.kind for graph in one.graphs)
        place = f" <span class='soft small'>{escape(short(one.place))}</span>" if one.place else ""
        rows.append(
            {
                "number": str(one.index),
                "function": Html(f"<a href='#compilation-{one.index}'>{escape(called(one))}</a>{place}"),
                "inputs": summary(one.inputs),
                "process": run.who(entry.process),
                "compiled again": one.recompiled.guard if one.recompiled else "",
                "graphs": ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in kinds.items()),
                "kernels": str(sum(len(graph.kernels) for graph in one.graphs)),
                "time": shown(total_seconds(one)),
                "ended": state(one, finished=entry.finished),
            }
        )
    cells = {column: {row[column] for row in rows} for column in rows[0]}
    columns = [name for name, found in cells.items() if found != {""} and (name != "process" or len(found) > 1)]
    ids = [f"compilation-{row['number']}" for row in rows]
    return table(
        columns, [[row[name] for name in columns] for row in rows], start="<table id='index' class='cards'>", ids=ids
    )


@dataclass(frozen=True)
class Pair:
    """One compilation of each run, of the same function."""

    before: Compilation
    after: Compilation

    @property
    def changed(self) -> tuple[str, ...]:
        """What differs, one word for each kind; times are left out, because they always differ."""
        before, after = self._compared()
        return tuple(kind for kind, part in before.items() if part != after[kind])

    @property
    def ratio(self) -> float:
        """The time after over the time before; 0 if there is no time before."""
        before = total_seconds(self.before)
        return total_seconds(self.after) / before if before else 0.0

    def lines(self) -> Iterator[str]:
        """What changed, one sentence for each change."""
        if self._half_cached:
            yield "one of the two came from a cache, so what passes and repairs did is not compared"
        for name, lines in self.graph_diffs():
            added, removed = changed_lines(lines)
            yield f"{name}: {added} lines added, {removed} removed"
        old, new = self._compared()
        for what, kind in (("pass", "passes"), ("repair", "repairs"), ("setting", "settings")):
            before, after = old[kind], new[kind]
            for name in dict.fromkeys((*before, *after)):
                if before.get(name) != after.get(name):
                    yield f"{what} {name}: {before.get(name, 'not there')} -> {after.get(name, 'not there')}"
        for what, kernels in (("new", new["kernels"] - old["kernels"]), ("gone", old["kernels"] - new["kernels"])):
            for kernel, count in kernels.items():
                yield f"kernel {kernel}: {what}" + (f", {count} times" if count > 1 else "")

    def graph_diffs(self) -> Iterator[tuple[str, list[DiffLine]]]:
        """The captured graph and each lowered graph that differ, by name."""
        before, after = (parts["graphs"] for parts in self._compared())
        for name in dict.fromkeys((*before, *after)):
            if before.get(name, "") != after.get(name, ""):
                yield name, diff_lines(before.get(name, ""), after.get(name, ""))

    @property
    def _half_cached(self) -> bool:
        return any(graph.cached for graph in self.before.graphs) != any(graph.cached for graph in self.after.graphs)

    def _compared(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is compared; of a graph from a cache the code alone is known."""
        both = _parts(self.before), _parts(self.after)
        if self._half_cached:
            for parts in both:
                captured = parts["graphs"]["captured graph"]
                parts |= {"graphs": {"captured graph": captured}, "passes": {}, "repairs": {}}
        return both


def _parts(one: Compilation) -> dict[str, Any]:
    """What is compared of *one*, by kind; texts by name, and how often each kernel is called."""
    graphs = one.graphs
    lowered = {f"graph {graph.title}, lowered": graph.lowered for graph in graphs}
    return {
        "inputs": one.inputs,
        "graphs": {"captured graph": one.captured, **lowered},
        "passes": {
            f"{p.name} on {graph.title}": f"{'ran' if p.ran else 'did not run'} ({p.reason})"
            for graph in graphs
            for p in graph.passes
        },
        "kernels": Counter(name for graph in graphs for name in (*graph.kernels, *graph.externs)),
        "repairs": {f"{r.name} on {graph.title}": f"{r.times} times" for graph in graphs for r in graph.repairs},
        # Each run has another folder.
        "settings": {name: value for name, value, _ in one.settings if name != "report"},
    }


def _key(entry: Entry, same_inputs: bool) -> object:
    """What two compilations with a counterpart in the other run have in common."""
    return entry.process.rank, called(entry.compilation), entry.compilation.inputs if same_inputs else ()


@dataclass(frozen=True)
class Comparison:
    """Two runs, their compilations in pairs as far as they have a counterpart."""

    before: RunReport
    after: RunReport
    pairs: tuple[Pair, ...]
    only_before: tuple[Compilation, ...]
    only_after: tuple[Compilation, ...]

    def to_text(self, width: int = 120) -> str:
        """What changed, as plain text."""
        lines = [
            Line(f"{pair.before.index}, {pair.after.index}: {line}", indent=1)
            for pair in self.pairs
            for line in pair.lines()
        ]
        title = Line(f"{self.before.title}, and {self.after.title}", "bold")
        return as_text([title, self._both(), *lines, *self._alone()], width)

    def to_html(self) -> str:
        """What changed, with the graphs as diffs, as one HTML page."""
        parts = [section(self._both(full=True), most=len(self.pairs))]
        for place, pair in enumerate(self.pairs):
            if pair.changed:
                lines = "".join(f"<li>{escape(line)}</li>" for line in pair.lines())
                diffs = "".join(details(escape(name), diff_block(lines)) for name, lines in pair.graph_diffs())
                changed = f"<span class='soft small'>{escape(', '.join(pair.changed))}</span>"
                parts.append(
                    f"<details class='compilation' id='pair-{place}' open><summary><b>{escape(called(pair.after))}</b> "
                    f"{changed}</summary><div><ul>{lines}</ul>{diffs}</div></details>"
                )
        runs = (
            f"{name}: {run.title}, {run.subtitle}" for name, run in (("before", self.before), ("after", self.after))
        )
        return page("Two runs side by side", "; ".join(runs), *parts, *map(section, self._alone()))

    def _both(self, *, full: bool = False) -> Table:
        """The pairs; *full* adds the ratio of the times, and links to what changed."""
        rows = []
        for place, pair in enumerate(self.pairs):
            name = called(pair.after)
            if full and pair.changed:
                name = Html(f"<a href='#pair-{place}'>{escape(name)}</a>")
            times = (shown(total_seconds(pair.before)), shown(total_seconds(pair.after)))
            ratio = [f"{pair.ratio:.2f}" if pair.ratio else ""] if full else []
            changed = ", ".join(pair.changed) or "nothing"
            indices = (str(pair.before.index), str(pair.after.index))
            rows.append((*indices, name, summary(pair.after.inputs), *times, *ratio, changed))
        named = ("time before", "time after", "ratio") if full else ("time before", "time after")
        columns = ("before", "after", "of", "inputs", *named, "changed")
        return Table("Compilations of both", columns, rows)

    def _alone(self) -> Iterator[Table]:
        for title, alone in (("Only before", self.only_before), ("Only after", self.only_after)):
            yield Table(
                title,
                ("number", "of", "inputs", "time"),
                [(str(one.index), called(one), summary(one.inputs), shown(total_seconds(one))) for one in alone],
            )


def read_report(folder: str | Path) -> RunReport:
    """Read what ``magi.report``, or ``MAGI_COMPILE_REPORT``, wrote into *folder*; it may be called during the run.

    Raises:
        ReportError: The folder holds no compilation.

    Example:
        >>> import tempfile, torch
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
        raise ReportError(
            f"{place} holds no compilation. Run the program with MAGI_COMPILE_REPORT={place}; only what "
            'backend="magi" compiles is kept, and there is nothing to compile in a function without operators.'
        )
    numbered = (
        replace(entry, compilation=replace(entry.compilation, index=index)) for index, entry in enumerate(found)
    )
    return RunReport(tuple(numbered), tuple(processes(place)))
