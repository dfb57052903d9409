# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML page with one short script and no other file. Every text is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources

from magi_backend._records.log import kernel_sources, without_kernels
from magi_backend.records import Compilation, GraphRecord

from .sections import (
    DiffLine,
    Line,
    Table,
    called,
    changed_lines,
    compilation_lines,
    compilation_phases,
    compilation_tables,
    counted,
    diff_lines,
    graph_phases,
    short,
    shown,
    state,
    summary,
    total_seconds,
)


class Html(str):
    """Text that is HTML already; any other cell of a table is escaped."""

    __slots__ = ()


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


def page(title: str, subtitle: str, *body: str) -> str:
    """A whole page with the HTML *body* under a title and a line of text."""
    files = resources.files(__package__ or "magi_backend._report")
    style, script = (files.joinpath(name).read_text() for name in ("page.css", "page.js"))
    inside = "\n".join(filter(None, body))
    return _PAGE.format(title=escape(title), subtitle=escape(subtitle), style=style, script=script, body=inside)


def details(summary: str, inside: str) -> str:
    """*inside*, collapsed under *summary*, both HTML; empty if *inside* is empty."""
    return f"<details><summary>{summary}</summary>{inside}</details>" if inside else ""


def section(part: Line | Table, most: int = 12) -> str:
    """A paragraph, or a table under its title, which is collapsed if it is long, and left out if it has no rows."""
    if isinstance(part, Line):
        kind = {"yellow": " class='warn'", "red": " class='bad'"}.get(part.style, "")
        return f"<p{kind}>{escape(part.text)}</p>"
    rows = list(part.rows)
    if len(rows) > most:
        return details(f"<h3>{part.title} ({len(rows)})</h3>", table(part.columns, rows))
    return f"<h3>{part.title}</h3>{table(part.columns, rows)}" if rows else ""


_KINDS = {
    **dict.fromkeys(("number", "kernels", "time"), "number"),
    **dict.fromkeys(("function", "inputs"), "where"),
    **dict.fromkeys(("process", "ended", "bytes", "time of one", "time of all"), "short"),
}
"""The classes of columns, which say how wide they are and how they are aligned."""


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], start: str = "<table>", ids: Sequence[str] = ()
) -> str:
    """A table that can be sorted by each column; *ids* say which part of the page each row is about."""
    kinds = [f" class='{_KINDS[column]}'" if column in _KINDS else "" for column in columns]
    head = "".join(
        f"<th scope='col'{kind}><button type='button'>{escape(column)}</button></th>"
        for column, kind in zip(columns, kinds, strict=True)
    )
    labels = [f" data-label='{column}'" if ids else "" for column in columns]
    of = [f" data-of='{one}'" for one in ids] or [""] * len(rows)
    body = "".join(
        f"<tr{named}>"
        + "".join(f"<td{kind}{label}>{_cell(cell)}</td>" for cell, kind, label in zip(row, kinds, labels, strict=True))
        + "</tr>"
        for row, named in zip(rows, of, strict=True)
    )
    return f"<div class='wide'>{start}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(cell: str) -> str:
    if isinstance(cell, Html):
        return cell
    verdict = re.match(r"(yes|agree)\b|(NO|DIFFER)\b", cell)
    if verdict is None:
        return escape(cell)
    kind = "good" if verdict[1] else "bad"
    return f"<span class='{kind}'>{verdict[0]}</span>{escape(cell[verdict.end() :])}"


def diff_block(lines: Sequence[DiffLine]) -> str:
    """A diff, in which added and removed lines differ not only in colour."""
    # An inserted or deleted line is a block, which needs no line break.
    forms = {"same": "  {}\n", "added": "<ins>+ {}</ins>", "removed": "<del>- {}</del>", "skipped": "<u>  ⋯ {}</u>\n"}
    return f"<pre>{''.join(forms[line.kind].format(escape(line.text)) for line in lines)}</pre>"


def _graph_block(text: str) -> str:
    """A graph or code, with the lines of the program that it comes from shown less prominently."""
    lines = (
        f"<i>{escape(line)}</i>" if line.lstrip().startswith(("# ", "//")) else escape(line)
        for line in text.splitlines()
    )
    return f"<pre>{chr(10).join(lines)}</pre>" if text else ""


def _text_block(text: str) -> str:
    return f"<pre class='text'>{escape(text)}</pre>" if text else ""


def fill(share: float, text: str) -> Html:
    """A bar for *share*, from 0 to 1, with *text* next to it."""
    return Html(f"<span class='fill' style='width:{6 * share:.2f}rem'></span>{escape(text)}")


def _phase_bar(phases: Sequence[tuple[str, float]]) -> str:
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


def compilation_as_html(one: Compilation, *, is_open: bool = False, finished: bool = True, process: str = "") -> str:
    """The part of a page about *one*, which opens and closes."""
    ended = state(one, finished=finished)
    facts = ", ".join(filter(None, (summary(one.inputs), process, shown(total_seconds(one)))))
    head = f"<b>{one.index}: {escape(called(one))}</b> <span class='soft small'>{escape(facts)}</span>"
    head += f" <span class='bad'>{escape(ended)}</span>" if ended else ""
    name = f"id='compilation-{one.index}' data-process='{escape(process)}'"
    body = "\n".join(filter(None, _parts(one)))
    opening = " open" if is_open else ""
    return f"<details class='compilation' {name}{opening}><summary>{head}</summary><div>{body}</div></details>"


def _parts(one: Compilation) -> Iterator[str]:
    cache = one.cache
    where = f"{short(one.place)}, number {one.compile_id}, " if one.place else ""
    yield (
        f"<p class='soft small' title='{escape(one.place)}'>{escape(where)}{counted(one.nodes, 'operator')} captured, "
        f"caches: {cache.hits} hits, {cache.misses} misses, {cache.bypasses} bypasses, "
        f"this record took {shown(one.report_seconds)}</p>"
    )
    yield from map(section, compilation_lines(one, full=True))
    yield _phase_bar(compilation_phases(one))
    if one.pieces:
        yield "<ol class='pieces'>" + "".join(f"<li>{escape(piece)}</li>" for piece in one.pieces) + "</ol>"
    yield details(f"Captured graph, {one.nodes} calls", _graph_block(one.captured))
    graphs, *others = compilation_tables(one, full=True)
    yield section(graphs)
    yield from map(_graph, one.graphs)
    yield from map(section, others)
    if one.ops:
        yield "<h3>Operators</h3>" + "".join(_text_block(op.text) for op in one.ops)
    yield details("Inputs", _text_block("\n".join(one.inputs)))


def _graph(graph: GraphRecord) -> str:
    texts = [details("As AOTAutograd gave it to Inductor", _graph_block(graph.given))]
    diffs = [(f"What {escape(change.name)} changed", change.before, change.after) for change in graph.changed]
    if graph.lowered != graph.given:
        diffs.append(("From there to the lowered graph, all passes together", graph.given, graph.lowered))
    for title, before, after in diffs:
        lines = diff_lines(before, after)
        added, removed = changed_lines(lines)
        numbers = f"<span class='good'>+{added}</span> <span class='bad'>&minus;{removed}</span>"
        texts.append(details(f"{title} {numbers}", diff_block(lines)))
    if graph.lowered != graph.given:
        texts.append(details("As it was lowered", _graph_block(graph.lowered)))
    code = details("Generated code, without the kernels", _graph_block(without_kernels(graph.code)))
    inside = "".join((_phase_bar(graph_phases(graph)), *texts, _kernels(graph), code))
    return f"<h3>Graph {escape(graph.title)}</h3>{inside}" if inside else ""


def _kernels(graph: GraphRecord) -> str:
    """The source of each kernel that was generated, and what was measured of it and of library functions."""
    sources = kernel_sources(graph.code)
    runs = {run.name: run for run in graph.runs}
    longest = max((run.calls * run.seconds for run in graph.runs), default=0.0)
    rows = []
    for name in dict.fromkeys((*graph.kernels, *runs)):
        title = f"<code>{escape(name)}</code>"
        row: list[str] = [Html(details(title, _graph_block(sources.get(name, ""))) or title)]
        if run := runs.get(name):
            total = run.calls * run.seconds
            size = f"{run.bytes / 2**20:.2f} MiB" if run.bytes >= 2**20 else f"{run.bytes / 2**10:.1f} KiB"
            row += [str(run.calls), fill(total / longest if longest else 0.0, f"{total * 1e6:.1f} µs")]
            row += [f"{run.seconds * 1e6:.1f} µs", size, f"{run.share:.0%}" if run.share else ""]
        rows.append(row)
    count = counted(len(graph.kernels), "generated kernel")
    if graph.externs:
        count += f", {counted(len(graph.externs), 'library call')}: {', '.join(dict.fromkeys(graph.externs))}"
    if not runs:
        inside = "".join(f"<div>{name}</div>" for (name,) in rows)
        return details(escape(count), inside or "<p>None was generated.</p>" * bool(graph.externs))
    columns = ("kernel", "calls", "time of all", "time of one", "bytes", "share of bandwidth")
    return details(escape(count), table(columns, [[*row, *[""] * (len(columns) - len(row))] for row in rows]))
