# SPDX-License-Identifier: Apache-2.0
"""Ops of four libraries of kernels, and a Llama block with those of Liger, called and registered in four ways.

    python benchmarks/libraries.py --out DIR                                   # on a machine with a CUDA GPU
    python benchmarks/libraries.py --only liger_swiglu,llama_block --kernels --out DIR
    python benchmarks/libraries.py --tiny --only liger_swiglu --out DIR        # any machine, Triton's interpreter
    python benchmarks/libraries.py --merge DIR/rows.jsonl ...

The libraries must be importable: liger-kernel; fla-core and what that imports, einops; the files of unsloth and vllm
that hold the kernels, which are imported without the trainer and the server around them. The arms of an op:

- `eager`         the library's call
- `dynamo`        the library's call under stock `torch.compile`
- `opaque`        `torch.library.custom_op` around it, with a fake by hand, under stock `torch.compile`
- `seen_through`  `magi_register_custom_op` around it, under `backend="magi"`

and by name `seen_through_inductor`, the same op under stock. What is called scales the op's first input, and adds what
comes out to it where shapes agree; the same in each arm. Kernels that the library measures configs of have one config,
the same in each arm. Each (op, arm) is a process with caches of its own. They compile at the same time, each at a small
and a large size, and compare their outputs with those of the library's eager call; then the arms of each op measure in
turn, once each a round, while nothing compiles. An arm that cannot run has a row with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from _library_case import ARMS, BLOCK, measure
from _rows import table_of
from _runs import lock_file, parser_of, place_of_arm, refuse_unknown, run, split
from _workers import Job, Row


NAME = "libraries"
PROGRAMS = (
    *("liger_rms_norm", "liger_layer_norm", "liger_group_norm", "liger_fused_add_rms_norm", "liger_poly_norm"),
    *("liger_swiglu", "liger_geglu", "liger_relu_squared", "liger_softmax", "liger_dyt", "liger_rope"),
    *("liger_kl_div", "liger_jsd", "liger_tvd", "liger_cross_entropy"),
    *("fla_l2norm", "fla_layer_norm", "fla_rms_norm_gated", "fla_swiglu", "fla_token_shift", "fla_short_convolution"),
    *("fla_rotary", "fla_local_cumsum", "fla_global_cumsum", "fla_chunk_gla", "fla_fused_recurrent_gla"),
    *("fla_chunk_simple_gla", "fla_chunk_retention", "fla_fused_recurrent_retention", "fla_chunk_delta_rule"),
    *("fla_fused_recurrent_delta_rule", "fla_chunk_gated_delta_rule", "fla_fused_recurrent_gated_delta_rule"),
    "fla_fused_recurrent_hgrn",
    *("unsloth_rms_norm", "unsloth_layer_norm", "unsloth_swiglu", "unsloth_geglu", "unsloth_rope"),
    *("vllm_rms_norm_gated", "vllm_fused_qk_norm", "vllm_merge_attention", "vllm_prefill_attention"),
    *("vllm_sum_of_experts", "vllm_awq_product"),
    BLOCK,
)
BY_DEFAULT = ("eager", "dynamo", "opaque", "seen_through")
COLUMNS = ("case", "arm", "torch", "median", "alone", "compile s", "graphs", "difference", "stays opaque")
# Libraries ask for the GPU when they are imported, which no process may do that others are forked from.
PRELOAD = ("_loaded", "_library_case")


def _measured(row: Row, seconds: float) -> list[str]:
    cells = [f"{1e6 * time:.1f} µs" for time in (seconds, min(row["alone_seconds"]))]
    cells += [f"{row['compile_seconds']:.1f}", str(row["graphs"]), f"{row['difference']['relative']:.1e}"]
    return [*cells, "yes" if row["stays_opaque"] else ""]


table = table_of(COLUMNS, _measured)


def place(row: Row) -> tuple[Any, ...]:
    """Where a row stands in the results: by op, release, size and arm."""
    program = max((name for name in PROGRAMS if row["case"].startswith(name)), key=len)
    size = row["case"].removeprefix(program)
    return PROGRAMS.index(program), row["torch"], size != "_small", *place_of_arm(row["arm"], tuple(ARMS))


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line."""
    parser = parser_of(NAME, __doc__, BY_DEFAULT)
    parser.add_argument("--only", type=split, default=list(PROGRAMS), help=f"of {', '.join(PROGRAMS)}")
    parser.set_defaults(compile_seconds=150.0, step_seconds=30.0, living=64)
    options = parser.parse_args(argv)
    for what, given, known in (("op", options.only, PROGRAMS), ("arm", options.arms, tuple(ARMS))):
        refuse_unknown(parser, what, given, known)
    if options.tiny:
        # Before the server of the processes imports Triton, whose own functions are interpreted too.
        os.environ["TRITON_INTERPRET"] = "1"
        # vLLM takes Triton where no GPU is found only if it is told so.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    groups = [
        [Job(name, arm, measure, (name, arm, lock_file(), options.tiny, options.kernels)) for arm in options.arms]
        for name in options.only
    ]
    run(NAME, groups, options, PRELOAD, place, table)


if __name__ == "__main__":
    main()
