# SPDX-License-Identifier: Apache-2.0
"""NVFP4 weights beside bfloat16 on a GPU: a linear at five numbers of rows, a Llama and a mixture of experts decoding.

Few rows mean that the weights are read and little else happens. One NVFP4 weight fits the cache of a large GPU, so each
call takes the next of enough weights. Both arms are compiled; a CUDA graph of one call for each weight is replayed. For
one row the same calls are timed without the graph too. The floor is what reading the bytes takes at the speed at which
this device copies memory, or for many rows what the arithmetic takes at the speed of a large product in bfloat16.

    python benchmarks/nvfp4_linear.py                    # needs a GPU, about two minutes
    python benchmarks/nvfp4_linear.py --cases m1 moe     # some of it; writes nothing
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _ceilings import Ceilings, measure_ceilings
from _nvfp4_models import HEAD, POSITIONS, WIDTH, Llama, fused_moe, grouped_moe
from _results import Row, rows_of, write
from torch import Tensor, nn
from torch.nn import functional


sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import nvfp4


SIZE = 8192
ROWS = (1, 4, 16, 64, 1024)
BYTES_AN_ARM = 512 * 2**20
LAYERS = 8
EXPERTS, CHOSEN, HIDDEN, INTERMEDIATE, TOKENS = 64, 8, 4096, 1408, 12
REPEATS, SECONDS = 15, 0.02
QUICK_LAUNCHES = {"static_launch_user_defined_triton_kernels": True}
"""Inductor launches its own Triton kernels by C++ code, and those that a user wrote only if it is told to."""
TOLERANCE = 5e-2
"""Relative error between the arms, which have the same weights: bfloat16 rounds at other places, layer after layer."""


@dataclass(frozen=True)
class Arm:
    """One call for each of the arm's weights, and what one call reads and computes."""

    calls: Callable[[], list[Tensor]]
    count: int
    bytes_a_call: float
    flops_a_call: float = 0.0

    def floor(self, ceilings: Ceilings) -> float:
        """Seconds that a call cannot be faster than."""
        return ceilings.floor_seconds(self.flops_a_call, self.bytes_a_call)


def compiled(fn: Callable[..., Tensor], options: Mapping[str, bool] | None = None) -> Callable[..., Tensor]:
    """The same under torch.compile, one graph."""
    result: Callable[..., Tensor] = torch.compile(fn, fullgraph=True, options=dict(options or {}))
    return result


def count_of(bytes_a_weight: int) -> int:
    """How many weights it takes that none is in the cache when its turn comes."""
    return -(-BYTES_AN_ARM // bytes_a_weight)


def linear_arms(rows: int, layers: list[nvfp4.NVFP4Linear], floats: list[Tensor]) -> dict[str, Arm]:
    """F.linear on bfloat16 weights, and the module with NVFP4 ones."""
    torch.compiler.reset()
    x = torch.randn(rows, SIZE, device="cuda", dtype=torch.bfloat16)
    # Only one row is timed without a CUDA graph, and only then a launch takes time.
    options = QUICK_LAUNCHES if rows == 1 else None
    ours, theirs = compiled(lambda x, layer: layer(x), options), compiled(functional.linear, options)
    check(f"m{rows}", ours(x, layers[0]), functional.linear(x.float(), layers[0].runner.weight.decoded()))
    flops = 2.0 * rows * SIZE * SIZE
    return {
        "bf16": Arm(lambda: [theirs(x, weight) for weight in floats], len(floats), floats[0].nbytes, flops),
        "nvfp4": Arm(lambda: [ours(x, layer) for layer in layers], len(layers), layers[0].runner.weight.nbytes, flops),
    }


def linear_weights() -> tuple[list[nvfp4.NVFP4Linear], list[Tensor]]:
    """Enough NVFP4 layers, and enough bfloat16 weights."""
    first = nvfp4.NVFP4Linear.from_float(nn.Linear(SIZE, SIZE, bias=False, device="cuda"))
    weight = first.runner.weight.tensor
    copies = (nvfp4.NVFP4Tensor(*(part.clone() for part in weight)) for _ in range(count_of(weight.nbytes) - 1))
    floats = [
        torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) / 90 for _ in range(count_of(SIZE * SIZE * 2))
    ]
    return [first, *map(nvfp4.NVFP4Linear, copies)], floats


def llama_arms() -> dict[str, Arm]:
    """A step of decoding with bfloat16 linears, and with NVFP4 ones; both arms have the values of the latter."""
    torch.compiler.reset()
    position = torch.tensor([POSITIONS - 1], device="cuda")
    angle = (POSITIONS - 1) * 500000.0 ** (-torch.arange(0, HEAD, 2, device="cuda") / HEAD)
    turn = tuple(part.repeat(2).bfloat16() for part in (angle.cos(), angle.sin()))
    x = torch.randn(1, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.device("cuda"):
        model, quantised = (Llama(LAYERS).bfloat16() for _ in range(2))
    quantised.load_state_dict(model.state_dict())
    nvfp4.quantise_(quantised)
    for name, module in quantised.named_modules():
        if isinstance(module, nvfp4.NVFP4Linear):
            model.get_parameter(f"{name}.weight").copy_(module.runner.weight.decoded())
    arms = {}
    for name, each in (("bf16", model), ("nvfp4", quantised)):
        step = compiled(each)
        held = sum(tensor.nbytes for tensor in (*each.parameters(), *each.buffers()))
        arms[name] = Arm(lambda step=step: [step(x, turn, position)], 1, held)  # type: ignore[misc]
    check("llama", arms["nvfp4"].calls()[0], arms["bf16"].calls()[0])
    return arms


def moe_arms() -> dict[str, Arm]:
    """One token after the other, each by its own experts; the faster of two ways in bfloat16."""
    torch.compiler.reset()
    with torch.device("cuda"):
        moe = nvfp4.ReferenceMoE(HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN)
    runner = nvfp4.NVFP4MoE.from_float(moe).runner
    weights = [torch.cat([of_expert(w, e)[None] for e in range(EXPERTS)]) for w in (runner.gate_up, runner.down)]
    del moe
    tokens = [torch.randn(1, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(TOKENS)]
    routes = [
        (torch.full((1, CHOSEN), 1 / CHOSEN, device="cuda"), torch.randperm(EXPERTS, device="cuda")[None, :CHOSEN])
        for _ in tokens
    ]
    share = CHOSEN / EXPERTS
    ours = compiled(nvfp4.moe_gemm)
    mine = [(x, *route, runner) for x, route in zip(tokens, routes, strict=True)]
    theirs = [(x, *route, *weights) for x, route in zip(tokens, routes, strict=True)]
    read = share * sum(weight.nbytes for weight in weights)
    ways = {}
    for way in (fused_moe, grouped_moe)[: 1 + hasattr(functional, "grouped_mm")]:
        step = compiled(way)
        ways[way.__name__] = Arm(lambda step=step: [step(*each) for each in theirs], TOKENS, read)  # type: ignore[misc]
    taken = {name: seconds(captured(arm), arm) for name, arm in ways.items()}
    print("bf16 experts:", ", ".join(f"{name} {each * 1e6:.1f} us" for name, each in taken.items()))
    best = ways[min(taken, key=taken.__getitem__)]
    held = share * (runner.gate_up.nbytes + runner.down.nbytes)
    arms = {"bf16": best, "nvfp4": Arm(lambda: [ours(*each) for each in mine], TOKENS, held)}
    check("moe", arms["nvfp4"].calls()[0], best.calls()[0])
    return arms


def of_expert(weight: Any, expert: int) -> Tensor:
    """The values of one expert in bfloat16."""
    parts = (part[expert] for part in weight.tensor)
    return nvfp4.dequantize_nvfp4(nvfp4.NVFP4Tensor(*parts), torch.bfloat16)


def check(case: str, actual: Tensor, expected: Tensor) -> None:
    """Both arms compute the same, or there is nothing to compare."""
    error = float((actual.float() - expected.float()).norm() / expected.float().norm())
    print(f"{case}: relative error {error:.1e}")
    if not error < TOLERANCE:
        raise AssertionError(f"{case}: NVFP4 is off by {error:.1e} of what its weights give in bfloat16.")


def captured(arm: Arm) -> Callable[[], None]:
    """The arm's calls as one CUDA graph."""
    arm.calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arm.calls()
    return graph.replay


def seconds(run: Callable[[], object], arm: Arm) -> float:
    """Seconds a call, by events around enough rounds through the weights."""
    run()
    rounds = max(2, min(20, round(SECONDS / max(_elapsed(run, 1), 1e-6))))
    return _elapsed(run, rounds) / arm.count


def _elapsed(run: Callable[[], object], rounds: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(rounds):
        run()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3 / rounds


def in_turn(case: str, arms: Mapping[str, Arm], runs: Mapping[str, Callable[[], object]]) -> list[Row]:
    """The arms one after the other, again and again."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(REPEATS):
        for name, arm in arms.items():
            found[name].append(seconds(runs[name], arm))
    return rows_of(case, found)


def measure(wanted: set[str]) -> list[Row]:
    """All cases that are wanted, with their floors."""
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()
    rows: list[Row] = []

    def add(case: str, arms: Mapping[str, Arm], *, without_graph: bool = False) -> None:
        nonlocal rows
        rows += in_turn(case, arms, {name: captured(arm) for name, arm in arms.items()})
        if without_graph:
            rows += in_turn(f"{case} no graph", arms, {name: arm.calls for name, arm in arms.items()})
        rows += rows_of(case, {f"{name} floor": [arm.floor(ceilings)] for name, arm in arms.items()})

    if linears := [m for m in ROWS if f"m{m}" in wanted]:
        weights = linear_weights()
        for m in linears:
            add(f"m{m}_8192", linear_arms(m, *weights), without_graph=m == 1)
        del weights
    for case, arms in (("llama", llama_arms), ("moe", moe_arms)):
        if case in wanted:
            torch.cuda.empty_cache()
            add(f"{case}_decode", arms())
    return rows


def main() -> int:
    """Measure and write; 1 without a GPU."""
    every = [*(f"m{m}" for m in ROWS), "llama", "moe"]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="*", choices=every, help="measure these alone, and write nothing")
    wanted = parser.parse_args().cases
    if not torch.cuda.is_available():
        print("nvfp4_linear needs a GPU")
        return 1
    torch.manual_seed(0)
    with torch.no_grad():
        rows = measure(set(wanted or every))
    for row in rows:
        print(f"{row.case:<20} {row.arm:<12} {statistics.median(row.seconds) * 1e6:8.2f} us")
    if not wanted:
        note = "Rows of x times 8192 x 8192, and two models that decode; a floor is the bytes at the speed of a copy."
        for key, value in write("nvfp4_linear", rows, note=note).items():
            print(f"{key:<40} {value:6.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
