# SPDX-License-Identifier: Apache-2.0
"""Runners: objects that hold quantised weights and know how to multiply by them.

Each has two bodies: plain PyTorch, for a CPU, and Triton, which decodes the weights inside the product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn import functional

from ._format import NVFP4Tensor, dequantize_nvfp4
from ._kernels import nvfp4_gemm_kernel, nvfp4_gemv_kernel
from ._packed_gemv import nvfp4_packed_gemv_kernel


@dataclass(frozen=True)
class GemvTile:
    """Launch settings of the product with few rows; a word is 8 codes."""

    block_n: int = 16
    block_words: int = 256
    warps: int = 4
    stages: int = 1


@dataclass(frozen=True)
class GemmTile:
    """Launch settings of the product with many rows."""

    block_m: int = 32
    block_n: int = 64
    block_k: int = 128
    warps: int = 4


_SHAPES = (
    *((16, 128, 4), (32, 128, 4), (16, 256, 4), (8, 256, 4), (16, 256, 8), (32, 256, 8)),
    *((8, 512, 4), (4, 512, 4), (8, 512, 8), (16, 512, 8), (4, 1024, 4), (8, 1024, 8)),
)
GEMV_TILES = tuple(GemvTile(*shape, stages) for shape in _SHAPES for stages in (1, 2))
"""What `NVFP4LinearRunner.tune` tries."""

GEMV_ROWS = 4
"""Up to so many rows are multiplied row by row."""


class NVFP4LinearRunner:
    """x @ weight.T for a quantised weight of shape [out_features, in_features]."""

    def __init__(self, weight: NVFP4Tensor) -> None:
        self.weight = weight
        self.gemv_tile = GemvTile()
        self.gemm_tile = GemmTile()

    def run(self, x: Tensor) -> Tensor:
        """Plain PyTorch: x of shape [..., in_features] to [..., out_features], in the dtype of x."""
        return functional.linear(x.float(), dequantize_nvfp4(self.weight)).to(x.dtype)

    def run_triton(self, x: Tensor) -> Tensor:
        """The same by Triton kernels."""
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = rows.new_empty(rows.shape[0], self.weight.packed.shape[0])
        if rows.shape[0] > GEMV_ROWS:
            launch_gemm(rows, self.weight, out, self.gemm_tile)
        elif rows.shape[0] > 0:
            self._launch_gemv(rows, out)
        return out.view(*x.shape[:-1], out.shape[-1])

    def tune(self, x: Tensor) -> GemvTile:
        """Try the launch settings on *x*, on a GPU, and keep the fastest for few rows."""
        seconds = {}
        for tile in GEMV_TILES:
            self.gemv_tile = tile
            seconds[tile] = triton.testing.do_bench(lambda: self.run_triton(x), warmup=5, rep=20)
        self.gemv_tile = min(seconds, key=seconds.__getitem__)
        return self.gemv_tile

    def _launch_gemv(self, x: Tensor, out: Tensor) -> None:
        tile, (n, k) = self.gemv_tile, (out.shape[1], x.shape[1])
        grid = (triton.cdiv(n, tile.block_n), x.shape[0])
        packed, scales = self.weight.packed, (self.weight.block_scale.view(torch.uint8), self.weight.tensor_scale)
        if can_be_read_in_pairs(x):
            nvfp4_packed_gemv_kernel[grid](
                *(x.view(torch.int32), packed.view(torch.int64), *scales, out, n, k, x.stride(0) // 2),
                BLOCK_N=tile.block_n,
                BLOCKS=tile.block_words // 2,
                STAGES=tile.stages,
                num_warps=tile.warps,
            )
        else:
            nvfp4_gemv_kernel[grid](
                *(x, packed.view(torch.int32), *scales, out, n, k, x.stride(0)),
                BLOCK_N=tile.block_n,
                BLOCK_WORDS=tile.block_words,
                STAGES=tile.stages,
                num_warps=tile.warps,
            )


def can_be_read_in_pairs(x: Tensor) -> bool:
    """Whether the kernel with PTX in it takes *x*: Triton's interpreter has no PTX, and pairs lie at even places."""
    return x.is_cuda and x.dtype == torch.bfloat16 and x.stride(0) % 2 == 0 and x.storage_offset() % 2 == 0


class NVFP4MoERunner:
    """A mixture of experts: gate and up, SiLU(gate) * up, down, summed with the weights of the chosen experts.

    Args:
        gate_up: [experts, 2 * intermediate, hidden], the rows of the gate first.
        down: [experts, hidden, intermediate].
    """

    def __init__(self, gate_up: NVFP4Tensor, down: NVFP4Tensor) -> None:
        self.gate_up = gate_up
        self.down = down
        self.tile = GemmTile(block_m=16)

    def run(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Plain PyTorch, one expert after the other.

        Args:
            hidden_states: [tokens, hidden].
            topk_weights: [tokens, k].
            topk_ids: [tokens, k], integers; an expert may stand twice in a row.
        """
        out = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in range(self.gate_up.packed.shape[0]):
            token, place = torch.where(topk_ids == expert)
            gate_up, down = (dequantize_nvfp4(NVFP4Tensor(*(p[expert] for p in w))) for w in (self.gate_up, self.down))
            inner = silu_and_mul(functional.linear(hidden_states[token].float(), gate_up))
            outer = functional.linear(inner, down) * topk_weights[token, place, None].float()
            out.index_add_(0, token, outer)
        return out.to(hidden_states.dtype)

    def run_triton(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """The same by two grouped products over the rows sorted by expert; nothing is read back from the GPU."""
        tokens, k = topk_ids.shape
        if tokens == 0:
            return torch.empty_like(hidden_states)
        rows = hidden_states.contiguous()
        order = topk_ids.flatten().argsort(stable=True)
        plan = GroupPlan.of(topk_ids, self.gate_up.packed.shape[0], self.tile.block_m)
        inner = rows.new_empty(tokens * k, self.gate_up.packed.shape[1])
        launch_gemm(rows, self.gate_up, inner, self.tile, plan, order // k)
        outer = rows.new_empty(tokens * k, self.down.packed.shape[1])
        launch_gemm(
            silu_and_mul(inner), self.down, outer, self.tile, plan, torch.arange(tokens * k, device=order.device)
        )
        restored = torch.empty_like(outer)
        restored[order] = outer
        weighted = restored.view(tokens, k, -1).float() * topk_weights.float().unsqueeze(-1)
        return weighted.sum(1).to(hidden_states.dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of the last dimension times the second half."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


@dataclass(frozen=True)
class GroupPlan:
    """Which tile has which rows, when rows are sorted by expert and no tile has rows of two.

    Attributes:
        expert: for each tile its expert, int32; the number of experts where there is no tile.
        row: the first row of each tile.
        end: the row behind the last of the tile's expert.
    """

    expert: Tensor
    row: Tensor
    end: Tensor
    experts: int

    @staticmethod
    def of(topk_ids: Tensor, experts: int, block_m: int) -> GroupPlan:
        """A plan of as many tiles as any routing of so many rows may need."""
        device, rows = topk_ids.device, topk_ids.numel()
        ids = topk_ids.flatten().long()
        counts = torch.zeros(experts, dtype=torch.long, device=device).scatter_add_(0, ids, torch.ones_like(ids))
        tiles = (counts + block_m - 1) // block_m
        last_row, last_tile = counts.cumsum(0), tiles.cumsum(0)
        tile = torch.arange(min(rows, rows // block_m + experts), device=device)
        expert = torch.bucketize(tile, last_tile, right=True)
        known = expert.clamp(max=experts - 1)
        row = (last_row - counts)[known] + (tile - (last_tile - tiles)[known]) * block_m
        return GroupPlan(expert.int(), row.int(), last_row[known].int(), experts)


def launch_gemm(
    x: Tensor,
    weight: NVFP4Tensor,
    out: Tensor,
    tile: GemmTile,
    plan: GroupPlan | None = None,
    row_source: Tensor | None = None,
) -> None:
    """Out = x @ weight.T; with a plan, each sorted row by the weight of its expert."""
    (m, n), k = out.shape, x.shape[1]
    tiles = triton.cdiv(m, tile.block_m) if plan is None else plan.expert.numel()
    groups = (out,) * 4 if plan is None else (plan.expert, plan.row, plan.end, row_source)
    nvfp4_gemm_kernel[(triton.cdiv(n, tile.block_n), tiles)](
        *(x, weight.packed, weight.block_scale.view(torch.uint8), weight.tensor_scale, out, m, n, k, x.stride(0)),
        *groups,
        EXPERTS=0 if plan is None else plan.experts,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        EXACT=x.dtype == torch.float32,
        num_warps=tile.warps,
    )
