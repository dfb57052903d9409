# SPDX-License-Identifier: Apache-2.0
"""Code for sizes that come back: what it gains over stock `torch.compile`, and what finding it costs.

    python benchmarks/hot_sizes.py --only wan21 --out DIR     # one model a command; also kl, llama, groupnorm_480p
    python benchmarks/hot_sizes.py --only dispatch --out DIR  # on a CPU
    python benchmarks/hot_sizes.py --merge DIR/rows.jsonl ...

Each (model, arm) is a process with caches of its own. They compile at the same time, and then the arms of a model
measure in turn, once each a round, while nothing compiles. A model is called until a call compiles nothing, so
`magi_hot` has code for each size that is measured. A time is that of a call among enough queued ones to fill a tenth of
a second, at most 20. An arm whose outputs lie too far from eager code in float32 fails.

`dispatch` is a call of the function that finds the code for its sizes, against a call of what AOTAutograd made for
them: 3 symbols, 8 sizes with code, counting and dropping on; 16 and 300 inputs. The code itself returns at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _hot_case import ARMS, MODELS, measure
from _hot_dispatch import CASES, measure_dispatch
from _rows import table_of
from _runs import lock_file, parser_of, place_of_arm, refuse_unknown, run, split
from _workers import Job, Row


NAME = "hot_sizes"
DISPATCH = "dispatch"
COLUMNS = ("case", "arm", "torch", "median", "compile s", "sizes with code", "difference", "of eager")
PRELOAD = ("torch._inductor.compile_fx", "triton.compiler", "magi_backend._compose", "_hot_case")


def _measured(row: Row, seconds: float) -> list[str]:
    cells = [f"{1e6 * seconds:.2f} µs" if seconds < 1e-4 else f"{1e3 * seconds:.3f} ms"]
    cells += [f"{row['compile_seconds']:.1f}", str(row["codes"])] if "codes" in row else ["", ""]
    differences = [row.get(which) for which in ("difference", "eager_difference")]
    return [*cells, *(f"{of['relative']:.1e}" if of else "" for of in differences)]


table = table_of(COLUMNS, _measured)


def place(row: Row) -> tuple[Any, ...]:
    """Where a row stands in the results: by model, release, size and arm."""
    models, case = [*MODELS, *CASES], row["case"]
    model = next((place for place, name in enumerate(models) if case.startswith(name)), len(models))
    tokens = case.rpartition("_")[2]
    return model, row["torch"], tokens.rjust(8), *place_of_arm(row["arm"], ARMS)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line."""
    parser = parser_of(NAME, __doc__, ARMS)
    parser.add_argument("--only", type=split, default=[*MODELS, DISPATCH], help=f"of {', '.join(MODELS)}, {DISPATCH}")
    parser.set_defaults(compile_seconds=480.0, step_seconds=120.0)
    options = parser.parse_args(argv)
    refuse_unknown(parser, "model", options.only, [*MODELS, DISPATCH])
    groups = [
        [Job(DISPATCH, DISPATCH, measure_dispatch, (options.tiny,))]
        if name == DISPATCH
        else [Job(name, arm, measure, (name, arm, options.tiny, lock_file())) for arm in options.arms]
        for name in options.only
    ]
    run(NAME, groups, options, PRELOAD, place, table)


if __name__ == "__main__":
    main()
