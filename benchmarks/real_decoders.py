# SPDX-License-Identifier: Apache-2.0
"""Whole decodes of real models, ``vae.decoder.forward = torch.compile(vae.decoder.forward, dynamic=True)``.

    python benchmarks/real_decoders.py --model wan21 --out DIR
    python benchmarks/real_decoders.py --model wan21,kl --cold --out DIR
    python benchmarks/real_decoders.py --model wan21 --nobreak --arms stock_dynamic,stock_static,magi_dynamic --out DIR
    python benchmarks/real_decoders.py --merge DIR/rows.jsonl ...

The arms of a model are processes with caches of their own. They compile at the same time, by decoding twice, and then
they measure in turn, once each a round, while nothing compiles. Dynamo may compile each function 64 times, so that
all arms run compiled code; with ``--default-limit`` eight times, as it does by itself. ``--cold`` compiles stock and
the backend with symbolic sizes, each alone on the machine, and measures nothing else. ``--nobreak`` changes the model
under every arm, see `_real_models.without_the_break`. Outputs are compared with those of eager code in float32, those
of arms with symbolic sizes also at a second size. ``--rows FILE`` goes on from a run that was cut off. ``--tiny`` is
for a CPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from _decode_table import table
from _real_case import Conditions, measure
from _real_models import MODELS
from _runs import parser_of, place_of_arm, plan_of, run, split
from _workers import Job, Row


NAME = "real_decoders"
ARMS = (
    *("eager", "eager_channels_last", "stock_dynamic", "stock_static", "stock_static_max_autotune"),
    *("magi_dynamic", "magi_static", "magi_tuned"),
)
# Each takes long alone what all others take together, so they run where they are named.
NOT_BY_DEFAULT = ("stock_static_max_autotune", "magi_tuned")
COLD = ("stock_dynamic", "magi_dynamic")
PRELOAD = ("_loaded", "_real_case")


def place(row: Row) -> tuple[Any, ...]:
    """Where a row stands in the results: by model, what is measured, release and arm."""
    model, *rest = row["case"].split("_")
    return list(MODELS).index(model), rest, row["torch"], *place_of_arm(row["arm"], ARMS)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line."""
    parser = parser_of(NAME, __doc__, [arm for arm in ARMS if arm not in NOT_BY_DEFAULT])
    parser.add_argument("--model", type=split, default=list(MODELS), help=f"comma-separated: {', '.join(MODELS)}")
    parser.add_argument("--cold", action="store_true", help="only compile, each arm alone on the machine")
    parser.add_argument("--nobreak", action="store_true", help="change the two lines at which torch <= 2.12 breaks")
    parser.add_argument("--default-limit", action="store_true", help="leave Dynamo's recompile_limit as it is")
    parser.set_defaults(compile_seconds=450.0, step_seconds=200.0, living=8)
    options = parser.parse_args(argv)
    if options.nobreak and not all(model.startswith("wan") for model in options.model):
        parser.error("--nobreak changes WAN; name models of it, --model wan21,wan22")
    if options.cold:
        options.compiling = options.living = 1
        options.arms = [arm for arm in options.arms if arm in COLD]
    plan = plan_of(
        options,
        beside=0 if options.cold else len(options.arms) - 1,
        cold_calls=2,
        compilation_alone=options.cold,
        alone=3,
        kernels="by name" if options.kernels else "by kind",
        second_size=True,
    )
    conditions = Conditions(options.nobreak, options.default_limit, options.tiny)
    with tempfile.TemporaryDirectory() as references:
        groups = [
            [
                Job(
                    model + conditions.suffix + "_compile" * options.cold,
                    arm,
                    measure,
                    (model, arm, plan, references, conditions),
                )
                for arm in options.arms
            ]
            for model in options.model
        ]
        if options.cold:
            groups = [[job] for group in groups for job in group]
        run(NAME, groups, options, PRELOAD, place, table)


if __name__ == "__main__":
    main()
