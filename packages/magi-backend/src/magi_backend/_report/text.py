# SPDX-License-Identifier: Apache-2.0
"""A report as tables for a terminal. A table without rows is left out."""

from __future__ import annotations

import io
from collections import Counter
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .sections import (
    SIZE_COLUMNS,
    advice_on,
    called,
    capture_line,
    counted,
    shown,
    size_cells,
    size_lines,
    spread,
    state,
    summary,
    total_seconds,
)


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from magi_backend._records.folder import Entry
    from magi_backend.records import Compilation, GraphRecord, PassOutcome

    from .compare import PairedRuns
    from .sections import CallRecord
    from .whole_run import WholeRun


def as_text(report: RenderableType, width: int) -> str:
    """*report* without colours, at most *width* columns wide."""
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, legacy_windows=False).print(report)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def as_renderable(
    title: str, torch: str, calls: Sequence[CallRecord], compilations: Sequence[Compilation]
) -> RenderableType:
    """A report for ``rich.print``."""
    return Group(*_parts(title, torch, calls, compilations))


def run_as_renderable(run: WholeRun) -> RenderableType:
    """A run for ``rich.print``: the index, what to look at first, and each compilation."""
    return Group(*_run(run))


def _run(run: WholeRun) -> Iterator[RenderableType]:
    yield Text(f"{run.title}: {len(run.entries)} compilations with {run.subtitle}", style="bold")
    others = sum(each.others for each in run.processes)
    yield Text(
        f"{counted(others, 'graph')} {'was' if others == 1 else 'were'} compiled by other backends, and "
        f"{'is' if others == 1 else 'are'} not shown."
    )
    yield Text()
    columns = ("number", "process", "of", "inputs", "graphs", "kernels", "compiled in")
    yield from _table("Compilations", columns, (_row(run, entry) for entry in run.entries))
    notes = run.notes()
    if notes:
        yield Text("Look at first", style="italic")
    for note in notes:
        numbers = ", ".join(map(str, note.indices)) + ": " * bool(note.indices)
        yield Padding(Text(f"{numbers}{note.text} {note.advice}".rstrip(), style="yellow"), (0, 0, 0, 1))
    for entry in run.entries:
        yield Text()
        yield from _compilation(entry.compilation)


def _row(run: WholeRun, entry: Entry) -> tuple[str, ...]:
    one = entry.compilation
    return (
        str(one.index),
        run.who(entry.process),
        called(one),
        summary(one.inputs),
        str(len(one.graphs)),
        str(sum(len(graph.kernels) for graph in one.graphs)),
        state(one, finished=entry.finished) or shown(total_seconds(one)),
    )


def comparison_as_renderable(comparison: PairedRuns) -> RenderableType:
    """Two runs side by side for ``rich.print``."""
    return Group(*_comparison(comparison))


def _comparison(comparison: PairedRuns) -> Iterator[RenderableType]:
    yield Text(f"{comparison.before.title}, and {comparison.after.title}", style="bold")
    yield from _table(
        "Compilations of both",
        ("before", "after", "of", "inputs", "time before", "time after", "changed"),
        (
            (
                str(pair.before.index),
                str(pair.after.index),
                called(pair.after),
                summary(pair.after.inputs),
                shown(total_seconds(pair.before)),
                shown(total_seconds(pair.after)),
                ", ".join(pair.changed) or "nothing",
            )
            for pair in comparison.pairs
        ),
    )
    for pair in comparison.pairs:
        for line in pair.lines():
            yield Padding(Text(f"{pair.before.index}, {pair.after.index}: {line}"), (0, 0, 0, 1))
    for title, alone in (("Only before", comparison.only_before), ("Only after", comparison.only_after)):
        yield from _table(
            title,
            ("number", "of", "inputs", "time"),
            ((str(one.index), called(one), summary(one.inputs), shown(total_seconds(one))) for one in alone),
        )


def _parts(
    title: str, torch: str, calls: Sequence[CallRecord], compilations: Sequence[Compilation]
) -> Iterator[RenderableType]:
    yield Text(f"{title} with torch {torch}", style="bold")
    for compilation in compilations:
        yield Text()
        yield from _compilation(compilation)
    yield Text()
    yield from _table(
        "Calls",
        ("inputs", "graphs", "first call", "later calls", "eager", "outputs", "gradients"),
        map(_call, calls),
    )
    for call in calls:
        for line in call.lines():
            yield Text(f"{summary(call.inputs)}: {line}", style="yellow")
    if not compilations:
        yield Text("No graph was compiled in these calls: the function had been compiled before.")


def _compilation(compilation: Compilation) -> Iterator[RenderableType]:
    cache = compilation.cache
    used = f"caches: {cache.hits} hits, {cache.misses} misses" if cache.hits or cache.misses else "caches passed by"
    yield Text(
        f"Compilation {compilation.index}: {called(compilation)}, {compilation.nodes} calls captured, "
        f"{shown(compilation.seconds)}, {used}",
        style="bold",
    )
    yield Text(f"inputs {summary(compilation.inputs)}")
    if slow := capture_line(compilation):
        yield Text(slow)
    if again := compilation.recompiled:
        yield Text(f"compiled again: {again.guard}. {advice_on(again)}", style="yellow")
    if stopped := compilation.stopped:
        yield Text(f"ends at a graph break: {stopped}", style="yellow")
    if compilation.error:
        yield Text(f"failed: {compilation.error}", style="red")
    for sentence in compilation.uncut:
        yield Text(sentence, style="yellow")
    for graph in compilation.graphs:
        if graph.fell_back:
            yield Text(f"fell back: {graph.title} was {graph.fell_back}", style="yellow")
    if compilation.pieces:
        yield Text("pieces " + " | ".join(compilation.pieces))
    for op in compilation.ops:
        yield Padding(Text(op.text), (1, 0, 0, 2))
    yield Text()
    yield from _table(
        "Graphs",
        ("graph", "calls", "symbols", "kernels", "library calls", "compiled in"),
        map(_graph, compilation.graphs),
    )
    yield from _table(
        "Passes",
        ("graph", "pass", "ran", "why"),
        (_outcome(graph, p) for graph in compilation.graphs for p in graph.passes),
    )
    yield from _table(
        "Configuration changes",
        ("graph", "key", "before", "after"),
        ((graph.title, c.key, c.before, c.after) for graph in compilation.graphs for c in graph.changes),
    )
    yield from _table(
        "Repairs",
        ("graph", "repair", "against", "what it does", "times"),
        (
            (graph.title, r.name, f"{r.severity}: {r.effect}", r.repair, str(r.times))
            for graph in compilation.graphs
            for r in graph.repairs
        ),
    )
    yield from _table(
        "Checks against eager",
        ("piece", "compared", "largest difference", "agree"),
        ((c.piece, str(c.compared), f"{c.largest:.1e}", "yes" if c.agrees else "NO") for c in compilation.checks),
    )
    yield from _sizes(compilation)
    yield from _table(
        "Settings", ("name", "value", "from"), (row for row in compilation.settings if row[2] != "default")
    )


def _sizes(compilation: Compilation) -> Iterator[RenderableType]:
    sizes = compilation.sizes
    if sizes is None:
        return
    yield from _table(
        "Sizes",
        (*(f"{symbol} = {path}" for symbol, path in sizes.symbols), *SIZE_COLUMNS),
        (size_cells(use) for use in sizes.uses),
    )
    for line in size_lines(sizes):
        yield Text(line)


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[RenderableType]:
    table = Table(title=title, title_justify="left", title_style="italic", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if table.row_count:
        yield table


def _call(call: CallRecord) -> tuple[str, ...]:
    return (
        summary(call.inputs),
        str(call.compilations),
        shown(call.first_seconds),
        spread(call.later_seconds),
        spread(call.eager_seconds),
        _difference(call, gradients=False),
        _difference(call, gradients=True),
    )


def _difference(call: CallRecord, *, gradients: bool) -> str:
    worst = call.largest(gradients=gradients)
    if worst is None:
        return "none"
    return f"agree, within {worst.largest:.1e}" if worst.agrees else f"DIFFER by {worst.largest:.1e}, see below"


def _graph(graph: GraphRecord) -> tuple[str, ...]:
    externs = ", ".join(f"{name} x{count}" for name, count in Counter(graph.externs).items())
    return (
        graph.title,
        str(graph.nodes),
        ", ".join(graph.symbols) or "none",
        str(len(graph.kernels)),
        externs or "none",
        f"failed: {graph.error}" if graph.error else "from a cache" if graph.cached else shown(graph.seconds),
    )


def _outcome(graph: GraphRecord, outcome: PassOutcome) -> tuple[str, ...]:
    return graph.title, outcome.name, "yes" if outcome.ran else "no", outcome.reason
