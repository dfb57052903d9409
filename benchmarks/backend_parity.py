# SPDX-License-Identifier: Apache-2.0
"""The backend magi beside stock Inductor where no pass applies: same model, same registered operators, on a CPU.

Runs are timed in pairs, and so are compilations, in one process. Both arms find the kernels of the first compilation
in the cache of kernels, which holds the same ones for both, so a compilation here is all Python: what the backend adds
to it weighs more than in a first compilation. Training is measured beside stock Inductor with the guard against torch's
lost writes set by hand; it has no ratio of its own.

Each model can be measured by itself, the rows of the others staying what they were:
`backend_parity.py --model vae`, then `backend_parity.py --model llama --merge`, …
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from _ratios import ratios
from _results import Row, measure_paired, rows_of, rows_written, say, write
from torch import Tensor, nn


sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import _models  # the models of the end-to-end tests


Options = dict[str, str | int | bool | Callable[..., Any]]

PAIRS = 15
NOTE = "A ratio is the median over the pairs; `_low` and `_high` are the ends of its 95% interval."
NO_CACHES: Options = {"fx_graph_cache": False}
BY_HAND: Options = {**NO_CACHES, "reorder_for_peak_memory": False}
INPUTS: dict[str, Callable[[], Tensor]] = {
    "vae": lambda: torch.randn(1, 4, 16, 16),
    "llama": lambda: torch.randint(0, 97, (4, 64)),
    "vit": lambda: torch.randn(8, 3, 32, 32),
}
MODELS: dict[str, Callable[[], nn.Module]] = {"vae": _models.vae, "llama": _models.llama, "vit": _models.vit}


def inference(model: nn.Module, x: Tensor) -> tuple[dict[str, Callable[[], object]], Callable[[str], float]]:
    """The compiled forward of both arms, and a function that compiles one of them anew and says how long it took."""

    def arm(backend: str) -> Callable[[], object]:
        compiled = torch.compile(model, backend=backend, dynamic=True, options=NO_CACHES)

        def run() -> object:
            with torch.no_grad():
                return compiled(x)

        return run

    def compile_time(backend: str) -> float:
        torch.compiler.reset()
        run = arm(backend)
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return {name: arm(name) for name in ("inductor", "magi")}, compile_time


def training(model: nn.Module, x: Tensor) -> dict[str, Callable[[], object]]:
    """A compiled step, forward and backward: magi, and stock with the guard set by hand."""

    def arm(backend: str, options: Options) -> Callable[[], object]:
        compiled = torch.compile(model, backend=backend, dynamic=True, options=dict(options))
        return lambda: compiled(x).square().mean().backward()

    return {"inductor_guarded": arm("inductor", BY_HAND), "magi": arm("magi", NO_CACHES)}


def measure(name: str, pairs: int, *, with_training: bool) -> list[Row]:
    """All rows of one model."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = MODELS[name]().eval(), INPUTS[name]()
    arms, compile_time = inference(model, x)
    for run in arms.values():
        run()
    say(f"{name}: {pairs} pairs of compilations, after {2 * pairs} pairs of runs")
    rows = rows_of(f"{name} run", measure_paired(arms, number=20, repeats=2 * pairs))
    times: dict[str, list[float]] = {"inductor": [], "magi": []}
    for backend in ("inductor", "magi"):
        compile_time(backend)  # the kernels of both are in the cache from here on
    for pair in range(pairs):
        for backend in ("inductor", "magi") if pair % 2 == 0 else ("magi", "inductor"):
            times[backend].append(compile_time(backend))
    rows += rows_of(f"{name} compile", times)
    if with_training:
        torch.compiler.reset()
        say(f"{name}: {pairs} pairs of training steps")
        steps = training(model, x)
        for step in steps.values():
            step()
        rows += rows_of(f"{name} training", measure_paired(steps, number=10, repeats=pairs))
    return rows


def main() -> None:
    """Measure the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="again for several; all without one")
    parser.add_argument("--merge", action="store_true", help="keep the rows of the other models as they are published")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"pairs of compilations; {PAIRS} is what is published")
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--dry", action="store_true", help="print the ratios, and write nothing")
    chosen = parser.parse_args()
    names = chosen.model or list(MODELS)
    kept = rows_written("backend_parity") if chosen.merge else []
    rows = [row for row in kept if row.case.split()[0] not in names]
    for name in names:
        rows += measure(name, chosen.pairs, with_training=not chosen.no_training)
        if chosen.dry:
            print(ratios("backend_parity", [asdict(row) for row in rows]))
        else:
            write("backend_parity", rows, note=NOTE)


if __name__ == "__main__":
    main()
