# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML page: no script, no other file, every text escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from .calls import spread
from .capture import capture_line
from .sizes import SIZE_COLUMNS, size_cells, size_lines


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from magi_backend._records.records import Compilation, GraphRecord

    from .calls import CallRecord


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; --bar: #4c78a8; --bad: #c0392b; --good: #2e7d32; }}
@media (prefers-color-scheme: dark) {{ :root {{ --bar: #7fa8d6; --bad: #ff8a80; --good: #81c784; }} }}
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }}
h1, h2, p, li, td {{ overflow-wrap: anywhere; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.1rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); }}
h3 {{ font-size: .95rem; margin: 1.2rem 0 .3rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; min-width: 46rem; }}
th, td {{ text-align: left; vertical-align: top; padding: .25rem .9rem .25rem 0; }}
td {{ min-width: 5.5rem; }}
tr {{ border-bottom: 1px solid var(--line); }}
th, .time {{ white-space: nowrap; }} th {{ font-weight: 600; }}
pre {{ overflow-x: auto; border: 1px solid var(--line); border-radius: 4px; padding: .6rem; line-height: 1.3; }}
ol.pieces {{ display: flex; flex-wrap: wrap; gap: .4rem; list-style: none; padding: 0; }}
ol.pieces li {{ border: 1px solid var(--line); border-radius: 4px; padding: .15rem .5rem; max-width: 100%; }}
.bar {{ display: inline-block; height: .8em; min-width: 1px; background: var(--bar); border-radius: 2px; }}
.bad {{ color: var(--bad); font-weight: 600; }} .good {{ color: var(--good); }}
details > summary {{ cursor: pointer; overflow-wrap: anywhere; }} summary > h3 {{ display: inline; }}
details {{ margin: .4rem 0; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>torch {torch}</p>
{body}
</body>
</html>
"""


def as_html(title: str, torch: str, calls: Sequence[CallRecord], compilations: Sequence[Compilation]) -> str:
    """The page of a report."""
    body = [*([_calls(calls)] if calls else []), *map(_compilation, compilations)]
    return _PAGE.format(title=escape(title), torch=escape(torch), body="\n".join(body))


def _calls(calls: Sequence[CallRecord]) -> str:
    longest = max((max(call.first_seconds, *call.eager_seconds) for call in calls), default=0.0)
    rows = [
        (
            _inputs(call.inputs),
            f"<span id='call-{index}-graphs'>{call.compilations}</span>",
            _bar(call.first_seconds, longest),
            escape(spread(call.later_seconds)),
            escape(spread(call.eager_seconds)),
            _verdict(call, gradients=False),
            _verdict(call, gradients=True),
        )
        for index, call in enumerate(calls)
    ]
    columns = ("inputs", "graphs compiled", "first call", "later calls", "eager", "outputs", "gradients")
    lines = [f"<p class='bad'>{escape(line)}</p>" for call in calls for line in call.lines()]
    return "<h2>Calls</h2>" + _table(columns, rows) + "".join(lines)


def _inputs(inputs: tuple[str, ...], shown: int = 3) -> str:
    """The first inputs, and the others behind a click; parameters make the list long."""
    first, more = escape(", ".join(inputs[:shown])), escape(", ".join(inputs[shown:]))
    return f"{first}<details><summary>and {len(inputs) - shown} more</summary>{more}</details>" if more else first


def _verdict(call: CallRecord, *, gradients: bool) -> str:
    worst = call.largest(gradients=gradients)
    if worst is None:
        return "none"
    if worst.agrees:
        return f"<span class='good'>agree</span>, within {worst.largest:.1e}"
    return f"<span class='bad'>differ</span> by {worst.largest:.1e}, see below"


def _compilation(compilation: Compilation) -> str:
    cache, slow_capture = compilation.cache, capture_line(compilation)
    return "\n".join(
        [
            f"<section id='compilation-{compilation.index}'>",
            f"<h2>Compilation {compilation.index}: {escape(compilation.label)}</h2>",
            (
                f"<p>{compilation.nodes} calls captured, {compilation.seconds:.2f} s, "
                f"caches: {cache.hits} hits, {cache.misses} misses, {cache.bypasses} bypasses</p>"
            ),
            f"<p>{escape(slow_capture)}</p>" if slow_capture else "",
            f"<p class='bad'>{escape(compilation.error)}</p>" if compilation.error else "",
            _pieces(compilation.pieces),
            _titled("Graphs", ("graph", "operator calls", "symbols", "time"), _graphs(compilation.graphs)),
            _titled("Passes", ("graph", "pass", "ran", "why", "time"), _passes(compilation.graphs)),
            _titled("Configuration changes", ("graph", "key", "before", "after"), _changes(compilation.graphs)),
            _titled("Guards", ("graph", "guard", "against", "what it does", "times"), _guards(compilation.graphs)),
            _titled("Checks against eager", ("piece", "compared", "largest difference", "agree"), _checks(compilation)),
            _sizes(compilation),
            _ops(compilation),
            _generated(compilation.graphs),
            _titled("Settings", ("name", "value", "from"), (tuple(map(escape, row)) for row in compilation.settings)),
            _details("Inputs", "\n".join(compilation.inputs)),
            "</section>",
        ]
    )


def _pieces(pieces: tuple[str, ...]) -> str:
    if not pieces:
        return ""
    return "<ol class='pieces'>" + "".join(f"<li>{escape(piece)}</li>" for piece in pieces) + "</ol>"


def _graphs(graphs: tuple[GraphRecord, ...]) -> Iterator[tuple[str, ...]]:
    longest = max((graph.seconds for graph in graphs), default=0.0)
    for graph in graphs:
        yield _name(graph), str(graph.nodes), escape(", ".join(graph.symbols)) or "none", _bar(graph.seconds, longest)


def _passes(graphs: tuple[GraphRecord, ...]) -> Iterator[tuple[str, ...]]:
    for graph in graphs:
        for outcome in graph.passes:
            ran = "<span class='good'>yes</span>" if outcome.ran else "no"
            yield _name(graph), escape(outcome.name), ran, escape(outcome.reason), f"{outcome.seconds * 1e3:.1f} ms"


def _changes(graphs: tuple[GraphRecord, ...]) -> Iterator[tuple[str, ...]]:
    for graph in graphs:
        for change in graph.changes:
            yield _name(graph), escape(change.key), escape(change.before), escape(change.after)


def _guards(graphs: tuple[GraphRecord, ...]) -> Iterator[tuple[str, ...]]:
    for graph in graphs:
        for guard in graph.guards:
            against = f"{guard.severity}: {guard.effect}"
            yield _name(graph), escape(guard.name), escape(against), escape(guard.guard), str(guard.times)


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
    return _titled("Sizes", columns, rows) + "".join(f"<p>{escape(line)}</p>" for line in size_lines(sizes))


def _ops(compilation: Compilation) -> str:
    blocks = [f"<pre>{escape(op.text)}</pre>" for op in compilation.ops]
    return "<h3>Operators</h3>" + "".join(blocks) if blocks else ""


def _generated(graphs: tuple[GraphRecord, ...]) -> str:
    blocks = [
        _details(
            f"{_name(graph)}: {len(graph.kernels)} generated kernels, {len(graph.externs)} library calls",
            "\n".join((*graph.kernels, *graph.externs)),
        )
        for graph in graphs
    ]
    return "<h3>Kernels</h3>" + "".join(blocks) if any(blocks) else ""


def _name(graph: GraphRecord) -> str:
    return escape(f"{graph.piece} {graph.kind}".strip())


def _bar(seconds: float, longest: float) -> str:
    width = 8 * seconds / longest if longest else 0.0
    return f"<span class='time'><span class='bar' style='width:{width:.2f}rem'></span> {seconds:.3g} s</span>"


def _details(summary: str, text: str) -> str:
    return f"<details><summary>{summary}</summary><pre>{escape(text)}</pre></details>" if text else ""


def _titled(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]], shown: int = 12) -> str:
    """A table under its title; a long one behind a click on it."""
    rows = list(rows)
    if len(rows) > shown:
        return f"<details><summary><h3>{title} ({len(rows)})</h3></summary>{_table(columns, rows)}</details>"
    return f"<h3>{title}</h3>{_table(columns, rows)}" if rows else ""


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
