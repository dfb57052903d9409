# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002  # kernels name their parameters as ATen does
"""A kernel for a slot of the ATen surface that tells whether it was called."""

from __future__ import annotations

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
