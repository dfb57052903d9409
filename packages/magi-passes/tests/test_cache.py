# SPDX-License-Identifier: Apache-2.0
"""Inductor's caches find what a pipeline compiled, and nothing that another pipeline compiled."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from magi_passes import MagiInductorPass, PassPipeline, collect_records
from torch._dynamo.utils import counters
from torch._inductor import config


if TYPE_CHECKING:
    from torch.fx import Graph


@dataclass(frozen=True)
class Tiles(MagiInductorPass):
    inductor_config_keys_potentially_mutated_by_this_pass = ("triton.max_tiles",)
    tiles: int = 2

    def __call__(self, graph: Graph) -> None:
        config.triton.max_tiles = self.tiles


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def unrelated(x: torch.Tensor) -> torch.Tensor:
    return x @ x @ x


def _compile(fn: Any, options: dict[str, Any] | None, *, training: bool = False) -> tuple[int, int, int]:
    """Hits and misses of the AOTAutograd cache, and how many passes ran."""
    torch._dynamo.reset()
    counters.clear()
    with collect_records() as records:
        compiled: Any = torch.compile(fn, options=options)
        out = compiled(torch.ones(4, 4, requires_grad=training))
        if training:
            torch.autograd.backward(out.sum())
    found = counters["aot_autograd"]
    return found["autograd_cache_hit"], found["autograd_cache_miss"], sum(record.ran for record in records)


@pytest.mark.parametrize("training", [False, True])
def test_a_warm_cache_hits_in_the_same_process(inductor: Any, training: bool) -> None:
    options = PassPipeline([Tiles()]).inductor_options()
    assert _compile(product, options, training=training) == (0, 1, 2 if training else 1)
    assert _compile(product, options, training=training) == (1, 0, 0)
    # A new, equal pipeline is the same pipeline.
    assert _compile(product, PassPipeline([Tiles()]).inductor_options(), training=training) == (1, 0, 0)


def test_a_graph_without_passes_hits_whatever_ran_in_between(inductor: Any) -> None:
    _compile(unrelated, None)
    _compile(product, PassPipeline([Tiles()]).inductor_options())
    assert _compile(unrelated, None) == (1, 0, 0)


def test_another_field_value_misses(inductor: Any) -> None:
    _compile(product, PassPipeline([Tiles(2)]).inductor_options())
    assert _compile(product, PassPipeline([Tiles(3)]).inductor_options()) == (0, 1, 1)


def test_a_setting_of_the_user_that_equals_the_default_misses(inductor: Any) -> None:
    """It keeps the pass from changing the key, so the code differs although no value does."""
    options = PassPipeline([Tiles()]).inductor_options()
    _compile(product, options)
    assert _compile(product, {**options, "triton.max_tiles": None}) == (0, 1, 1)


def test_switching_a_pass_off_in_the_environment_misses(inductor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = PassPipeline([Tiles()]).inductor_options()
    _compile(product, options)
    monkeypatch.setenv("MAGI_PASSES_DISABLE", "Tiles")
    assert _compile(product, options) == (0, 1, 0)


SCRIPT = """
import json, sys
sys.path.insert(0, {tests!r})
import torch
from test_cache import PassPipeline, Tiles, _compile, product
print(json.dumps([_compile(product, PassPipeline([Tiles()]).inductor_options(), training=True) for _ in range(2)]))
"""


def test_a_warm_cache_hits_in_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    script = SCRIPT.format(tests=str(Path(__file__).parent))

    def run() -> Any:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    assert run() == [[0, 1, 2], [1, 0, 0]]
    assert run() == [[1, 0, 0], [1, 0, 0]]
