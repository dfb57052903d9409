# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML page with one short script and no other file. Every text is escaped."""

from __future__ import annotations

from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from .advice import advice_on
from .calls import shown, spread
from .capture import capture_line
from .graphs_html import captured_graph, graphs
from .index_html import index, notes, tiles, toolbar
from .markup import details, fill, phase_bar, table, text_block, titled
from .names import called, short, state, summary
from .sizes import SIZE_COLUMNS, size_cells, size_lines
from .times import compilation_phases, total_seconds


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from magi_backend._records.records import Compilation, GraphRecord

    from .calls import CallRecord
    from .whole_run import WholeRun


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
