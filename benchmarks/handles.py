# SPDX-License-Identifier: Apache-2.0
"""What one eager call of an op with an object handle costs, beside an op with an int in the handle's place.

Same body in both, which does not touch the object: float32[8] on the CPU, under no_grad.
"""

from __future__ import annotations

from typing import Any

import torch
from _results import Row, measure_paired, rows_of, write
from magi_opschema import ObjectHandle, magi_register_custom_op, op_def, register_object, release_object
from torch import Tensor


class Runner:
    """An object that no schema can hold."""


@magi_register_custom_op("bench_handles::by_object", infer_output_meta_fn=["x"])
def by_object(x: Tensor, runner: ObjectHandle[Runner]) -> Tensor:
    """Take a handle."""
    del runner
    return x.clone()


@magi_register_custom_op("bench_handles::by_int", infer_output_meta_fn=["x"])
def by_int(x: Tensor, runner: int) -> Tensor:
    """Take an int, as a registry written by hand would."""
    del runner
    return x.clone()


def _churn() -> None:
    release_object(register_object(Runner()))


def measure() -> list[Row]:
    """All cases."""
    assert op_def(by_int).path == "direct"
    x, runner = torch.randn(8), Runner()
    handle: Any = register_object(runner)
    plain = int(handle)
    arms = {
        "handle": lambda: by_object(x, handle),
        "object": lambda: by_object(x, runner),
        "int": lambda: by_int(x, plain),
    }
    with torch.no_grad():
        rows = rows_of("call", measure_paired(arms, number=10000, repeats=21))
    return rows + rows_of("register_release", measure_paired({"magi": _churn}, number=20000))


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    write("handles", measure(), note="One eager call of an op; `register_release` is one cycle of the registry.")


if __name__ == "__main__":
    main()
