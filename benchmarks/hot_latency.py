# SPDX-License-Identifier: Apache-2.0
"""How long a call takes while code for its size is made: in the call that is due, and beside the calls.

A small MLP is called with eight sizes in turn, one call each two milliseconds, until each of them has code of its own,
and 2,000 times after that. Caches are empty in each repeat; the first call, which compiles the code for any size, is
not counted. On a CPU, with one thread.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from typing import Any
from unittest import mock

import torch
from _results import rows_of, write
from magi_backend import wait
from torch import nn


REPEATS = 5
SIZES = range(8, 16)
LAST = 2000
APART = 0.002
NOTE = (
    "`worst_call_ms` is the longest call while the code for eight sizes is made beside the calls "
    "(`magi.hot_in_background`), `worst_call_that_waits_ms` the longest where the call that is due makes it. "
    "`final_vs_hot` compares the calls after that."
)


def measure(*, in_background: bool) -> tuple[float, float]:
    """The longest call until each size has code, and the median of the calls after that, in seconds."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).eval()
    options: dict[str, Any] = {"magi.hot_sizes": len(SIZES), "magi.hot_in_background": in_background}
    compiled = torch.compile(model, backend="magi", dynamic=True, options=options)
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
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {arm} {1e3 * longest:.1f} ms, then {1e6 * median:.0f} µs\n")
    write("hot_latency", [*rows_of("worst call", worst), *rows_of("later calls", last)], note=NOTE)


if __name__ == "__main__":
    main()
