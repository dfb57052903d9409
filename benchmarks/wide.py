# SPDX-License-Identifier: Apache-2.0
"""Classes that people run, listed in wide.yaml: eager, stock and the backend, by wall time and by the time of kernels.

    python benchmarks/wide.py --out DIR                  # on a GPU
    python benchmarks/wide.py --only segformer,wav2vec2 --arms stock_static,magi_dynamic --kernels --out DIR
    python benchmarks/wide.py --merge DIR/rows.jsonl

Each (class, arm) is a process with caches of its own. As many as ``--compiling`` says compile at the same time; then
the arms of a class measure in turn, once each a round, while nothing compiles. Launches hide the kernels of small
models, so the time of the kernels alone is recorded too. Outputs are compared with those of eager code in float32,
those of arms with symbolic sizes also at a second size. ``--tiny`` is for a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _decode_table import table
from _runs import parser_of, place_of_arm, plan_of, refuse_unknown, run, split
from _wide_case import CALLS_UNTIL_HOT, WIDE, measure
from _workers import Job, Row


NAME = "wide"
ARMS = ("eager", "stock_dynamic", "stock_static", "magi_dynamic", "magi_hot")
PRELOAD = ("_loaded", "_wide_case", "transformers", "diffusers")


def place(row: Row) -> tuple[Any, ...]:
    """Where a row stands in the results: by class, what is measured, release and arm."""
    name, *rest = row["case"].partition("_compile")
    return list(WIDE).index(name), rest, row["torch"], *place_of_arm(row["arm"], ARMS)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line."""
    parser = parser_of(NAME, __doc__, ARMS)
    parser.add_argument("--only", type=split, default=list(WIDE), help="classes, comma-separated")
    parser.set_defaults(compile_seconds=400.0, living=60, repeats=7)
    options = parser.parse_args(argv)
    refuse_unknown(parser, "class", options.only, list(WIDE))
    plan = plan_of(
        options,
        beside=max(0, options.compiling - 1),
        cold_calls=CALLS_UNTIL_HOT,
        queued_seconds=0.1,
        alone=3,
        with_floor=False,
        kernels="by name" if options.kernels else "by kind",
        second_size=True,
    )
    groups = [
        [Job(name, arm, measure, (name, arm, plan, options.tiny)) for arm in options.arms] for name in options.only
    ]
    run(NAME, groups, options, PRELOAD, place, table)


if __name__ == "__main__":
    main()
