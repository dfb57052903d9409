# SPDX-License-Identifier: Apache-2.0
"""An operator whose settings are a dataclass with a Tensor in it, and its gradient. Needs magi-opschema alone.

A weight normalisation of rows: the direction of each row of x, times a gain. The gain lives in the settings, and its
gradient goes back to it.

    python examples/norm_with_backward.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from magi_opschema import magi_register_custom_op, op_def, opcheck
from torch import Tensor


@dataclass(frozen=True)
class Direction:
    """How rows are normalised.

    Attributes:
        gain: float[columns], what every normalised row is multiplied by.
        eps: Added to the sum of squares.
        order: "l2" divides by the length of a row, "rms" by the root of its mean square.
    """

    gain: Tensor
    eps: float = 1e-6
    order: Literal["l2", "rms"] = "l2"


def inverse_length(x: Tensor, cfg: Direction) -> Tensor:
    """One over the length of each row, [rows, 1]."""
    squares = x.square()
    total = squares.sum(-1, keepdim=True) if cfg.order == "l2" else squares.mean(-1, keepdim=True)
    return torch.rsqrt(total + cfg.eps)


def save(ctx: Any, inputs: tuple[Tensor, Direction], output: Tensor) -> None:
    """Keep what the gradients are made of; the settings come rebuilt."""
    del output
    x, cfg = inputs
    ctx.save_for_backward(x, cfg.gain)
    ctx.eps, ctx.order = cfg.eps, cfg.order


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """One gradient for each parameter; of the record, by field."""
    x, gain = ctx.saved_tensors
    scale = inverse_length(x, Direction(gain, ctx.eps, ctx.order))
    inner = grad * gain
    weight = 1.0 if ctx.order == "l2" else 1.0 / x.shape[-1]
    along = (inner * x).sum(-1, keepdim=True) * weight
    return scale * inner - x * scale.pow(3) * along, {"gain": (grad * x * scale).sum(0)}


@magi_register_custom_op("examples::direction", infer_output_meta_fn=["x"], setup_context_fn=save, backward_fn=backward)
def direction(x: Tensor, cfg: Direction) -> Tensor:
    """Normalise the rows of x, [rows, columns]."""
    return x * inverse_length(x, cfg) * cfg.gain


def main() -> None:
    """Show what the operator became; check it, its gradients, and a compiled training step."""
    print(op_def(direction))
    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    gain = torch.randn(3, dtype=torch.float64, requires_grad=True)
    for order in ("l2", "rms"):
        assert torch.autograd.gradcheck(
            lambda x, gain, order=order: direction(x, Direction(gain, order=order)), (x, gain)
        )
    print("gradients agree with finite differences")
    print("opcheck:", ", ".join(opcheck(direction, (x, Direction(gain)))))

    def loss(x: Tensor, gain: Tensor) -> Tensor:
        return direction(x.sin(), Direction(gain)).square().sum()

    expected = torch.autograd.grad(loss(x, gain), (x, gain))
    compiled = torch.compile(loss, fullgraph=True)
    for ours, eager in zip(torch.autograd.grad(compiled(x, gain), (x, gain)), expected, strict=True):
        torch.testing.assert_close(ours, eager)
    print("compiled and eager agree")


if __name__ == "__main__":
    main()
