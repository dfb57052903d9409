# SPDX-License-Identifier: Apache-2.0
"""The table of rows of decodes: a line for the calls under each arm, with what compiling them took."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from _workers import Row


COLUMNS = (
    *("case", "arm", "torch", "median ms", "alone ms", "over floor", "compile s", "graphs"),
    *("triton / conv / copies ms", "launches", "peak GiB", "error", "error of eager", "at a second size"),
)


def table(rows: Iterable[Row]) -> list[str]:
    """A Markdown table, one line per row."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    rows = list(rows)
    # A compilation alone says more than one beside others, so it comes last and wins.
    compilations = sorted(filter(_is_compilation, rows), key=lambda row: -row.get("compiled_beside", 0))
    compiled = {(row["case"].partition("_compile")[0], row["arm"], row["torch"]): row for row in compilations}
    floors = {row["case"]: row["floor_seconds"] for row in rows if row.get("floor_seconds")}
    has_calls = {(row["case"], row["arm"], row["torch"]) for row in rows if not _is_compilation(row)}
    for row in rows:
        case, arm, release = row["case"].partition("_compile")[0], row["arm"], row["torch"]
        compilation = _compilation(compiled.get((case, arm, release)))
        if not _is_compilation(row):
            cells = [case, arm, release, *_measured(row, floors.get(case), compilation)]
        elif (case, arm, release) in has_calls:
            continue
        else:
            cells = [case, arm, release, "", "", "", *compilation, *[""] * 6]
        lines.append("| " + " | ".join(cells) + " |")
        if arm.startswith("magi"):
            lines += [f"|  | {line} |" + " |" * (len(COLUMNS) - 2) for line in row.get("passes", ())]
    return lines


def _is_compilation(row: Row) -> bool:
    return "_compile" in row["case"]


def _compilation(row: Row | None) -> list[str]:
    """Seconds to compile, of each call that compiled where there were several, and graphs."""
    if row is None:
        return ["", ""]
    if not row["seconds"]:
        return [row["reason"], ""]
    cold: list[float] = row.get("cold_seconds") or row["seconds"]
    beside = " together" * bool(row["compiled_beside"])
    return [" + ".join(f"{seconds:.1f}" for seconds in cold) + beside, str(row.get("graphs", ""))]


def _measured(row: Row, floor: float | None, compilation: list[str]) -> list[str]:
    if not row["seconds"]:
        return [row["reason"], "", "", *compilation, *[""] * 6]
    seconds = statistics.median(row["seconds"])
    alone = row.get("alone_seconds")  # rows of before 2026-11-21 are of calls alone
    kinds = [1e3 * row["seconds_by_kind"].get(kind, 0.0) for kind in ("triton", "convolution", "layout_copies")]
    both = [row[name]["relative"] for name in ("difference", "eager_difference") if name in row]
    errors = [f"{error:.2e}" for error in both or [row["relative_error"]]]
    second: dict[str, Any] = row.get("second_size", {}).get("difference", {})
    return [
        f"{1e3 * seconds:.3f}",
        f"{1e3 * statistics.median(alone):.3f}" if alone else "",
        f"{seconds / floor:.2f}" if floor else "",
        *compilation,
        " / ".join(f"{ms:.2f}" for ms in kinds) if row["seconds_by_kind"] else "",
        str(sum(row["launches"].values())) if row["launches"] else "",
        f"{row['peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else "",
        *[*errors, ""][:2],
        f"{second['relative']:.2e}" if second else "",
    ]
