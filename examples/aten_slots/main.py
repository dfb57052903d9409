# SPDX-License-Identifier: Apache-2.0
"""Use two Triton kernels through magi_opschema.aten, and switch between them and ATen.

Runs on a GPU, or on a CPU with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch


def main() -> None:
    """Register, call, pin, compile."""
    sys.path.insert(0, str(Path(__file__).parent))
    import kernels
    from magi_opschema import aten

    device = "cpu" if kernels.INTERPRETED else "cuda"
    x = torch.randn(8, 100, device=device)

    print("softmax is served by slots", list(aten.slots("softmax")))
    ours = aten.softmax(x, -1)
    with aten.use_slot("softmax", 8):
        atens = aten.softmax(x, -1)
    print("largest difference from ATen:", (ours - atens).abs().max().item())
    assert torch.allclose(ours, atens, atol=1e-6)

    out = torch.empty(0, device=device)
    assert aten.add(x, x, alpha=2, out=out) is out
    assert torch.allclose(out, 3 * x)

    def model(x: torch.Tensor) -> torch.Tensor:
        return aten.softmax(aten.add(x, x, alpha=0.5), -1)

    compiled = torch.compile(model, fullgraph=True)
    assert torch.allclose(compiled(x), torch.softmax(1.5 * x, -1), atol=1e-6)
    print("compiled: the same")


if __name__ == "__main__":
    main()
