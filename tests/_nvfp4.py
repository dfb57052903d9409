# SPDX-License-Identifier: Apache-2.0
"""What the tests of examples/nvfp4 share: references by hand, routings, a process with Triton's interpreter."""

from __future__ import annotations

import importlib
import itertools
import textwrap
from pathlib import Path
from typing import Any

import torch
from _python import python
from torch import Tensor


nvfp4: Any = importlib.import_module("nvfp4")
EXAMPLES = Path(__file__).parent.parent / "examples"
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def make_moe(experts: int = 4, hidden: int = 64, intermediate: int = 48) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    moe = nvfp4.ReferenceMoE(hidden, intermediate, experts, 2)
    quantised = nvfp4.NVFP4MoE.from_float(moe)
    runner = quantised.runner
    with torch.no_grad():
        moe.gate_up.copy_(nvfp4.dequantize_nvfp4(runner.gate_up.tensor))
        moe.down.copy_(nvfp4.dequantize_nvfp4(runner.down.tensor))
    return moe, quantised, runner


def by_hand(moe: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """A mixture of experts, token by token, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for token, place in itertools.product(range(ids.shape[0]), range(ids.shape[1])):
        gate, up = (moe.gate_up[ids[token, place]].double() @ x[token].double()).chunk(2)
        inner = gate * gate.sigmoid() * up
        out[token] += weights[token, place].double() * (moe.down[ids[token, place]].double() @ inner)
    return out


ROUTINGS = {
    "every expert": [[0, 1], [2, 3], [1, 2], [3, 0], [0, 2]],
    "an expert without tokens": [[0, 1], [3, 1], [0, 3]],
    "all on one expert": [[2, 2]] * 37,
    "an expert twice": [[1, 1], [0, 1], [3, 3]],
    "one token": [[3, 0]],
    "no token": [],
    "not a multiple of the tile": [[i % 4, (i * i + 1) % 4] for i in range(53)],
}


def routing(name: str) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.tensor(ROUTINGS[name], dtype=torch.long).reshape(-1, 2)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(ids), 64, generator=generator), torch.rand(len(ids), 2, generator=generator), ids


def every_code() -> tuple[Any, Tensor]:
    """A weight [127, 16] with every code under every finite scale that is not negative; its values, [16, 127]."""
    packed = torch.arange(8, dtype=torch.uint8) * 2
    packed = (packed | (packed + 1) << 4).expand(127, 8).contiguous()
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    weight = nvfp4.NVFP4Tensor(packed, scales, torch.tensor(0.75))
    return weight, nvfp4.dequantize_nvfp4(weight).T


def interpret(script: str) -> str:
    """Run a script under Triton's interpreter, in a process of its own."""
    head = f"""
import sys
sys.path[:0] = [{str(EXAMPLES)!r}, {str(Path(__file__).parent)!r}]
import torch
from _nvfp4 import *
torch.manual_seed(0)
"""
    return python("-c", head + textwrap.dedent(script), env={"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
