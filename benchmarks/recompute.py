# SPDX-License-Identifier: Apache-2.0
"""Peak memory and step time of a training step, against plain torch.compile, on a stack of transformer blocks.

Each block is RMS norm, attention as a registered operator, RMS norm and a gated product; float32, on a CPU.

- `stock`         `torch.compile(model)`
- `stock_budget`  the same with AOTAutograd's `activation_memory_budget`
- `magi`          `torch.compile(model, backend="magi")`
- `magi_budget`   the same with `magi.memory_budget`: products and attention are saved, the rest is computed again

The peak is what the profiler counts of allocations above what was allocated when the step began, gradients included.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from _results import measure_paired, rows_of, write
from magi_backend import magi_register_custom_op
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile


BUDGET = 0.3
Step = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Size:
    blocks: int = 6
    width: int = 256
    heads: int = 4
    batch: int = 4
    length: int = 256


@dataclass(frozen=True)
class Scaling:
    scale: float


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.scale = inputs[3].scale


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    q, k, v = ctx.saved_tensors
    weights = (q @ k.mT * ctx.scale).softmax(-1)
    d_weights = grad @ v.mT
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True))
    return d_scores @ k * ctx.scale, d_scores.mT @ q * ctx.scale, weights.mT @ grad, None


@magi_register_custom_op(
    "bench_recompute::attend",
    infer_output_meta_fn=["q"],
    setup_context_fn=_save,
    backward_fn=_backward,
    is_compute_sensitive=True,
)
def attend(q: Tensor, k: Tensor, v: Tensor, scaling: Scaling) -> Tensor:
    """Attention over [batch, heads, length, width of a head]."""
    return (q @ k.mT * scaling.scale).softmax(-1) @ v


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.scaling = size.heads, Scaling((size.width // size.heads) ** -0.5)
        self.norms = nn.ModuleList(nn.RMSNorm(size.width) for _ in range(2))
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 8 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """*x* and the result are [batch, length, width]."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = (part.contiguous() for part in qkv)
        x = x + self.out(attend(q, k, v, self.scaling).transpose(1, 2).reshape(batch, length, width))
        gate, value = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * value)  # type: ignore[no-any-return]


def peak_bytes(step: Callable[[], object]) -> int:
    """The most that *step* had allocated at one time, above what there was before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]"]
    memory.sort(key=lambda event: event["ts"])
    before = memory[0]["args"]["Total Allocated"] - memory[0]["args"]["Bytes"]
    return int(max(event["args"]["Total Allocated"] for event in memory) - before)


def steps(size: Size) -> dict[str, Step]:
    """A training step of each arm, compiled: the same weights, gradients set to None before."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(size) for _ in range(size.blocks)))
    x = torch.randn(size.batch, size.length, size.width)

    def arm(budget: float | None, **how: Any) -> Step:
        own = copy.deepcopy(model)
        compiled = torch.compile(own, **how)

        def step() -> list[Tensor]:
            own.zero_grad(set_to_none=True)
            compiled(x).square().mean().backward()
            return [parameter.grad for parameter in own.parameters() if parameter.grad is not None]

        settings = {} if budget is None else {"activation_memory_budget": budget}
        with torch._functorch.config.patch(settings):  # noqa: SLF001 - the only place where torch has it
            step()
        return step

    arms = {
        "stock": arm(None),
        # An option at its default makes it another backend: Dynamo would run what it has for the first.
        "stock_budget": arm(BUDGET, options={"epilogue_fusion": True}),
        "magi": arm(None, backend="magi"),
        "magi_budget": arm(None, backend="magi", options={"magi.memory_budget": BUDGET}),
    }
    reference = arms["stock"]()
    for name, step in arms.items():
        for ours, theirs in zip(step(), reference, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6, msg=name)
    return arms


def main() -> None:
    """Measure every arm, in turn in each repeat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    arms = steps(Size())
    peaks = {arm: peak_bytes(step) for arm, step in arms.items()}
    rows = rows_of("step", measure_paired(arms, number=1, repeats=repeats))
    rows = [replace(row, bytes=(peaks[row.arm],)) for row in rows]
    write("recompute", rows, note=f"The memory budget of both arms that have one is {BUDGET}.")


if __name__ == "__main__":
    main()
