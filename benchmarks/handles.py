# SPDX-License-Identifier: Apache-2.0
"""What an object costs an op, behind its handle and taken apart, beside an op with an int in its place.

Same body in all, which does not touch the object: float32[8] on the CPU, under no_grad. Compiled, an op that a compiler
does not see through is called whole; `inlined` is the same body without an op around it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from _results import Row, measure_paired, rows_of, write
from magi_opschema import (
    ObjectHandle,
    magi_register_custom_op,
    op_def,
    register_object,
    release_object,
    see_through_object,
)
from torch import Tensor


class Runner:
    """An object that no schema can hold."""


@magi_register_custom_op("bench_handles::by_object", infer_output_meta_fn=["x"])
def by_object(x: Tensor, runner: ObjectHandle[Runner]) -> Tensor:
    """Take a handle."""
    del runner
    return x.clone()


@see_through_object
class Weights:
    """An object that an op takes apart."""

    weight: Tensor
    block: int

    def __init__(self) -> None:
        self.weight, self.block = torch.ones(8), 16


@magi_register_custom_op("bench_handles::taken_apart", infer_output_meta_fn=["x"])
def taken_apart(x: Tensor, runner: ObjectHandle[Weights]) -> Tensor:
    """Take a Tensor and a constant out of an object."""
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
    x, runner, weights = torch.randn(8), Runner(), Weights()
    handle: Any = register_object(runner)
    plain = int(handle)
    arms = {
        "handle": lambda: by_object(x, handle),
        "object": lambda: by_object(x, runner),
        "taken_apart": lambda: taken_apart(x, weights),
        "int": lambda: by_int(x, plain),
    }
    compiled = {
        name: torch.compile(op, fullgraph=True)
        for name, op in {
            "handle": lambda x, handle: by_object(x, handle).view(8),
            "object": lambda x, runner: by_object(x, runner).view(8),
            "taken_apart": lambda x, weights: taken_apart(x, weights).view(8),
            "int": lambda x, plain: by_int(x, plain).view(8),
            "inlined": lambda x, weights: (x.clone(), weights.weight, weights.block)[0],
        }.items()
    }
    passed = {"handle": handle, "object": runner, "taken_apart": weights, "int": plain, "inlined": weights}
    with torch.no_grad():
        rows = rows_of("call", measure_paired(arms, number=10000, repeats=21))
        calls = {name: functools.partial(fn, x, passed[name]) for name, fn in compiled.items()}
        rows += rows_of("compiled", measure_paired(calls, number=3000, repeats=41))
    return rows + rows_of("register_release", measure_paired({"magi": _churn}, number=20000))


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    note = "One call of an op, eager and compiled; `register_release` is one cycle of the registry."
    write("handles", measure(), note=note)


if __name__ == "__main__":
    main()
