# SPDX-License-Identifier: Apache-2.0
"""The top of the page of a run: numbers, what to look at first, the search, and the index."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from .calls import shown
from .names import called, short, state, summary
from .times import total_seconds


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magi_backend._records.folder import Entry

    from .whole_run import Note, WholeRun


def tiles(run: WholeRun) -> str:
    """The numbers of a run."""
    compilations = [entry.compilation for entry in run.entries]
    again = sum(each.recompiled is not None for each in compilations)
    numbers = {
        "compilations": str(len(compilations)),
        "of them again": str(again),
        "processes": str(len(run.processes)),
        "compiling": shown(sum(map(total_seconds, compilations))),
        "kernels": str(sum(len(graph.kernels) for each in compilations for graph in each.graphs)),
        "graph breaks": str(len(run.breaks)),
        "by other backends": str(sum(each.others for each in run.processes)),
    }
    return f"<dl class='tiles'>{''.join(f'<div><dt>{name}</dt><dd>{n}</dd></div>' for name, n in numbers.items())}</dl>"


def notes(run: WholeRun) -> str:
    """What to look at first; empty if there is nothing to report."""
    items = "".join(f"<li>{_linked(note)}{escape(note.text)} {_advice(note)}</li>" for note in run.notes())
    return f"<section class='notes'><h2>Look at first</h2><ul>{items}</ul></section>" if items else ""


def _linked(note: Note) -> str:
    return " ".join(f"<a href='#compilation-{index}'>{index}</a>" for index in note.indices) + ": " * bool(note.indices)


def _advice(note: Note) -> str:
    return f"<span class='soft'>{escape(note.advice)}</span>" if note.advice else ""


def toolbar(run: WholeRun) -> str:
    """The search, the choice of a process if there are several, and the keys."""
    names = list(dict.fromkeys(run.who(entry.process) for entry in run.entries))
    options = "".join(f"<option value='{escape(name)}'>{escape(name)}</option>" for name in names)
    choice = (
        f"<select id='rank' aria-label='Process'><option value=''>all processes</option>{options}</select>"
        if len(names) > 1
        else ""
    )
    keys = "<kbd>/</kbd> search <kbd>j</kbd> <kbd>k</kbd> next, previous <kbd>o</kbd> open <kbd>e</kbd> open all"
    return (
        "<div class='bar-top'><input id='search' type='search' aria-label='Search' "
        "placeholder='Search functions, kernels, operators, graphs'>"
        f"{choice}<span id='count' class='soft small'></span><span class='soft small keys'>{keys}</span></div>"
    )


@dataclass(frozen=True)
class _Cell:
    """A cell of the index: HTML, a sort key if that is not its text, and the class of its column."""

    html: str
    value: str = ""
    kind: str = ""


def index(run: WholeRun) -> str:
    """A row for each compilation, without the columns that would be empty or the same in every row."""
    rows = [(entry.compilation.index, _cells(run, entry)) for entry in run.entries]
    columns = [name for name in rows[0][1] if _tells(name, [cells for _, cells in rows])]
    head = "".join(
        f"<th scope='col' class='{rows[0][1][name].kind}'><button type='button'>{name}</button></th>"
        for name in columns
    )
    body = "".join(
        f"<tr data-of='compilation-{number}'>{''.join(_cell(name, cells[name]) for name in columns)}</tr>"
        for number, cells in rows
    )
    inside = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f"<div class='wide'><table id='index' class='cards'>{inside}</table></div>"


def _tells(column: str, rows: Sequence[Mapping[str, _Cell]]) -> bool:
    found = {cells[column].html for cells in rows}
    return found != {""} and not (column == "process" and len(found) == 1)


def _cell(column: str, cell: _Cell) -> str:
    of = f" data-value='{cell.value}'" if cell.value else ""
    return f"<td class='{cell.kind}' data-label='{column}'{of}>{cell.html}</td>"


def _cells(run: WholeRun, entry: Entry) -> dict[str, _Cell]:
    compilation = entry.compilation
    seconds = total_seconds(compilation)
    link = f"<a href='#compilation-{compilation.index}'>{escape(called(compilation))}</a>"
    place = f" <span class='soft small'>{escape(short(compilation.place))}</span>" if compilation.place else ""
    again = compilation.recompiled.guard if compilation.recompiled is not None else ""
    ended = state(compilation, finished=entry.finished)
    kinds = Counter(graph.kind for graph in compilation.graphs)
    return {
        "number": _Cell(str(compilation.index), kind="number"),
        "function": _Cell(link + place, kind="where"),
        "inputs": _Cell(escape(summary(compilation.inputs)), kind="where"),
        "process": _Cell(escape(run.who(entry.process)), kind="short"),
        "compiled again": _Cell(f"<span class='small'>{escape(again)}</span>" if again else ""),
        "graphs": _Cell(", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in kinds.items())),
        "kernels": _Cell(str(sum(len(graph.kernels) for graph in compilation.graphs)), kind="number"),
        "time": _Cell(shown(seconds), f"{seconds:.6f}", "number"),
        "ended": _Cell(f"<span class='bad'>{escape(ended)}</span>" if ended else "", kind="short"),
    }
