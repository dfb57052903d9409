# SPDX-License-Identifier: Apache-2.0
"""How long a call takes while code for its size is made: in the call that is due, and beside the calls.

A small MLP is called with eight sizes in turn, one call each two milliseconds, until each of them has code of its own,
and 2,000 times after that. Caches are empty in each repeat; the first call, which compiles the code for any size, is
not counted. On a CPU, with one thread.

Then a larger MLP gets 10,000 calls in orders that an adversary would choose, against the code for any size in the same
order, with one, two and eight sizes at a time. Compilations count, but for the first ones, which `magi.hot_sizes` asks
for.

Last, the first call of a model with `magi.first_call="eager"`: all of it against the first call with torch's backend
`eager`, which captures and runs the same graph; and what follows Dynamo's capture, up to the answer, against a call of
the model in eager. For a model whose call takes a long time, and for one whose call takes none.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from _results import empty_caches, rows_of, say, write
from magi_backend import magi, wait
from torch import Tensor, nn
from torch._dynamo.utils import counters


REPEATS = 5
SIZES = range(8, 16)
LAST = 2000
APART = 0.002
NOTE = (
    "`worst_call_ms` is the longest call while the code for eight sizes is made beside the calls "
    "(`magi.hot_in_background`), `worst_call_that_waits_ms` the longest where the call that is due makes it. "
    "`final_vs_hot` compares the calls after that. `thrash_worst` is the largest ratio of 10,000 calls with more sizes "
    "than may have code to the same calls with the code for any size. `first_call_vs_eager` is what follows the "
    "capture in a first call that eager answers over a call in eager, `first_call_vs_eager_backend` the whole first "
    "call over that with torch's backend `eager`."
)
CAPS = (1, 2, 8)
CALLS = 10_000
_RANDOM = random.Random(0)  # noqa: S311 - a seed for an order
ORDERS = {
    "two sizes in turn": [8 + i % 2 for i in range(CALLS)],
    "81 sizes in turn": [8 + i % 81 for i in range(CALLS)],
    "81 sizes, three calls each": [8 + i // 3 % 81 for i in range(CALLS)],
    "bursts of 40 calls": [8 + i // 40 for i in range(CALLS)],
    "random, few often": [8 + min(200, int(_RANDOM.paretovariate(0.7))) for _ in range(CALLS)],
}


def mlp(width: int) -> nn.Module:
    """A small model in evaluation mode."""
    parts = (nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
    return nn.Sequential(*parts).eval()


def measure(*, in_background: bool) -> tuple[float, float]:
    """The longest call until each size has code, and the median of the calls after that, in seconds."""
    options: dict[str, Any] = {"magi.hot_sizes": len(SIZES), "magi.hot_in_background": in_background}
    compiled = torch.compile(mlp(64), backend="magi", dynamic=True, options=options)
    sizes = itertools.cycle(SIZES)

    def call() -> float:
        x = torch.randn(next(sizes), 64)
        time.sleep(APART)
        start = time.perf_counter()
        compiled(x)
        return time.perf_counter() - start

    torch.compiler.reset()
    with torch.no_grad(), tempfile.TemporaryDirectory() as caches:
        with mock.patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=caches):
            compiled(torch.randn(3, 64))
            first = [call() for _ in range(4 * len(SIZES))]  # due at the third call of each
            while not wait(seconds=0):
                first.append(call())
        # Its first runs are timed, and wait for each other.
        last = [call() for _ in range(4 * len(SIZES) + LAST)][-LAST:]
    return max(first), statistics.median(last)


def seconds_in_order(sizes: Sequence[int], cap: int) -> float:
    """The time of calls with *sizes*, without the first *cap* compilations for one of them."""
    torch.compiler.reset()
    compiled = torch.compile(mlp(256), backend="magi", dynamic=True, options={"magi.hot_sizes": cap})
    inputs = {size: torch.randn(size, 256) for size in {*sizes}}
    made: list[float] = []
    with torch.no_grad():
        compiled(torch.randn(3, 256))
        before, start = counters["aot_autograd"]["total"], time.perf_counter()
        for size in sizes:
            began = time.perf_counter()
            compiled(inputs[size])
            if counters["aot_autograd"]["total"] != before:
                before = counters["aot_autograd"]["total"]
                made.append(time.perf_counter() - began)
        return time.perf_counter() - start - sum(made[:cap])


def first_call(model: nn.Module, x: Tensor, backend: Callable[..., Any]) -> tuple[float, float]:
    """The seconds of the first call of *model*, and those of them that follow the capture."""
    after: list[float] = []

    def timed(run: Callable[..., Any]) -> Callable[..., Any]:
        def once(*args: Any) -> Any:
            start = time.perf_counter()
            result = run(*args)
            after.append(time.perf_counter() - start)
            return result

        return once

    torch.compiler.reset()
    wait()  # what was to be compiled for an earlier model is dropped
    compiled = torch.compile(model, backend=lambda gm, inputs: timed(timed(backend)(gm, inputs)))
    start = time.perf_counter()
    compiled(x)
    return time.perf_counter() - start, sum(after)


def measure_first_calls(repeats: int) -> dict[str, dict[str, list[float]]]:
    """The seconds of each arm in each case."""
    backends: dict[str, Callable[..., Any]] = {
        "first_call": functools.partial(magi, options={"magi.first_call": "eager"}),
        "eager_backend": lambda gm, _: gm.forward,
    }
    found: dict[str, dict[str, list[float]]] = {}
    for size, width, rows in (("", 2048, 256), (", small model", 64, 8)):
        model, x = mlp(width), torch.randn(rows, width)
        for _ in range(repeats + 1):  # the first repeat imports what the others find
            took = {name: first_call(model, x, backend) for name, backend in backends.items()}
            start = time.perf_counter()
            model(x)
            eager = time.perf_counter() - start
            whole = {name: seconds for name, (seconds, _) in took.items()}
            after = {name: seconds for name, (_, seconds) in took.items()} | {"eager": eager}
            for case, each in ((f"first call{size}", whole), (f"after the capture{size}", after)):
                for arm, seconds in each.items():
                    found.setdefault(case, {}).setdefault(arm, []).append(seconds)
    return {case: {arm: took[1:] for arm, took in arms.items()} for case, arms in found.items()}


def main() -> None:
    """Measure both ways in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    worst: dict[str, list[float]] = {"background": [], "waits": []}
    last: dict[str, list[float]] = {"background": [], "waits": []}
    for _ in range(repeats):
        for arm, longests in worst.items():
            longest, median = measure(in_background=arm == "background")
            longests.append(longest)
            last[arm].append(median)
            say(f"{arm} {1e3 * longest:.1f} ms, then {1e6 * median:.0f} µs")
    rows = [*rows_of("worst call", worst), *rows_of("later calls", last)]
    for name, sizes in ORDERS.items():
        arms: dict[str, list[float]] = {f"{cap} hot": [] for cap in (0, *CAPS)}
        for _ in range(repeats):
            with empty_caches():
                for cap, seconds in zip((0, *CAPS), arms.values(), strict=True):
                    seconds.append(seconds_in_order(sizes, cap))
        sys.stderr.write(f"{name}: { ({arm: round(statistics.median(took), 3) for arm, took in arms.items()}) }\n")
        rows += rows_of(name, arms)
    with torch.no_grad():
        for case, arms in measure_first_calls(repeats).items():
            sys.stderr.write(
                f"{case}: { ({arm: round(1e3 * statistics.median(s), 2) for arm, s in arms.items()}) } ms\n"
            )
            rows += rows_of(case, arms)
    write("hot_latency", rows, note=NOTE)


if __name__ == "__main__":
    main()
