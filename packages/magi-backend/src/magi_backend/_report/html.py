# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML page with one short script and no other file. Every text is escaped."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from magi_backend._records.log import kernel_sources, without_kernels

from .sections import (
    SIZE_COLUMNS,
    advice_on,
    called,
    capture_line,
    changed_lines,
    compilation_phases,
    counted,
    diff_lines,
    graph_phases,
    short,
    shown,
    size_cells,
    size_lines,
    spread,
    state,
    summary,
    total_seconds,
)


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from magi_backend._records.folder import Entry
    from magi_backend.records import Compilation, GraphRecord, KernelRun

    from .sections import CallRecord, DiffLine
    from .whole_run import Note, WholeRun


def details(summary: str, inside: str) -> str:
    """*inside*, collapsed under *summary*, both HTML; empty if *inside* is empty."""
    return f"<details><summary>{summary}</summary>{inside}</details>" if inside else ""


def text_block(text: str) -> str:
    """*text* as it is, with lines that may wrap."""
    return f"<pre class='text'>{escape(text)}</pre>" if text else ""


def graph_block(text: str) -> str:
    """A graph or code, with the lines of the program that it comes from shown less prominently."""
    return f"<pre>{chr(10).join(map(_line, text.splitlines()))}</pre>" if text else ""


def _line(text: str) -> str:
    return f"<i>{escape(text)}</i>" if text.lstrip().startswith(("# ", "//")) else escape(text)


_MARKS = {"same": "  ", "added": "+ ", "removed": "- "}
_TAGS = {"same": "", "added": "ins", "removed": "del", "skipped": "u"}


def diff_block(lines: Sequence[DiffLine]) -> str:
    """A diff, in which added and removed lines differ not only in colour."""
    return f"<pre>{''.join(map(_diff_line, lines))}</pre>"


def _diff_line(line: DiffLine) -> str:
    if line.kind == "skipped":
        return f"<u>  ⋯ {escape(line.text)}</u>\n"
    tag, text = _TAGS[line.kind], escape(_MARKS[line.kind] + line.text)
    return f"<{tag}>{text}</{tag}>" if tag else f"{text}\n"


def titled(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], most: int = 12) -> str:
    """A table under its title, collapsed if it is long; empty if there are no rows."""
    rows = list(rows)
    if not rows:
        return ""
    if len(rows) > most:
        return details(f"<h3>{title} ({len(rows)})</h3>", table(columns, rows))
    return f"<h3>{title}</h3>{table(columns, rows)}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already; it can be sorted by each column."""
    head = "".join(f"<th scope='col'><button type='button'>{escape(column)}</button></th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def fill(share: float, text: str) -> str:
    """A bar for *share*, from 0 to 1, with *text* next to it."""
    return f"<span class='fill' style='width:{6 * share:.2f}rem'></span>{escape(text)}"


def phase_bar(phases: Sequence[tuple[str, float]]) -> str:
    """The parts of a time, as one bar and a legend; empty if all are zero."""
    some = [(name, seconds) for name, seconds in phases if seconds > 0]
    total = sum(seconds for _, seconds in some)
    if not total:
        return ""
    bar = "".join(
        f"<span style='flex:{seconds / total:.4f};background:var(--p{index})' title='{escape(name)}'></span>"
        for index, (name, seconds) in enumerate(some)
    )
    legend = "".join(
        f"<li style='--c:var(--p{index})'>{escape(name)} {shown(seconds)}</li>"
        for index, (name, seconds) in enumerate(some)
    )
    return f"<div class='phases'>{bar}</div><ul class='legend'>{legend}</ul>"


def captured_graph(compilation: Compilation) -> str:
    """The graph as Dynamo captured it."""
    return details(f"Captured graph, {compilation.nodes} calls", graph_block(compilation.captured))


def graphs(compilation: Compilation) -> str:
    """A part for each graph that Inductor compiled."""
    return "".join(map(_graph, compilation.graphs))


def _graph(graph: GraphRecord) -> str:
    facts = ["from AOTAutograd's cache" if graph.cached else counted(graph.nodes, "operator call")]
    facts += [f"symbols {', '.join(graph.symbols)}"] if graph.symbols else []
    facts += [counted(len(graph.kernels), "kernel"), counted(len(graph.externs), "library call")]
    facts += [] if graph.cached else [shown(graph.seconds)]
    failed = f"<p class='bad'>{escape(graph.error)}</p>" if graph.error else ""
    failed += f"<p class='bad'>Fell back: {escape(str(graph.fell_back))}</p>" if graph.fell_back else ""
    parts = (failed, phase_bar(graph_phases(graph)), *_texts(graph), _kernels(graph), _code(graph))
    return f"<h3>Graph {escape(graph.title)}</h3><p class='soft small'>{escape(', '.join(facts))}</p>{''.join(parts)}"


def _texts(graph: GraphRecord) -> Iterator[str]:
    yield details("As AOTAutograd gave it to Inductor", graph_block(graph.given))
    for change in graph.changed:
        yield _diff(f"What {escape(change.name)} changed", change.before, change.after)
    if graph.lowered != graph.given:
        yield _diff("From there to the lowered graph, all passes together", graph.given, graph.lowered)
    yield details("As it was lowered", graph_block(graph.lowered) if graph.lowered != graph.given else "")


def _diff(title: str, before: str, after: str) -> str:
    lines = diff_lines(before, after)
    added, removed = changed_lines(lines)
    numbers = f"<span class='good'>+{added}</span> <span class='bad'>&minus;{removed}</span>"
    return details(f"{title} {numbers}", diff_block(lines))


def _code(graph: GraphRecord) -> str:
    return details("Generated code, without the kernels", graph_block(without_kernels(graph.code)))


def _kernels(graph: GraphRecord) -> str:
    sources = kernel_sources(graph.code)
    measured = {run.name: run for run in graph.runs}
    longest = max((run.calls * run.seconds for run in graph.runs), default=0.0)
    names = dict.fromkeys((*graph.kernels, *measured))
    if measured:
        columns = ("kernel", "calls", "time of all", "time of one", "bytes", "share of bandwidth")
        rows = [(_kernel(name, sources), *_run(measured.get(name), longest)) for name in names]
        inside = table(columns, rows)
    else:
        inside = "".join(f"<div>{_kernel(name, sources)}</div>" for name in names)
    count = counted(len(graph.kernels), "generated kernel")
    called = (
        f", {counted(len(graph.externs), 'library call')}: {', '.join(dict.fromkeys(graph.externs))}"
        if graph.externs
        else ""
    )
    return details(escape(count + called), inside or "<p>None was generated.</p>" if names or graph.externs else "")


def _kernel(name: str, sources: dict[str, str]) -> str:
    source = sources.get(name, "")
    return details(f"<code>{escape(name)}</code>", graph_block(source)) or f"<code>{escape(name)}</code>"


def _run(run: KernelRun | None, longest: float) -> tuple[str, ...]:
    if run is None:
        return ("", "", "", "", "")
    total = run.calls * run.seconds
    share = f"{run.share:.0%}" if run.share else ""
    return (
        str(run.calls),
        _together(fill(total / longest if longest else 0.0, f"{total * 1e6:.1f} µs")),
        _together(f"{run.seconds * 1e6:.1f} µs"),
        _together(f"{run.bytes / 2**20:.2f} MiB" if run.bytes >= 2**20 else f"{run.bytes / 2**10:.1f} KiB"),
        share,
    )


def _together(html: str) -> str:
    return f"<span class='together'>{html}</span>"


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


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<h1>{title}</h1>
<p class="soft">{subtitle}</p>
{body}
<script>
{script}</script>
</body>
</html>
"""


def page(title: str, subtitle: str, body: str) -> str:
    """A whole page with *body*, HTML, under a title and a line of text."""
    files = resources.files(__package__ or "magi_backend._report")
    style, script = (files.joinpath(name).read_text() for name in ("page.css", "page.js"))
    return _PAGE.format(title=escape(title), subtitle=escape(subtitle), style=style, script=script, body=body)


def as_html(title: str, torch: str, calls: Sequence[CallRecord], compilations: Sequence[Compilation]) -> str:
    """The page of a report of `explain`."""
    body = [*([_calls(calls)] if calls else []), *(_compilation(each, is_open=True) for each in compilations)]
    return page(title, f"torch {torch}", "\n".join(body))


def run_as_html(run: WholeRun) -> str:
    """The page of a whole run: what to look at first, an index, and a collapsed part for each compilation."""
    compilations = [
        _compilation(entry.compilation, finished=entry.finished, process=run.who(entry.process))
        for entry in run.entries
    ]
    body = [tiles(run), notes(run), toolbar(run), index(run), "<h2>Compilations</h2>", *compilations, _processes(run)]
    return page(run.title, run.subtitle, "\n".join(body))


def _processes(run: WholeRun) -> str:
    breaks = [
        (
            f"<code>{escape(found.at.place)}</code> <span class='soft'>{escape(found.at.function)}</span>",
            escape(found.at.reason),
            escape(" ".join(found.at.hints)),
            str(found.times),
        )
        for found in run.breaks
    ]
    left = [
        (f"{escape(each.function)} <code>{escape(each.place)}</code>", escape(each.reason), str(each.times))
        for each in run.given_up
    ]
    who = [
        (escape(run.who(each.process)), escape(each.process.program), str(run.ours(each.process)), str(each.others))
        for each in run.processes
    ]
    return "".join(
        [
            titled("Graph breaks", ("at", "why", "what torch advises", "times"), breaks),
            titled("Functions that Dynamo left to Python", ("function", "why", "times"), left),
            titled("Processes", ("process", "program", "graphs by magi", "by other backends, not shown"), who),
        ]
    )


def _calls(calls: Sequence[CallRecord]) -> str:
    longest = max((max(call.first_seconds, *call.eager_seconds) for call in calls), default=0.0)
    rows = [
        (
            _inputs(call.inputs),
            f"<span id='call-{index}-graphs'>{call.compilations}</span>",
            fill(call.first_seconds / longest if longest else 0.0, shown(call.first_seconds)),
            escape(spread(call.later_seconds)),
            escape(spread(call.eager_seconds)),
            _verdict(call, gradients=False),
            _verdict(call, gradients=True),
        )
        for index, call in enumerate(calls)
    ]
    columns = ("inputs", "graphs compiled", "first call", "later calls", "eager", "outputs", "gradients")
    lines = [f"<p class='bad'>{escape(line)}</p>" for call in calls for line in call.lines()]
    return "<h2>Calls</h2>" + table(columns, rows) + "".join(lines)


def _inputs(inputs: tuple[str, ...], shown: int = 3) -> str:
    """The first inputs, and the others collapsed, because parameters make the list long."""
    first, more = escape(", ".join(inputs[:shown])), escape(", ".join(inputs[shown:]))
    return first + details(f"and {len(inputs) - shown} more", more)


def _verdict(call: CallRecord, *, gradients: bool) -> str:
    worst = call.largest(gradients=gradients)
    if worst is None:
        return "none"
    if worst.agrees:
        return f"<span class='good'>agree</span>, within {worst.largest:.1e}"
    return f"<span class='bad'>differ</span> by {worst.largest:.1e}, see below"


def _compilation(compilation: Compilation, *, is_open: bool = False, finished: bool = True, process: str = "") -> str:
    said = state(compilation, finished=finished)
    facts = [summary(compilation.inputs), process, shown(total_seconds(compilation))]
    head = (
        f"<b>{compilation.index}: {escape(called(compilation))}</b> "
        f"<span class='soft small'>{escape(', '.join(filter(None, facts)))}</span>"
        + (f" <span class='bad'>{escape(said)}</span>" if said else "")
    )
    opening = " open" if is_open else ""
    name = f"id='compilation-{compilation.index}' data-process='{escape(process)}'"
    body = "\n".join(filter(None, _parts(compilation)))
    return f"<details class='compilation' {name}{opening}><summary>{head}</summary><div>{body}</div></details>"


def _parts(compilation: Compilation) -> Iterator[str]:
    cache = compilation.cache
    where = f"{short(compilation.place)}, number {compilation.compile_id}, " if compilation.place else ""
    yield (
        f"<p class='soft small' title='{escape(compilation.place)}'>{escape(where)}{compilation.nodes} calls captured, "
        f"caches: {cache.hits} hits, {cache.misses} misses, {cache.bypasses} bypasses, "
        f"this record took {shown(compilation.report_seconds)}</p>"
    )
    if slow_capture := capture_line(compilation):
        yield f"<p>{escape(slow_capture)}</p>"
    if compilation.error:
        yield f"<p class='bad'>{escape(compilation.error)}</p>"
    if again := compilation.recompiled:
        at = f", needed at <code>{escape(again.place)}</code>" if again.place else ""
        of = f" of compilation {escape(again.of)}" if again.of else ""
        yield (
            f"<p><b>Compiled again</b>: the guard <code>{escape(again.guard)}</code>{of} failed{at}. "
            f"{escape(advice_on(again))}</p>"
        )
    if stopped := compilation.stopped:
        yield f"<p><b>Ends at a graph break</b>: {escape(str(stopped))} {escape(' '.join(stopped.hints))}</p>"
    yield "".join(f"<p class='bad'>{escape(sentence)}</p>" for sentence in compilation.uncut)
    yield phase_bar(compilation_phases(compilation))
    if compilation.pieces:
        yield "<ol class='pieces'>" + "".join(f"<li>{escape(piece)}</li>" for piece in compilation.pieces) + "</ol>"
    yield captured_graph(compilation)
    yield graphs(compilation)
    yield titled("Passes", ("graph", "pass", "ran", "why", "time"), _passes(compilation.graphs))
    yield titled("Configuration changes", ("graph", "key", "before", "after"), _changes(compilation.graphs))
    yield titled("Repairs", ("graph", "repair", "against", "what it does", "times"), _repairs(compilation.graphs))
    yield titled("Checks against eager", ("piece", "compared", "largest difference", "agree"), _checks(compilation))
    yield _sizes(compilation)
    if compilation.ops:
        yield "<h3>Operators</h3>" + "".join(text_block(op.text) for op in compilation.ops)
    yield titled("Settings", ("name", "value", "from"), (tuple(map(escape, row)) for row in compilation.settings))
    yield details("Inputs", text_block("\n".join(compilation.inputs)))


def _passes(graphs: tuple[GraphRecord, ...]) -> Iterator[tuple[str, ...]]:
    for graph in graphs:
        for outcome in graph.passes:
            ran = "<span class='good'>yes</span>" if outcome.ran else "no"
            yield escape(graph.title), escape(outcome.name), ran, escape(outcome.reason), shown(outcome.seconds)


def _changes(graphs: tuple[GraphRecord, ...]) -> Iterator[tuple[str, ...]]:
    for graph in graphs:
        for change in graph.changes:
            yield escape(graph.title), escape(change.key), escape(change.before), escape(change.after)


def _repairs(graphs: tuple[GraphRecord, ...]) -> Iterator[tuple[str, ...]]:
    for graph in graphs:
        for repair in graph.repairs:
            against = f"{repair.severity}: {repair.effect}"
            yield escape(graph.title), escape(repair.name), escape(against), escape(repair.repair), str(repair.times)


def _checks(compilation: Compilation) -> Iterator[tuple[str, ...]]:
    for check in compilation.checks:
        verdict = "<span class='good'>yes</span>" if check.agrees else "<span class='bad'>no</span>"
        yield escape(check.piece), str(check.compared), f"{check.largest:.1e}", verdict


def _sizes(compilation: Compilation) -> str:
    sizes = compilation.sizes
    if sizes is None:
        return ""
    columns = (*(f"{symbol} = {path}" for symbol, path in sizes.symbols), *SIZE_COLUMNS)
    rows = (tuple(map(escape, size_cells(use))) for use in sizes.uses)
    return titled("Sizes", columns, rows) + "".join(f"<p>{escape(line)}</p>" for line in size_lines(sizes))
