# SPDX-License-Identifier: Apache-2.0
"""What the GPU reaches, measured, and the time that no version of a computation can beat there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Callable


REPEATS = 8
SIZE = 8192
GIBIBYTE = 2**30


@dataclass(frozen=True)
class Ceilings:
    """The rates of a large product of bfloat16 matrices, and of a large copy, bytes read and written."""

    flops_per_second: float
    bytes_per_second: float

    def floor_seconds(self, flops: float, traffic: float) -> float:
        """The arithmetic at its ceiling or the *traffic* in bytes at its own, whichever takes longer."""
        return max(flops / self.flops_per_second, traffic / self.bytes_per_second)


def measure_ceilings() -> Ceilings:
    """Both rates of the current GPU, the best of several tries."""
    a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    source = torch.empty(4 * GIBIBYTE, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return Ceilings(2 * SIZE**3 / _best(lambda: a @ a), 2 * source.nbytes / _best(lambda: target.copy_(source)))


def _best(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
