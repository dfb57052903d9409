# SPDX-License-Identifier: Apache-2.0
"""The operator `rowscale::scale_rows`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from magi_opschema import magi_register_custom_op
from torch import Tensor


@dataclass(frozen=True)
class Scale:
    """How rows are scaled: by factor ** power."""

    power: float = 1.0


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Scale], output: Tensor) -> None:
    del output
    x, factors, ctx.cfg = inputs
    ctx.save_for_backward(x, factors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, factors = ctx.saved_tensors
    power = ctx.cfg.power
    return grad * factors[:, None] ** power, (grad * x).sum(1) * power * factors ** (power - 1), None


@magi_register_custom_op(
    "rowscale::scale_rows", infer_output_meta_fn=["x"], setup_context_fn=_save, backward_fn=_backward
)
def scale_rows(x: Tensor, factors: Tensor, cfg: Scale = Scale()) -> Tensor:
    """Scale each row of x, [rows, columns], by its entry of factors, [rows], to the power in *cfg*."""
    return x * factors[:, None] ** cfg.power
