# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side as a page."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from .html import details, diff_block, page, table, titled
from .sections import called, shown, summary, total_seconds


if TYPE_CHECKING:
    from collections.abc import Sequence

    from magi_backend.records import Compilation

    from .compare import Pair, PairedRuns


def comparison_as_html(comparison: PairedRuns) -> str:
    """The page: a table of what both runs compiled, the changes of each pair, and what only one has."""
    before, after = comparison.before, comparison.after
    rows = [_row(place, pair) for place, pair in enumerate(comparison.pairs)]
    columns = ("before", "after", "of", "inputs", "time before", "time after", "ratio", "changed")
    body = [
        "<h2>Compilations of both</h2>" + table(columns, rows) if rows else "",
        *(_pair(place, pair) for place, pair in enumerate(comparison.pairs)),
        _alone("Only before", comparison.only_before),
        _alone("Only after", comparison.only_after),
    ]
    subtitle = f"before: {before.title}, {before.subtitle}; after: {after.title}, {after.subtitle}"
    return page("Two runs side by side", subtitle, "\n".join(body))


def _row(place: int, pair: Pair) -> tuple[str, ...]:
    changed = escape(", ".join(pair.changed)) or "<span class='soft'>nothing</span>"
    return (
        str(pair.before.index),
        str(pair.after.index),
        f"<a href='#pair-{place}'>{escape(called(pair.after))}</a>" if pair.changed else escape(called(pair.after)),
        escape(summary(pair.after.inputs)),
        shown(total_seconds(pair.before)),
        shown(total_seconds(pair.after)),
        f"{pair.ratio:.2f}" if pair.ratio else "",
        changed,
    )


def _pair(place: int, pair: Pair) -> str:
    if not pair.changed:
        return ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in pair.lines())
    diffs = "".join(details(escape(name), diff_block(lines)) for name, lines in pair.graph_diffs())
    head = f"<b>{escape(called(pair.after))}</b> <span class='soft small'>{escape(', '.join(pair.changed))}</span>"
    return (
        f"<details class='compilation' id='pair-{place}' open><summary>{head}</summary>"
        f"<div><ul>{lines}</ul>{diffs}</div></details>"
    )


def _alone(title: str, compilations: Sequence[Compilation]) -> str:
    rows = [
        (str(one.index), escape(called(one)), escape(summary(one.inputs)), shown(total_seconds(one)))
        for one in compilations
    ]
    return titled(title, ("number", "of", "inputs", "time"), rows)
