# SPDX-License-Identifier: Apache-2.0
"""Fragments of real decoders, each alone as a graph: stock `torch.compile` and the backend, dynamic and static.

    python benchmarks/decoder_fragments.py --out DIR
    python benchmarks/decoder_fragments.py --only wan_half_96,kl_upsample --arms magi_dynamic --kernels --code --out DIR
    python benchmarks/decoder_fragments.py --merge DIR/rows.jsonl ...

Each (fragment, arm) is a process with caches of its own. They compile at the same time, and then the arms of each
fragment measure in turn, once each a round, while nothing compiles. A time is that of a call among enough queued ones
to fill a tenth of a second, at most 20. An arm whose outputs lie too far from eager code in float32, at its size or at
a second one, fails. Rows are written as they come; ``--rows FILE`` goes on from those of a run that was cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _fragment_case import measure
from _fragments import FRAGMENTS
from _rows import table_of
from _runs import parser_of, place_of_arm, plan_of, refuse_unknown, run, split
from _workers import Job, Row


NAME = "decoder_fragments"
QUEUED_SECONDS = 0.1
ARMS = ("stock_dynamic", "stock_static", "magi_dynamic", "magi_static")
COLUMNS = (
    *("fragment", "arm", "torch", "median ms", "compile s", "graphs"),
    *("difference", "of eager", "largest", "of eager"),
)
PRELOAD = ("_loaded", "_fragment_case", "_fragment_classes")


def _measured(row: Row, seconds: float) -> list[str]:
    ours, eager = row["difference"], row["eager_difference"]
    cells = [f"{1e3 * seconds:.3f}", f"{sum(row['cold_seconds']):.1f}", str(row["graphs"])]
    return [*cells, *(f"{of[what]:.1e}" for what in ("relative", "largest") for of in (ours, eager))]


table = table_of(COLUMNS, _measured)


def place(row: Row) -> tuple[Any, ...]:
    """Where a row stands in the results."""
    return list(FRAGMENTS).index(row["case"]), row["torch"], *place_of_arm(row["arm"], ARMS)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line."""
    parser = parser_of(NAME, __doc__, ARMS)
    parser.add_argument("--only", type=split, default=list(FRAGMENTS), help="comma-separated names of fragments")
    options = parser.parse_args(argv)
    plan = plan_of(
        options,
        compilation_has_a_row=False,
        queued_seconds=0.0 if options.tiny else QUEUED_SECONDS,
        alone=3,
        with_floor=False,
        kernels="by name" if options.kernels else "",
        second_size=True,
    )
    groups = [
        [Job(name, arm, measure, (name, arm, plan, options.tiny)) for arm in options.arms] for name in options.only
    ]
    refuse_unknown(parser, "fragments", options.only, list(FRAGMENTS))
    run(NAME, groups, options, PRELOAD, place, table)


if __name__ == "__main__":
    main()
