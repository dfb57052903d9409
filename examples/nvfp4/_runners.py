# SPDX-License-Identifier: Apache-2.0
"""Runners: objects that hold quantised weights and know how to multiply by them.

Each has two bodies: plain PyTorch, for a CPU and for gradients, and Triton, which decodes weights inside the product.
They are frozen dataclasses of Tensors, so an op takes them apart: their Tensors are inputs of a compiled graph, and
nothing of Python is left in a call of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ._format import NVFP4Tensor, dequantize_nvfp4
from ._launch import Rows, decoded_copy, launch, multiply
from ._patches import patches_of, tensor_of
from ._tilings import GROUPED_FROM, tile_for


@dataclass(frozen=True)
class NVFP4Weight:
    """An `NVFP4Tensor` in the order in which kernels read it.

    Attributes:
        codes: int32 [columns / 16, features / 64, 128], rounded up, experts stacked in front; see `_patches`.
        scales: int32 [columns / 16, features / 64, 16], likewise.
        tensor_scale: float32 [1, 1], experts stacked in front. AOTInductor would write a Tensor with fewer dimensions
            into its code as numbers, which a kernel cannot read.
        columns: the features that a product has.
        features: those of x.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor
    columns: int
    features: int

    @staticmethod
    def of(weight: NVFP4Tensor) -> NVFP4Weight:
        """The same numbers in this order."""
        codes, scales = patches_of(weight)
        columns, features = weight.packed.shape[-2], weight.packed.shape[-1] * 2
        return NVFP4Weight(codes, scales, weight.tensor_scale[..., None, None], columns, features)

    @property
    def tensor(self) -> NVFP4Tensor:
        """The same in the types and the order of the format."""
        return tensor_of(self.codes, self.scales, self.tensor_scale[..., 0, 0], self.columns, self.features)

    @property
    def nbytes(self) -> int:
        """Bytes of all three parts."""
        return self.codes.nbytes + self.scales.nbytes + self.tensor_scale.nbytes

    def decoded(self) -> Tensor:
        """The values, float32."""
        return dequantize_nvfp4(self.tensor)


@dataclass(frozen=True)
class NVFP4LinearRunner:
    """x @ weight.T for a quantised weight of shape [out_features, in_features]."""

    weight: NVFP4Weight

    def run(self, x: Tensor) -> Tensor:
        """Plain PyTorch: x of shape [..., in_features] to [..., out_features], in the dtype of x."""
        return functional.linear(x.float(), self.weight.decoded()).to(x.dtype)

    def run_triton(self, x: Tensor) -> Tensor:
        """The same by Triton kernels."""
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = multiply(rows, self.weight)
        return out.view(*x.shape[:-1], out.shape[-1])

    def run_transposed(self, grad: Tensor) -> Tensor:
        """The gradient with respect to x: grad of shape [..., out_features] to [..., in_features]."""
        return (grad.float() @ self.weight.decoded()).to(grad.dtype)

    def run_transposed_triton(self, grad: Tensor) -> Tensor:
        """The same with a decoded copy of the weight in the dtype of grad."""
        return grad @ decoded_copy(self.weight, grad.dtype)


@dataclass(frozen=True)
class NVFP4MoERunner:
    """A mixture of experts: gate and up, SiLU(gate) * up, down, summed with the weights of the chosen experts.

    Attributes:
        gate_up: of experts [2 * intermediate, hidden], the rows of the gate first.
        down: of experts [hidden, intermediate].
    """

    gate_up: NVFP4Weight
    down: NVFP4Weight

    def run(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Plain PyTorch, one expert after the other.

        Args:
            hidden_states: [tokens, hidden].
            topk_weights: [tokens, k].
            topk_ids: [tokens, k], integers; an expert may stand twice in a row.
        """
        out = torch.zeros_like(hidden_states, dtype=torch.float32)
        for token, place, into, back in self._experts(topk_ids):
            inner = silu_and_mul(functional.linear(hidden_states[token].float(), into))
            out.index_add_(0, token, functional.linear(inner, back) * topk_weights[token, place, None].float())
        return out.to(hidden_states.dtype)

    def run_gradients(
        self, grad: Tensor, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradients of `run` with respect to hidden_states and topk_weights; *grad* is like its result."""
        of_states = torch.zeros_like(hidden_states, dtype=torch.float32)
        of_weights = torch.zeros_like(topk_weights, dtype=torch.float32)
        for token, place, into, back in self._experts(topk_ids):
            gate, up = functional.linear(hidden_states[token].float(), into).chunk(2, -1)
            above, sigmoid = grad[token].float(), gate.sigmoid()
            outer = functional.linear(gate * sigmoid * up, back)
            of_weights[token, place] = (outer * above).sum(-1)
            of_inner = (above * topk_weights[token, place, None].float()) @ back
            of_gate = of_inner * up * sigmoid * (1 + gate * (1 - sigmoid))
            of_states.index_add_(0, token, torch.cat([of_gate, of_inner * gate * sigmoid], -1) @ into)
        return of_states.to(hidden_states.dtype), of_weights.to(topk_weights.dtype)

    def _experts(self, topk_ids: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """For each expert the places in *topk_ids* that name it, and its two weights in float32."""
        gate_up, down = self.gate_up.tensor, self.down.tensor
        for expert in range(gate_up.packed.shape[0]):
            token, place = torch.where(topk_ids == expert)
            into, back = (dequantize_nvfp4(NVFP4Tensor(*(part[expert] for part in w))) for w in (gate_up, down))
            yield token, place, into, back

    def run_triton(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """The same by two launches for all experts; nothing is read back from the GPU."""
        tokens, k = topk_ids.shape
        if tokens == 0:
            return torch.empty_like(hidden_states)
        rows = hidden_states.contiguous()
        outer = self._one_by_one(rows, topk_ids) if tokens * k < GROUPED_FROM else self._grouped(rows, topk_ids)
        weighted = outer.view(tokens, k, -1).float() * topk_weights.float().unsqueeze(-1)
        return weighted.sum(1).to(hidden_states.dtype)

    def _one_by_one(self, x: Tensor, topk_ids: Tensor) -> Tensor:
        """Every row of every expert it goes to reads the weights of that expert."""
        expert = topk_ids.flatten()
        into, back = (tile_for(1, w.columns * expert.numel(), x.dtype) for w in (self.gate_up, self.down))
        inner = launch(x, self.gate_up, into, Rows.by_row(expert, topk_ids.shape[1]))
        return launch(silu_and_mul(inner), self.down, back, Rows.by_row(expert, 1))

    def _grouped(self, x: Tensor, topk_ids: Tensor) -> Tensor:
        """Rows sorted by expert, so that those of one expert read its weights together."""
        tokens, k = topk_ids.shape
        experts = self.gate_up.codes.shape[0]
        # Most tiles are as full as the rows of an expert fill them on average; some experts have more than one row.
        tile = tile_for(max(2, tokens * k // experts + 1), self.gate_up.columns * experts, x.dtype)
        order = topk_ids.flatten().argsort(stable=True)
        tiles = sorted_tiles(topk_ids, experts, tile.block_m)
        inner = launch(x, self.gate_up, tile, Rows.sorted(*tiles, order // k))
        in_order = torch.arange(tokens * k, device=order.device)
        outer = launch(silu_and_mul(inner), self.down, tile, Rows.sorted(*tiles, in_order))
        return torch.empty_like(outer).index_copy(0, order, outer)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of the last dimension times the second half."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def sorted_tiles(topk_ids: Tensor, experts: int, block_m: int) -> tuple[Tensor, Tensor, Tensor]:
    """As many tiles of *block_m* rows as any routing of so many rows may need.

    Returns:
        The expert of each tile, its first row, and the row behind the last of its expert.
    """
    device, rows = topk_ids.device, topk_ids.numel()
    ids = topk_ids.flatten().long()
    counts = torch.zeros(experts, dtype=torch.long, device=device).scatter_add(0, ids, torch.ones_like(ids))
    tiles = (counts + block_m - 1) // block_m
    last_row, last_tile = counts.cumsum(0), tiles.cumsum(0)
    tile = torch.arange(min(rows, rows // block_m + experts), device=device)
    # Behind the last tile it is the last expert, and the rows are behind its last.
    expert = torch.bucketize(tile, last_tile, right=True).clamp(max=experts - 1)
    first_row, first_tile = (last_row - counts).gather(0, expert), (last_tile - tiles).gather(0, expert)
    return expert, first_row + (tile - first_tile) * block_m, last_row.gather(0, expert)
