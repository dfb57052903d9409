# SPDX-License-Identifier: Apache-2.0
"""What the GPU reaches, measured, and the time that no version of a computation can beat there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor


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


def work(call: Callable[[], object]) -> dict[str, float]:
    """FLOPs of one eager *call*, and the bytes that convolutions and matrix products read and write."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    traffic = [0]

    class Bytes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if any(part in str(func) for part in ("conv", "aten.mm", "aten.addmm", "aten.bmm")):
                tensors = [value for value in (*args, out) if isinstance(value, Tensor)]
                traffic[0] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            return out

    recorder: Any = Bytes
    with FlopCounterMode(display=False) as counter, recorder():
        call()
    return {"flops": float(counter.get_total_flops()), "bytes": float(traffic[0])}


def _best(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
