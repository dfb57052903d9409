# SPDX-License-Identifier: Apache-2.0
"""Decoders with dynamic height and width: eager, stock torch.compile and magi_passes.

    python benchmarks/dynamic_decode.py --model wan --size 540p --arms stock_dynamic,magi --out DIR
    python benchmarks/dynamic_decode.py --merge DIR/rows.jsonl

Each (model, size, arm) is one process with caches of its own. They compile and measure one after the other. With
``--together`` they compile at the same time, and the rows of compile times say beside how many others; then the arms of
each case measure in turn, once each a round, on one and the same core. The tuned arm measures its candidates while it
compiles; ConvChooser sees to it that no two processes do so at once. ``--merge`` joins rows into
results/dynamic_decode.json and .md. ``--tiny`` runs tiny models on the CPU.
A time is that of a call among enough queued ones to fill a quarter of a second, at most 20, as a decoder of many chunks
runs them: the device waits for no launch. The time of a call on an idle device stands beside it as ``alone_seconds``.

An arm ``passes:padding+temporal+layout+moments+nd2`` compiles with just those passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _decode_case import measure
from _decode_table import table
from _decoders import MODELS, SIZES
from _runs import parser_of, place_of_arm, plan_of, run, split
from _workers import Job, Row


NAME = "dynamic_decode"
ARMS = ("eager", "stock_static", "stock_dynamic", "stock_no_coalesce", "magi", "magi_tuned")
PRELOAD = ("_loaded", "_decode_case")


def _place(row: Row) -> tuple[Any, ...]:
    """Where a row stands in the results: by model, size, what is measured, release and arm."""
    model, size, *compiled = row["case"].split("_")
    return MODELS.index(model), list(SIZES).index(size), compiled, row["torch"], *place_of_arm(row["arm"], ARMS)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line."""
    parser = parser_of(NAME, __doc__, ARMS)
    parser.add_argument("--model", type=split, default=list(MODELS), help="comma-separated: wan, groupnorm, kl, plain")
    parser.add_argument("--size", type=split, default=["540p"], help="comma-separated: 480p, 540p, 720p, 1080p")
    parser.add_argument("--together", action="store_true", help="compile all cases at once, then measure each alone")
    options = parser.parse_args(argv)
    if not options.together:
        options.compiling = options.living = 1
    sizes = [(model, size) for model in options.model for size in options.size]
    beside = len(sizes) * len(options.arms) - 1 if options.together else 0
    plan = plan_of(options, beside=beside, kernels="by name" if options.kernels else "by kind")
    groups = [
        [Job(f"{model}_{size}", arm, measure, (model, size, arm, plan, options.tiny)) for arm in options.arms]
        for model, size in sizes
    ]
    if not options.together:
        groups = [[job] for group in groups for job in group]
    run(NAME, groups, options, PRELOAD, _place, table)


if __name__ == "__main__":
    main()
