# SPDX-License-Identifier: Apache-2.0
"""Classes that no other benchmark has, with symbolic sizes that are not square: compiled, right, not fallen back.

    python benchmarks/card.py --out DIR                  # on a GPU; --seconds 560 gives up what is not done by then
    python benchmarks/card.py --out DIR --rows DIR/rows.jsonl      # goes on from there
    python benchmarks/card.py --merge DIR/rows.jsonl

Each (class, arm) is a process with caches of its own; as many at once as ``--compiling`` says. The output of eager
code, of stock and of the backend at two sizes is compared with that of eager code in float32 without TF32. Times are
taken while other processes run, so nothing is made of them. ``--tiny`` is for a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _card_case import NAMES, measure
from _rows import table_of
from _runs import parser_of, place_of_arm, refuse_unknown, run, split
from _workers import Job, Row


NAME = "card"
ARMS = ("stock_dynamic", "magi_dynamic")
COLUMNS = (
    *("class", "arm", "torch", "median ms, beside others", "type", "compile s", "graphs", "fell back"),
    *("error", "of eager", "at the second size", "of eager"),
)
PRELOAD = ("_loaded", "_card_case", "transformers", "diffusers")


def _measured(row: Row, seconds: float) -> list[str]:
    cells = [f"{1e3 * seconds:.3f}", row["dtype"], f"{sum(row['cold_seconds']):.1f}", str(row["graphs"])]
    errors = [row[f"{which}difference"]["relative"] for which in ("", "eager_", "second_", "second_eager_")]
    return [*cells, str(len(row["fell_back"])), *(f"{error:.2e}" for error in errors)]


table = table_of(COLUMNS, _measured)


def place(row: Row) -> tuple[Any, ...]:
    """Where a row stands in the results: by class, release and arm."""
    known = NAMES.index(row["case"]) if row["case"] in NAMES else len(NAMES)
    return known, row["case"], row["torch"], *place_of_arm(row["arm"], ARMS)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line."""
    parser = parser_of(NAME, __doc__, ARMS)
    parser.add_argument("--only", type=split, default=list(NAMES), help="classes, comma-separated")
    parser.set_defaults(compile_seconds=200.0, living=1000)
    options = parser.parse_args(argv)
    refuse_unknown(parser, "class", options.only, NAMES)
    beside = max(0, options.compiling - 1)
    groups = [
        [Job(name, arm, measure, (name, arm, options.tiny, beside))] for name in options.only for arm in options.arms
    ]
    run(NAME, groups, options, PRELOAD, place, table)


if __name__ == "__main__":
    main()
