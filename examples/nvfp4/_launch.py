# SPDX-License-Identifier: Apache-2.0
"""Which kernel multiplies x by a weight, and its launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor
from torch.nn import functional

from ._copy import nvfp4_copy_kernel
from ._gemm import nvfp4_gemm_kernel
from ._packed_gemv import nvfp4_packed_gemv_kernel
from ._tilings import COPIED_FROM, VECTOR, VECTOR_ROWS, GemmTile, GemvTile, gemm_tile


if TYPE_CHECKING:
    from ._runners import NVFP4Weight


WORDS_A_PROGRAM = 512


@dataclass(frozen=True)
class Groups:
    """Which tile has which rows, when no tile has rows of two experts.

    Attributes:
        expert: for each tile its expert; the number of experts for a place without a tile.
        row: the first row of each tile, rows in order of their experts.
        end: the row behind the last of the tile's expert.
        source: for each row in that order, its row of x.
        experts: how many experts there are.
    """

    expert: Tensor
    row: Tensor
    end: Tensor
    source: Tensor
    experts: int


def multiply(x: Tensor, weight: NVFP4Weight) -> Tensor:
    """X [rows, k] times weight.T by the kernel for so many rows."""
    rows, columns = x.shape[0], weight.columns
    if rows == 0:
        return x.new_empty(0, columns)
    if rows >= COPIED_FROM:
        return functional.linear(x, decoded_copy(weight, x.dtype))
    if rows <= VECTOR_ROWS and can_be_read_in_pairs(x):
        return launch_gemv(x, weight, VECTOR.for_columns(columns))
    return launch_gemm(x, weight, gemm_tile(rows, columns))


def multiply_rows_of_experts(x: Tensor, weight: NVFP4Weight, expert: Tensor, rows_of_one: int) -> Tensor:
    """Row r of the result is row r // *rows_of_one* of x times the weight of expert[r]; each row reads its weight."""
    if can_be_read_in_pairs(x):
        return launch_gemv(x, weight, VECTOR.for_columns(weight.columns * expert.numel()), expert, rows_of_one)
    row = torch.arange(expert.numel(), device=x.device)
    groups = Groups(expert, row, row + 1, row // rows_of_one, weight.packed.shape[0])
    return launch_gemm(x, weight, gemm_tile(1, weight.columns * expert.numel()), groups)


def can_be_read_in_pairs(x: Tensor) -> bool:
    """Whether the kernel with PTX in it takes *x*: pairs of elements lie at even places, on a GPU."""
    return x.is_cuda and x.dtype == torch.bfloat16 and x.stride(0) % 2 == 0 and x.storage_offset() % 2 == 0


def launch_gemv(
    x: Tensor, weight: NVFP4Weight, tile: GemvTile, expert: Tensor | None = None, rows_of_one: int = 0
) -> Tensor:
    """Each row of x, or of x and an expert, on its own."""
    rows, columns, blocks = x.shape[0] if expert is None else expert.numel(), weight.columns, x.shape[1] // 16
    out = x.new_empty(rows, columns)
    nvfp4_packed_gemv_kernel[triton.cdiv(columns, tile.block_n), rows](
        *(x, weight.packed, weight.block_scale, weight.tensor_scale, out, columns, blocks, x.stride(0)),
        out if expert is None else expert,
        SHARED_ROWS=rows_of_one,
        BLOCK_N=tile.block_n,
        BLOCKS=tile.blocks,
        STAGES=tile.stages,
        EVEN=blocks % tile.blocks == 0,
        num_warps=tile.warps,
    )
    return out


def launch_gemm(x: Tensor, weight: NVFP4Weight, tile: GemmTile, groups: Groups | None = None) -> Tensor:
    """Tiles of rows of x; with *groups*, each by the weight of its expert, in the order of the groups."""
    rows, columns, k = x.shape[0] if groups is None else groups.source.numel(), weight.columns, x.shape[1]
    out = x.new_empty(rows, columns)
    tiles = triton.cdiv(rows, tile.block_m) if groups is None else groups.expert.numel()
    nvfp4_gemm_kernel[tiles, triton.cdiv(columns, tile.block_n)](
        *(x, weight.packed, weight.block_scale, weight.tensor_scale, out, rows, columns, k // 8, k // 16, x.stride(0)),
        *((out,) * 4 if groups is None else (groups.expert, groups.row, groups.end, groups.source)),
        EXPERTS=0 if groups is None else groups.experts,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        PARTS=tile.parts,
        STAGES=tile.stages,
        EVEN=k % (tile.block_k * tile.parts) == 0,
        PACKED=x.is_cuda,
        num_warps=tile.warps,
    )
    return out


def decoded_copy(weight: NVFP4Weight, dtype: torch.dtype) -> Tensor:
    """The weight [columns, k] as a tensor of *dtype*."""
    columns, half = weight.packed.shape
    out = torch.empty(columns, half * 2, dtype=dtype, device=weight.packed.device)
    words = columns * (half // 4)
    nvfp4_copy_kernel[(triton.cdiv(words, WORDS_A_PROGRAM),)](
        weight.packed, weight.block_scale, weight.tensor_scale, out, words, WORDS=WORDS_A_PROGRAM
    )
    return out
