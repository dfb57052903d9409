# SPDX-License-Identifier: Apache-2.0
"""Serve batches of any size: one graph for all, code of its own for the size that comes most, a warm second start.

Run it twice with one folder for the caches. The second start finds all that the first one compiled:

    TORCHINDUCTOR_CACHE_DIR=cache python examples/serve.py
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import torch
from magi_backend import read_report
from torch import nn


model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).eval()
# Any folder; that of the variable, if the run is to be looked at with `magi report`.
report = os.environ.get("MAGI_COMPILE_REPORT") or tempfile.mkdtemp()
options: dict[str, Any] = {"magi.hot_sizes": 1, "magi.hot_after": 2, "magi.report": report}
compiled = torch.compile(model, backend="magi", dynamic=True, options=options)

# Who compiles waits, so what can be foreseen happens before the first request. A batch of 1 has a graph of its own, one
# of 3 stands for all others, and 8 comes back, as most requests will.
WARM_UP = (1, 3, 8, 8)


@torch.inference_mode()
def main() -> None:
    """Warm up, answer a few requests as eager mode does, and say what was compiled."""
    start = time.perf_counter()
    for batch in WARM_UP:
        compiled(torch.randn(batch, 16))
    print(f"ready after {time.perf_counter() - start:.1f} s")
    ready = len(read_report(report).entries)

    for batch in (8, 5, 8, 2, 1, 16, 8):
        x = torch.randn(batch, 16)
        torch.testing.assert_close(compiled(x), model(x))
    compilations = [entry.compilation for entry in read_report(report).entries]
    print(f"{len(compilations)} compilations, {len(compilations) - ready} of them after the first request")
    hits = sum(one.cache.hits for one in compilations)
    misses = sum(one.cache.misses for one in compilations)
    print(f"caches: {hits} hits, {misses} misses")


if __name__ == "__main__":
    main()
