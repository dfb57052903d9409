# SPDX-License-Identifier: Apache-2.0
"""A report as lines and tables for a terminal."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from .sections import Line, called, compilation_lines, compilation_tables, shown, summary


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from magi_backend.records import Compilation

    from .sections import Table


def as_text(report: Iterable[Line | Table], width: int) -> str:
    """*report* without colours, at most *width* columns wide."""
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, legacy_windows=False).print(as_renderable(report))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def as_renderable(report: Iterable[Line | Table]) -> RenderableType:
    """*report* for ``rich.print``."""
    return Group(*(part for section in report for part in _parts(section)))


def _parts(section: Line | Table) -> Iterator[RenderableType]:
    if isinstance(section, Line):
        text = Text(section.text, style=section.style)
        yield Padding(text, (0, 0, 0, section.indent)) if section.indent else text
        return
    table = RichTable(
        title=section.title, title_justify="left", title_style="italic", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in section.columns:
        table.add_column(column, overflow="fold")
    for row in section.rows:
        table.add_row(*map(Text, row))
    if table.row_count:
        yield table


def compilation_as_text(one: Compilation) -> Iterator[Line | Table]:
    """What a terminal shows of *one*."""
    cache = one.cache
    used = f"caches: {cache.hits} hits, {cache.misses} misses" if cache.hits or cache.misses else "caches passed by"
    facts = f"{called(one)}, {one.nodes} calls captured, {shown(one.seconds)}, {used}"
    yield Line(f"Compilation {one.index}: {facts}", "bold")
    yield Line(f"inputs {summary(one.inputs)}")
    yield from compilation_lines(one)
    if one.pieces:
        yield Line("pieces " + " | ".join(one.pieces))
    for op in one.ops:
        yield from (Line(""), Line(op.text, indent=2))
    yield Line("")
    yield from compilation_tables(one)
