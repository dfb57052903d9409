# SPDX-License-Identifier: Apache-2.0
"""Draw the published results: one panel a case, one bar an arm, for docs/performance.md.

    python benchmarks/plots.py [NAME ...]

Reads benchmarks/results/NAME.json and writes docs/plots/NAME.svg; without a name, all of them. A bar is the median of
the repeats, its whisker reaches from the first to the third quartile. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes


ROOT = Path(__file__).parents[1]
RESULTS, PLOTS = ROOT / "benchmarks" / "results", ROOT / "docs" / "plots"
RUN_OF_TESTS = "gpu_e2e"
COLUMNS = 3
OURS, THEIRS = "#5b5bd6", "#b4b4c4"
OUR_ARMS = (
    *("magi", "check", "dispatch", "see_through", "seen_through", "epilogue", "handle", "object", "slot8", "active"),
    *("opaque_opschema", "cold, report", "warm, report"),
)
UNITS = ((1.0, "s"), (1e3, "ms"), (1e6, "µs"))


def names() -> list[str]:
    """The benchmarks whose results are published."""
    return sorted(path.stem for path in RESULTS.glob("*.json") if path.stem != RUN_OF_TESTS)


def panels(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each case that was measured, in the order of the file; not compilations beside many others."""
    cases: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["seconds"] and not row.get("compiled_beside"):
            cases.setdefault(row["case"], []).append(row)
    return {case: found for case, found in cases.items() if len(found) > 1}


def unit_for(seconds: float) -> tuple[float, str]:
    """The factor and the name of the largest unit in which *seconds* is at least one."""
    return next((unit for unit in UNITS if seconds * unit[0] >= 1), UNITS[-1])


def labels(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The arms, with the release of torch where there are several."""
    releases = {row["torch"] for row in rows}
    return [row["arm"] if len(releases) == 1 else f"{row['arm']}, {row['torch'].partition('+')[0]}" for row in rows]


def draw_panel(axes: Axes, case: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """The arms of one case, the first on top, each with its median written beside the bar."""
    medians = [statistics.median(row["seconds"]) for row in rows]
    factor, _ = unit_for(min(medians))
    for place, (row, median) in enumerate(zip(rows, medians, strict=True)):
        # A single repeat has no quartiles.
        low, _, high = statistics.quantiles(row["seconds"], n=4) if len(row["seconds"]) > 1 else [median] * 3
        whisker = [[factor * max(median - low, 0)], [factor * max(high - median, 0)]]
        color = OURS if row["arm"].startswith(OUR_ARMS) else THEIRS
        axes.barh(place, factor * median, xerr=whisker, color=color, ecolor="#555555", height=0.7)
        of_label, unit = unit_for(median)
        axes.annotate(
            f"{of_label * median:.3g} {unit}",
            (factor * max(median, high), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(rows)), labels(rows), fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.28)
    axes.set_xticks([])
    axes.set_title(case, fontsize=9, loc="left")
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def draw(name: str) -> Path:
    """Write the picture of one benchmark and return its path."""
    result = json.loads((RESULTS / f"{name}.json").read_text())
    cases = panels(result["rows"])
    lines = -(-len(cases) // COLUMNS)
    arms = max(len(rows) for rows in cases.values())
    # The same input gives the same file: names of elements come from the salt, not from a random number.
    mpl.rcParams["svg.hashsalt"] = name
    figure = Figure(figsize=(10, lines * (0.6 + 0.28 * arms)), layout="constrained")
    grid = figure.subplots(lines, COLUMNS, squeeze=False).flat
    for axes, (case, rows) in zip(grid, cases.items(), strict=False):
        draw_panel(axes, case, rows)
    for axes in list(figure.axes)[len(cases) :]:
        axes.set_visible(False)
    PLOTS.mkdir(exist_ok=True)
    path = PLOTS / f"{name}.svg"
    description = f"{json.dumps(result['machine'])}, commit {result['commit']}"
    figure.savefig(path, metadata={"Date": None, "Title": name, "Description": description})
    return path


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help=f"of {', '.join(names())}")
    for name in parser.parse_args(argv).name or names():
        print(draw(name).relative_to(ROOT))


if __name__ == "__main__":
    main()
