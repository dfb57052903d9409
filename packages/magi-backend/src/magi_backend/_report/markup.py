# SPDX-License-Identifier: Apache-2.0
"""The elements of a page. Each function says whether it takes HTML or text, and returns HTML."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from .calls import shown


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .diff import DiffLine


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
