# SPDX-License-Identifier: Apache-2.0
"""A block of Llama with Liger's RMSNorm, rope and SwiGLU, as wide as that of Llama 3 8B."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from _library_op import Body, Program, Sizes
from _liger_ops import OPS
from torch import Tensor, nn
from torch.nn import functional


WIDTH_OF_HEAD = 128
WIDTH, WIDTH_OF_KEYS, WIDTH_INSIDE = 4096, 1024, 14336
SIZES: Sizes = {"small": (1, 32, WIDTH), "large": (2, 4096, WIDTH), "tiny": (1, 4, WIDTH)}
"""Batch, tokens and width."""


class Block(nn.Module):
    """Attention and a gated product, each behind a norm and beside a residual."""

    def __init__(self, ops: Mapping[str, Body], dtype: torch.dtype) -> None:
        super().__init__()
        self.rms_norm, self.rope = ops["liger_rms_norm"], ops["liger_rope"]
        self.swiglu = ops["liger_swiglu"]
        linear = functools.partial(nn.Linear, bias=False, dtype=dtype)
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(WIDTH, dtype=dtype)) for _ in range(2))
        self.q, self.k, self.v = (linear(WIDTH, of) for of in (WIDTH, WIDTH_OF_KEYS, WIDTH_OF_KEYS))
        self.gate, self.up = (linear(WIDTH, WIDTH_INSIDE) for _ in range(2))
        self.o, self.down = linear(WIDTH, WIDTH), linear(WIDTH_INSIDE, WIDTH)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self._attention(self.rms_norm(x, self.norms[0]), cos, sin)
        normed = self.rms_norm(x, self.norms[1])
        out: Tensor = x + self.down(self.swiglu(self.gate(normed), self.up(normed)))
        return out

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k, v = (linear(x).unflatten(-1, (-1, WIDTH_OF_HEAD)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q, k = self.rope(q, k, cos, sin)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(-2))


def _inputs(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    angles = torch.randn(1, size[1], WIDTH_OF_HEAD // 2).repeat(1, 1, 2)
    return torch.randn(size, dtype=dtype), angles.cos().to(dtype), angles.sin().to(dtype)


def _build(ops: Mapping[str, Body], dtype: torch.dtype) -> Body:
    return Block(ops, dtype).eval().requires_grad_(False)


PROGRAM = Program(
    {name: OPS[name] for name in ("liger_rms_norm", "liger_rope", "liger_swiglu")}, _build, SIZES, _inputs
)
