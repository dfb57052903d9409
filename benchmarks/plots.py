# SPDX-License-Identifier: Apache-2.0
"""Draw the published results: one panel a case, one bar an arm, for docs/performance.md.

    python benchmarks/plots.py [NAME ...]

Reads benchmarks/results/NAME.json and writes docs/plots/NAME.svg; without a name, all of them. A bar is the median of
the repeats, its whisker reaches from the first to the third quartile. Nothing is measured here. The ground is
transparent, and the ink follows the page: dark on a light one, light on a dark one.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _panels
import matplotlib as mpl
from matplotlib.figure import Figure


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes


ROOT = Path(__file__).parents[1]
RESULTS, PLOTS = ROOT / "benchmarks" / "results", ROOT / "docs" / "plots"
RUN_OF_TESTS = "gpu_e2e"
# Panels side by side: two where something is longer than this.
COLUMNS, LONG = 3, 32
OURS, THEIRS = "#6f6fe0", "#9a9aac"
# matplotlib writes one colour, which the file then takes from the page that shows it.
INK = "#010203"
INK_OF_PAGES = "svg{color:#1f2328}@media (prefers-color-scheme:dark){svg{color:#e4e4ea}}"
INKED = ("text.color", "axes.edgecolor", "xtick.color", "ytick.color")
OUR_ARMS = (
    *("magi", "check", "dispatch", "see_through", "seen_through", "epilogue", "handle", "object", "slot8", "active"),
    *("opaque_opschema", "cold, report", "warm, report", "nvfp4", "background", "graphs"),
)
UNITS = ((1.0, "s"), (1e3, "ms"), (1e6, "µs"))


def names() -> list[str]:
    """The benchmarks whose results are published, and have times that were taken while nothing compiled."""
    published = [path for path in sorted(RESULTS.glob("*.json")) if path.stem != RUN_OF_TESTS]
    return [path.stem for path in published if _panels.panels(json.loads(path.read_text())["rows"])]


def unit_for(seconds: float) -> tuple[float, str]:
    """The factor and the name of the largest unit in which *seconds* is at least one."""
    return next((unit for unit in UNITS if seconds * unit[0] >= 1), UNITS[-1])


def labels(name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the page calls the arms of the benchmark *name*, with the release of torch where there are several."""
    several = len({row["torch"] for row in rows}) > 1
    words = [_panels.of_arm(name, row["arm"]) for row in rows]
    return [
        f"{arm}, {row['torch'].partition('+')[0]}" if several else arm for arm, row in zip(words, rows, strict=True)
    ]


def draw_panel(axes: Axes, name: str, case: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """The arms of one case, the first on top, each with its median written beside the bar."""
    medians = [statistics.median(row["seconds"]) for row in rows]
    factor, _ = unit_for(min(medians))
    for place, (row, median) in enumerate(zip(rows, medians, strict=True)):
        # A single repeat has no quartiles.
        low, _, high = statistics.quantiles(row["seconds"], n=4) if len(row["seconds"]) > 1 else [median] * 3
        whisker = [[factor * max(median - low, 0)], [factor * max(high - median, 0)]]
        is_ours = row["arm"].startswith(OUR_ARMS) and not row["arm"].endswith("floor")
        color = OURS if is_ours else THEIRS
        axes.barh(place, factor * median, xerr=whisker, color=color, ecolor=INK, height=0.7)
        of_label, unit = unit_for(median)
        axes.annotate(
            f"{of_label * median:.3g} {unit}",
            (factor * max(median, high), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(rows)), labels(name, rows), fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.28)
    axes.set_xticks([])
    axes.set_title(textwrap.fill(_panels.of_case(name, case), 40), fontsize=9, loc="left")
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def draw(name: str) -> Path:
    """Write the picture of one benchmark and return its path."""
    result = json.loads((RESULTS / f"{name}.json").read_text())
    cases = _panels.panels(result["rows"])
    words = [_panels.of_case(name, case) for case in cases] + [
        word for row in cases.values() for word in labels(name, row)
    ]
    columns = COLUMNS if max(map(len, words)) <= LONG else 2
    lines = -(-len(cases) // columns)
    arms = max(len(rows) for rows in cases.values())
    # The same input gives the same file: names of elements come from the salt, not from a random number.
    settings: Any = {"svg.hashsalt": name, **dict.fromkeys(INKED, INK)}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(10, lines * (0.75 + 0.28 * arms)), layout="constrained")
        grid = figure.subplots(lines, columns, squeeze=False).flat
        for axes, (case, rows) in zip(grid, cases.items(), strict=False):
            draw_panel(axes, name, case, rows)
        for axes in list(figure.axes)[len(cases) :]:
            axes.set_visible(False)
        description = f"{json.dumps(result['machine'])}, commit {result['commit']}"
        text = io.StringIO()
        metadata = {"Date": None, "Title": name, "Description": description}
        figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    PLOTS.mkdir(exist_ok=True)
    path = PLOTS / f"{name}.svg"
    path.write_text(text.getvalue().replace(INK, "currentColor").replace("</style>", f"{INK_OF_PAGES}</style>", 1))
    return path


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help=f"of {', '.join(names())}")
    for name in parser.parse_args(argv).name or names():
        print(draw(name).relative_to(ROOT))


if __name__ == "__main__":
    main()
