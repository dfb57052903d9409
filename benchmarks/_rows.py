# SPDX-License-Identifier: Apache-2.0
"""Rows that are written as they come, joined over several runs, and published with their ratios."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from _ratios import ratios
from _results import RESULTS
from _workers import Row


Key = tuple[str, str, str]


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add *rows* to the file *path*, one a line."""
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read(paths: Iterable[Path]) -> list[Row]:
    """The rows in *paths*: files of `append`, or published results."""
    found: list[Row] = []
    for path in paths:
        text = path.read_text()
        found += json.loads(text)["rows"] if path.suffix == ".json" else map(json.loads, text.splitlines())
    return found


def joined(rows: Iterable[Row]) -> list[Row]:
    """The last row of each case, arm and release of torch, also where that one failed."""
    kept: dict[Key, Row] = {}
    for row in rows:
        key = row["case"], row["arm"], row["torch"]
        kept.pop(key, None)
        kept[key] = row
    return list(kept.values())


def table_of(
    columns: Sequence[str], measured: Callable[[Row, float], Sequence[str]]
) -> Callable[[Sequence[Row]], list[str]]:
    """What makes a Markdown table of *columns*, one line per row.

    A line has the case, the arm and the release, and what *measured* makes of the row and its median. The row of one
    that failed has the reason, and empty cells.
    """

    def cells(row: Row) -> list[str]:
        rest = measured(row, statistics.median(row["seconds"])) if row["seconds"] else [row["reason"].replace("|", "/")]
        found = [row["case"], row["arm"], row["torch"], *rest]
        return [*found, *[""] * (len(columns) - len(found))]

    def table(rows: Sequence[Row]) -> list[str]:
        lines = [f"| {' | '.join(each)} |" for each in (columns, *map(cells, rows))]
        return [lines[0], f"|{'---|' * len(columns)}", *lines[1:]]

    return table


def publish(
    name: str, files: Sequence[Path], place: Callable[[Row], Any], table: Callable[[Sequence[Row]], list[str]]
) -> None:
    """Join *files* with what is published of benchmark *name*, write results/NAME.json and .md, print the latter."""
    published = RESULTS / f"{name}.json"
    rows = sorted(joined(read([*([published] if published.exists() else []), *files])), key=place)
    computed = ratios(name, rows)
    result = {
        "name": name,
        "commit": Counter(row["commit"] for row in rows).most_common(1)[0][0],
        "versions": {"torch": sorted({row["torch"] for row in rows})},
        "machine": sorted({row["device"] for row in rows if "device" in row}),
        "rows": rows,
        "ratios": computed,
    }
    RESULTS.mkdir(exist_ok=True)
    published.write_text(json.dumps(result, indent=1) + "\n")
    lines = [f"# {name}", "", *table(rows), "", "| ratio | value |", "|---|---|"]
    lines += [f"| {key} | {value:.3f} |" for key, value in computed.items()]
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")
    print(*lines, sep="\n")
