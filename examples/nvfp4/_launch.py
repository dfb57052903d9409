# SPDX-License-Identifier: Apache-2.0
"""Which kernel multiplies x by a weight, and its launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from ._copy import nvfp4_copy_kernel
from ._gemm import BY_ROW, NOT_ROUTED, SORTED, nvfp4_gemm_kernel
from ._patches import COLUMNS, FEATURES
from ._tilings import COPIED_FROM, Tile, tile_for, tile_of_accelerator


if TYPE_CHECKING:
    from ._runners import NVFP4Weight


PATCHES_A_PROGRAM = 4
"""Of a copy."""

HOPPER = 9
"""The first number of its compute capability."""


@dataclass(frozen=True)
class Rows:
    """The rows of a result, and where the kernel finds the expert and the row of x for each.

    Attributes:
        count: how many there are.
        tiles: how many tiles they are in.
        how: NOT_ROUTED, BY_ROW or SORTED of `_gemm`.
        routing: what the kernel reads of it.
        shared: so many rows in a row are one row of x.
    """

    count: int
    tiles: int
    how: int
    routing: Tensor | None = None
    shared: int = 1

    @staticmethod
    def of(x: Tensor, tile: Tile) -> Rows:
        """Those of x, by one weight."""
        return Rows(x.shape[0], triton.cdiv(x.shape[0], tile.block_m), NOT_ROUTED.value)

    @staticmethod
    def by_row(expert: Tensor, shared: int) -> Rows:
        """Row r is row r // *shared* of x by expert[r]; each is a tile of its own."""
        return Rows(expert.numel(), expert.numel(), BY_ROW.value, expert, shared)

    @staticmethod
    def sorted(expert: Tensor, row: Tensor, end: Tensor, source: Tensor) -> Rows:
        """Rows in order of their experts, in tiles of one expert each.

        Args:
            expert: for each tile its expert.
            row: the first row of each tile.
            end: the row behind the last of the tile's expert; not above *row* for a place without a tile.
            source: for each row its row of x.
        """
        return Rows(source.numel(), expert.numel(), SORTED.value, torch.cat([expert, row, end, source]))


def multiply(x: Tensor, weight: NVFP4Weight) -> Tensor:
    """X [rows, k] times weight.T by the kernel for so many rows."""
    rows = x.shape[0]
    if rows == 0:
        return x.new_empty(0, weight.columns)
    tile = tile_of_accelerator(rows, weight.columns) if accelerator_loads(x) else None
    if tile is None and rows >= COPIED_FROM:
        return functional.linear(x, decoded_copy(weight, x.dtype))
    tile = tile or tile_for(rows, weight.columns, x.dtype)
    return launch(x, weight, tile, Rows.of(x, tile))


def accelerator_loads(x: Tensor) -> bool:
    """Whether the tensor memory accelerator of a GPU can load tiles of x [rows, k] for the kernel.

    That is in 16 bits, from rows that begin at multiples of 16 bytes, on Hopper: the kernel waits for products in the
    assembly of that generation.
    """
    if not x.is_cuda or x.element_size() != 2:
        return False
    traced = type(x) is not Tensor
    if traced and inductor_config.static_launch_user_defined_triton_kernels:
        return False  # up to torch 2.14, Inductor's own launcher fails for tensor descriptors
    # What stands for a Tensor while a graph is traced has no address, but a place in its storage.
    begin = x.storage_offset() * x.element_size() if traced else x.data_ptr()
    if begin % 16 or x.stride(0) * x.element_size() % 16:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch // 10 == HOPPER)


def launch(x: Tensor, weight: NVFP4Weight, tile: Tile, rows: Rows) -> Tensor:
    """*rows* of x times the weight, or each times that of its expert: [rows, columns].

    Raises:
        ValueError: the codes or the scales of the weight are not in one piece, or x has other features than it.
    """
    if x.shape[1] != weight.features:
        raise ValueError(f"x has {x.shape[1]} features, but the weight is for {weight.features}.")
    if not (weight.codes.is_contiguous() and weight.scales.is_contiguous()):
        raise ValueError(
            f"The codes of a weight have strides {weight.codes.stride()} and its scales {weight.scales.stride()}. The "
            "kernel reads them one after the other. Use .clone(memory_format=torch.contiguous_format)."
        )
    out = x.new_empty(rows.count, weight.columns)
    tiles = TensorDescriptor.from_tensor(x, [tile.block_m, tile.patches * FEATURES]) if tile.tiled else x
    nvfp4_gemm_kernel[rows.tiles, triton.cdiv(weight.columns, tile.block_n)](
        *(tiles, weight.codes, weight.scales, weight.tensor_scale, out),
        *(rows.count, x.stride(0)),
        # What the kernel does not read is some Tensor.
        *(out if rows.routing is None else rows.routing, rows.shared),
        N=weight.columns,
        K=weight.features,
        ROUTING=rows.how,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        PARTS=tile.parts,
        PATCHES=tile.patches,
        WARPS=tile.warps,
        STAGES=tile.stages,
        TILED=tile.tiled,
        # For float32 Triton chooses another layout than the assembly needs.
        PACKED=x.is_cuda and x.dtype != torch.float32,
        num_warps=tile.warps,
    )
    return out


def decoded_copy(weight: NVFP4Weight, dtype: torch.dtype) -> Tensor:
    """The weight [columns, k] as a tensor of *dtype*."""
    columns, k, patches = weight.columns, weight.features, weight.codes.shape[-2]
    out = torch.empty(columns, k, dtype=dtype, device=weight.codes.device)
    nvfp4_copy_kernel[triton.cdiv(patches, PATCHES_A_PROGRAM), triton.cdiv(columns, COLUMNS)](
        weight.codes, weight.scales, weight.tensor_scale, out, columns, k, patches, PATCHES=PATCHES_A_PROGRAM
    )
    return out
