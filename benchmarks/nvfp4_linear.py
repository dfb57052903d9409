# SPDX-License-Identifier: Apache-2.0
"""A linear layer with NVFP4 weights beside one in bfloat16, one row, 8192 by 8192, on a GPU.

One row means that the weights are read and little else happens. One NVFP4 weight fits the cache of a large GPU, so each
call takes the next of enough weights. Both arms are compiled; a CUDA graph of one call for each weight is replayed,
and the same calls are timed without the graph too. The floor is what reading the bytes takes at the speed at which
this device copies memory.

    python benchmarks/nvfp4_linear.py           # needs a GPU, about two minutes
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from _ceilings import measure_ceilings
from _results import Row, rows_of, write
from torch import Tensor
from torch.nn import functional


sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import nvfp4


SIZE = 8192
BYTES_AN_ARM = 512 * 2**20
REPEATS, REPLAYS = 21, 20
CASE = "m1_8192"


@dataclass(frozen=True)
class Arm:
    """One call for each of the arm's weights, and the bytes that one call reads."""

    calls: Callable[[], list[Tensor]]
    weights: int
    bytes_a_call: int


def count_of(bytes_a_weight: int) -> int:
    """How many weights it takes that none is in the cache when its turn comes."""
    return -(-BYTES_AN_ARM // bytes_a_weight)


def bf16_arm(x: Tensor) -> Arm:
    """F.linear on bfloat16 weights."""
    linear = torch.compile(functional.linear, fullgraph=True)
    bytes_a_weight = SIZE * SIZE * 2
    weights = [torch.randn(SIZE, SIZE, device="cuda", dtype=x.dtype) / 90 for _ in range(count_of(bytes_a_weight))]
    return Arm(lambda: [linear(x, weight) for weight in weights], len(weights), bytes_a_weight)


def nvfp4_arm(x: Tensor) -> Arm:
    """The op, with the object of each weight in turn."""
    linear = torch.compile(lambda x, layer: layer(x), fullgraph=True)
    first = nvfp4.NVFP4Linear.from_float(torch.nn.Linear(SIZE, SIZE, bias=False, device="cuda"))
    weight = first.runner.weight
    tile = first.runner.tune(x)
    print(f"fastest launch settings: {tile}")
    layers = [first]
    for _ in range(count_of(weight.nbytes) - 1):
        layers.append(nvfp4.NVFP4Linear(nvfp4.NVFP4Tensor(*(part.clone() for part in weight))))
        layers[-1].runner.gemv_tile = tile
    expected = x.double() @ nvfp4.dequantize_nvfp4(weight).double().T
    torch.testing.assert_close(linear(x, first).double(), expected, atol=3e-2, rtol=2e-2)
    return Arm(lambda: [linear(x, layer) for layer in layers], len(layers), weight.nbytes)


def captured(arm: Arm) -> Callable[[], None]:
    """The arm's calls as one CUDA graph."""
    arm.calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arm.calls()
    return graph.replay


def seconds(run: Callable[[], object], arm: Arm) -> float:
    """Seconds a call, by events around several rounds through the weights."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    start.record()
    for _ in range(REPLAYS):
        run()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3 / REPLAYS / arm.weights


def measure() -> list[Row]:
    """Both arms in turn, with and without the graph, and the floors."""
    x = torch.randn(1, SIZE, device="cuda", dtype=torch.bfloat16)
    speed = measure_ceilings().bytes_per_second
    arms = {"bf16": bf16_arm(x), "nvfp4": nvfp4_arm(x)}
    rows: list[Row] = []
    for case, runs in (
        (CASE, {name: captured(arm) for name, arm in arms.items()}),
        (f"{CASE} no graph", {name: arm.calls for name, arm in arms.items()}),
    ):
        found: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(REPEATS):
            for name, arm in arms.items():
                found[name].append(seconds(runs[name], arm))
        rows += rows_of(case, found)
    rows += rows_of(CASE, {f"{name} floor": [arm.bytes_a_call / speed] for name, arm in arms.items()})
    return rows


def main() -> int:
    """Measure and write; 1 without a GPU."""
    if not torch.cuda.is_available():
        print("nvfp4_linear needs a GPU")
        return 1
    torch.manual_seed(0)
    with torch.no_grad():
        rows = measure()
    ratios = write(
        "nvfp4_linear", rows, note="One row times 8192 x 8192; a floor is the bytes of one call at the speed of a copy."
    )
    for row in rows:
        print(f"{row.case:<20} {row.arm:<12} {statistics.median(row.seconds) * 1e6:8.2f} us")
    for key, value in ratios.items():
        print(f"{key:<40} {value:6.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
