# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002  # kernels name their parameters as ATen does
"""Kernels for slots of the ATen surface: one that counts its calls, and one whose gradient is given by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Counted:
    """A softmax kernel that counts its calls."""

    def __init__(self, shift: float = 0.0) -> None:
        self.calls = 0
        self.shift = shift

    def __call__(self, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        self.calls += 1
        return torch.softmax(input, dim, dtype=dtype) + self.shift


def square(input: Tensor) -> Tensor:
    return input.detach() ** 2


def save_input(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    ctx.save_for_backward(inputs[0])
