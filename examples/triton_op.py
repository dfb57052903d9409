# SPDX-License-Identifier: Apache-2.0
"""A Triton operator with a backward of its own, compiled by the backend `magi`.

The gate of a transformer's MLP, silu(gate) * up, in one kernel, and its gradients in another.

    python examples/triton_op.py                      # on a GPU
    TRITON_INTERPRET=1 python examples/triton_op.py   # on a CPU, the same kernels in Triton's interpreter
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from magi_backend import magi_register_custom_op
from magi_opschema import op_def
from torch import Tensor, nn


@dataclass(frozen=True)
class Launch:
    """How the kernels are launched."""

    block: int = 1024
    warps: int = 4


@triton.jit
def gate_kernel(gate, up, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program computes BLOCK elements, in float32."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(gate + at, at < n, other=0.0).to(tl.float32)
    factor = tl.load(up + at, at < n, other=0.0).to(tl.float32)
    tl.store(out + at, value * tl.sigmoid(value) * factor, at < n)


@triton.jit
def gate_backward_kernel(grad, gate, up, grad_gate, grad_up, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both gradients in one pass over the inputs."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    above = tl.load(grad + at, at < n, other=0.0).to(tl.float32)
    value = tl.load(gate + at, at < n, other=0.0).to(tl.float32)
    factor = tl.load(up + at, at < n, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(value)
    tl.store(grad_gate + at, above * factor * sigmoid * (1 + value * (1 - sigmoid)), at < n)
    tl.store(grad_up + at, above * value * sigmoid, at < n)


@magi_register_custom_op("examples::gated_backward")
def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, cfg: Launch) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    grid = (triton.cdiv(gate.numel(), cfg.block),)
    gate_backward_kernel[grid](
        *(grad.contiguous(), gate, up, grad_gate, grad_up, gate.numel()), BLOCK=cfg.block, num_warps=cfg.warps
    )
    return grad_gate, grad_up


def save(ctx: Any, inputs: tuple[Tensor, Tensor, Launch], output: Tensor) -> None:
    """Keep both inputs."""
    del output
    gate, up, ctx.cfg = inputs
    ctx.save_for_backward(gate, up)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    """The backward is an operator too, and the compiler sees through it as well."""
    gate, up = ctx.saved_tensors
    return (*gated_backward(grad, gate, up, ctx.cfg), None)


@magi_register_custom_op("examples::gated", setup_context_fn=save, backward_fn=backward)
def gated(gate: Tensor, up: Tensor, cfg: Launch = Launch()) -> Tensor:
    """silu(gate) * up for contiguous tensors of one shape."""
    out = torch.empty_like(gate)
    grid = (triton.cdiv(gate.numel(), cfg.block),)
    gate_kernel[grid](gate, up, out, gate.numel(), BLOCK=cfg.block, num_warps=cfg.warps)
    return out


class Mlp(nn.Module):
    """A gated MLP as in Llama."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [tokens, width] to the same shape."""
        return self.down(gated(self.gate(x), self.up(x)))  # type: ignore[no-any-return]


def main() -> None:
    """Compare the operator with PyTorch, eager and compiled, forward and backward."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    device = "cpu" if interpreted else "cuda"
    print(op_def(gated))
    torch.manual_seed(0)
    gate, up = (torch.randn(3, 50, device=device, requires_grad=True) for _ in range(2))

    def reference(gate: Tensor, up: Tensor) -> Tensor:
        return nn.functional.silu(gate) * up

    torch.testing.assert_close(gated(gate, up), reference(gate, up))
    for ours, theirs in zip(
        torch.autograd.grad(gated(gate, up).sum(), (gate, up)),
        torch.autograd.grad(reference(gate, up).sum(), (gate, up)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    print("kernels and PyTorch agree, forward and backward")

    mlp = Mlp(16, 32).to(device)
    compiled = torch.compile(mlp, backend="magi", dynamic=True)
    for tokens in (5, 9):
        x = torch.randn(tokens, 16, device=device)
        torch.testing.assert_close(compiled(x), mlp(x))
        compiled(x).sum().backward()
    print("compiled and eager agree")


if __name__ == "__main__":
    main()
