# SPDX-License-Identifier: Apache-2.0
"""The records are true whichever way Inductor is reached, also through names that were bound before any pass existed.

The program runs in a process of its own, since what counts is that the names are bound first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest


if TYPE_CHECKING:
    from pathlib import Path


PROGRAM = """
import functools
import json
import sys

import torch
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

partial = functools.partial(compile_fx)

from magi_passes import MagiInductorPass, PassPipeline, collect_records
from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles(MagiInductorPass):
    inductor_config_keys_potentially_mutated_by_this_pass = ("triton.max_tiles",)

    def __call__(self, graph):
        config.triton.max_tiles = 3


options = PassPipeline([Tiles()]).inductor_options()


def inner(gm, inputs, **kwargs):
    return compile_fx_inner(gm, inputs, **kwargs)


ROUTES = {
    "torch.compile": lambda gm, inputs: torch._inductor.compile_fx.compile_fx(gm, inputs, config_patches=options),
    "compile_fx": lambda gm, inputs: compile_fx(gm, inputs, config_patches=options),
    "partial": lambda gm, inputs: partial(gm, inputs, config_patches=options),
    "positional": lambda gm, inputs: compile_fx(gm, inputs, inner, options),
    "inner_compile": lambda gm, inputs: compile_fx(gm, inputs, inner_compile=inner, config_patches=options),
    "torch._inductor.compile": lambda gm, inputs: torch._inductor.compile(gm, inputs, options=options),
    "patched": lambda gm, inputs: config.patch(options)(compile_fx)(gm, inputs),
}
route, training = sys.argv[1:]
for _ in range(2):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x @ x, backend=ROUTES[route])
    with collect_records() as records:
        out = compiled(torch.ones(4, 4, requires_grad=training == "training"))
    if training == "training":
        torch.autograd.backward(out.sum())
    print(json.dumps([[record.graph.split("_")[-1], record.ran, record.reason] for record in records]))
    assert config.triton.max_tiles is None
"""
FROM_CACHE = "not asked: a cache had the compiled graph"


@pytest.mark.parametrize(
    ("route", "training"),
    [
        ("torch.compile", "inference"),
        ("compile_fx", "inference"),
        ("compile_fx", "training"),
        ("positional", "training"),
        *(
            pytest.param(route, training, marks=pytest.mark.slow)
            for route in ("partial", "inner_compile", "torch._inductor.compile")
            for training in ("inference", "training")
        ),
    ],
)
def test_a_cold_compilation_is_recorded_as_such_and_a_warm_one_too(tmp_path: Path, route: str, training: str) -> None:
    cold, warm = _records(tmp_path, route, training)
    kinds = ["forward", "backward"] if training == "training" else ["inference"]
    assert cold == [[kind, True, "applicable"] for kind in kinds]
    assert [record[1:] for record in warm] == [[False, FROM_CACHE]]


@pytest.mark.slow
def test_a_call_that_nobody_sees_leaves_no_false_record(tmp_path: Path) -> None:
    """Neither the options nor the name that is called lead through what wraps `compile_fx`."""
    assert _records(tmp_path, "patched", "inference") == [[["inference", True, "applicable"]], []]


def _records(cache_dir: Path, route: str, training: str) -> list[list[list[object]]]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache_dir)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, route, training],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
