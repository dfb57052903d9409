# SPDX-License-Identifier: Apache-2.0
"""What decodes in `nvfp4_linear.py`: layers of a Llama, and a mixture of experts in bfloat16."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


WIDTH, INNER, HEADS, KEY_HEADS, HEAD = 4096, 14336, 32, 8, 128
POSITIONS = 512


class Attention(nn.Module):
    """Grouped-query attention of one token over the positions before it, which are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.key = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.value = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.register_buffer("keys", torch.randn(1, KEY_HEADS, POSITIONS, HEAD))
        self.register_buffer("values", torch.randn(1, KEY_HEADS, POSITIONS, HEAD))

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], position: Tensor) -> Tensor:
        """X of shape [1, WIDTH]; *turn*: cosine and sine of the position, [HEAD]."""
        query = rotated(self.query(x).view(1, HEADS, 1, HEAD), turn)
        key = rotated(self.key(x).view(1, KEY_HEADS, 1, HEAD), turn)
        keys, values = cast("Tensor", self.keys), cast("Tensor", self.values)
        keys.index_copy_(2, position, key)
        values.index_copy_(2, position, self.value(x).view(1, KEY_HEADS, 1, HEAD))
        # All positions that are kept are seen; a mask would take the flash kernels away.
        mixed = functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        return cast("Tensor", self.out(mixed.view(1, HEADS * HEAD)))


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of the last dimension."""
    first, second = x.chunk(2, -1)
    return x * turn[0] + torch.cat([-second, first], -1) * turn[1]


class Layer(nn.Module):
    """Attention and a gated MLP, each behind an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.before_attention, self.before_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], position: Tensor) -> Tensor:
        """X of shape [1, WIDTH]."""
        x = x + self.attention(self.before_attention(x), turn, position)
        inner = self.before_mlp(x)
        return cast("Tensor", x + self.down(functional.silu(self.gate(inner)) * self.up(inner)))


class Llama(nn.Module):
    """The layers of a Llama 3 8B, without what stands before and behind them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], position: Tensor) -> Tensor:
        """One step: x of shape [1, WIDTH] at *position*, int64 [1]."""
        for layer in self.layers:
            x = layer(x, turn, position)
        return x


def fused_moe(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """A mixture of SwiGLU experts for few tokens, as one reduction for each product, which reads the experts in place.

    Args:
        x: [tokens, hidden].
        weights: [tokens, k].
        ids: [tokens, k].
        gate_up: [experts, 2 * intermediate, hidden].
        down: [experts, hidden, intermediate].
    """
    gate, up = (gate_up[ids].float() * x.float()[:, None, None]).sum(-1).chunk(2, -1)
    inner = (functional.silu(gate) * up).to(x.dtype)
    outer = (down[ids].float() * inner.float()[:, :, None]).sum(-1)
    return (outer * weights.float()[..., None]).sum(1).to(x.dtype)


def grouped_moe(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same by torch's grouped matrix products, rows sorted by expert."""
    tokens, k = ids.shape
    order = ids.flatten().argsort(stable=True)
    ones = torch.ones(tokens * k, dtype=torch.int32, device=x.device)
    ends = torch.zeros(gate_up.shape[0], dtype=torch.int32, device=x.device).index_add(0, ids.flatten(), ones)
    ends = ends.cumsum(0, dtype=torch.int32)
    gate, up = functional.grouped_mm(x[order // k], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    outer = functional.grouped_mm(functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
    outer = torch.empty_like(outer).index_copy(0, order, outer).view(tokens, k, -1)
    return (outer.float() * weights.float()[..., None]).sum(1).to(x.dtype)
