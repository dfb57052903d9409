# SPDX-License-Identifier: Apache-2.0
"""The graphs of a compilation on its page: as captured, around each pass, as lowered; and the generated code."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from magi_backend._records.code import kernel_sources, without_kernels

from .calls import counted, shown
from .diff import changed_lines, diff_lines
from .markup import details, diff_block, fill, graph_block, phase_bar, table
from .times import graph_phases


if TYPE_CHECKING:
    from collections.abc import Iterator

    from magi_backend._records.records import Compilation, GraphRecord, KernelRun


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
