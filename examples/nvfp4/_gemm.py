# SPDX-License-Identifier: Apache-2.0
"""x @ weight.T on tensor cores, the weight decoded in registers on its way there; also by experts."""

from __future__ import annotations

import triton
import triton.language as tl

from ._decode import LEFT_TO_SCALE, decoded


NOT_ROUTED, BY_ROW, SORTED = (tl.constexpr(i) for i in range(3))
"""All rows by one weight; row r by the expert routing[r]; rows sorted by expert, in tiles of one expert each."""


@triton.jit
def nvfp4_gemm_kernel(  # type: ignore[no-untyped-def]
    x, codes, scales, tensor_scale, out, m, n, k, patches, stride_x,
    routing, shared_rows,
    ROUTING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, PATCHES: tl.constexpr,
    WARPS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """out[m, n] for BLOCK_M rows and BLOCK_N columns, in the type of x: float32, float16 or bfloat16.

    A strip of 16 columns has so many *patches*. The weight is the left operand: its values are decoded in the registers
    in which tensor cores take a left operand, and 8 rows of x are the least that a right one has. A warp reads and
    decodes patches of its own. Either all WARPS have the same part of k, and lie beside each other along the columns,
    or each has one of PARTS parts, whose sums are added at the end: a few rows give too few tiles to occupy a GPU.

    A step takes PATCHES patches of each strip. EVEN says that steps divide k, and patches too.

    By ROUTING: with BY_ROW, row r is row r // *shared_rows* of x, by expert routing[r]. With SORTED, routing has four
    parts: for each row tile its expert, its first row, and the row behind its last; then for each row its row of x. A
    tile whose first row is not below its end does nothing.
    """
    BESIDE: tl.constexpr = WARPS // PARTS
    STRIPS: tl.constexpr = BLOCK_N // (16 * BESIDE)
    # Not in a function of its own: torch would take a pointer that it is given for one that the kernel writes to.
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    expert, first, end = (tile * 0).to(tl.int64), tile * BLOCK_M, m
    if ROUTING != NOT_ROUTED:
        expert = tl.load(routing + tile).to(tl.int64)
    if ROUTING == BY_ROW:
        first, end = tile, tile + 1
    elif ROUTING == SORTED:
        first, end = tl.load(routing + tiles + tile), tl.load(routing + 2 * tiles + tile)
        if first >= end:
            return
    # Read here or after the loop, it takes the same time.
    scale = tl.load(tensor_scale + expert)
    row = first + tl.arange(0, BLOCK_M)
    inside = row < end
    at_x = x + row_of_x(row, inside, routing + 3 * tiles, shared_rows, ROUTING) * stride_x

    strips, span = tl.cdiv(n, 16), tl.cdiv(patches, PARTS * PATCHES) * PATCHES
    warp = tl.arange(0, WARPS)[:, None, None]
    strip = tl.program_id(1) * (STRIPS * BESIDE) + tl.arange(0, STRIPS)[None, :, None] * BESIDE + warp % BESIDE
    # A strip behind the last is not stored; it reads the last.
    begin = warp // BESIDE * span
    patch = (expert * strips + tl.minimum(strip, strips - 1)) * patches + begin
    word, ahead = tl.arange(0, PATCHES * 16)[None, None, :], tl.arange(0, PATCHES)[None, None, :, None]
    at_scales = scales + patch * 16 + word
    at_codes = codes + (patch[:, :, :, None] + ahead) * 128 + tl.arange(0, 128)[None, None, None, :]

    # With one part the product has two dimensions: only then does it get the tensor cores of a warp group.
    shape: tl.constexpr = (PARTS, BLOCK_N, BLOCK_M) if PARTS > 1 else (BLOCK_N, BLOCK_M)
    total = tl.zeros(shape, tl.float32)
    element = tl.arange(0, 64 * PATCHES)
    if PARTS > 1:
        element = (tl.arange(0, PARTS) * (span * 64))[:, None, None] + element[None, :, None]
        at_x, in_x = at_x[None, None, :], inside[None, None, :]
    else:
        element = element[:, None]
        at_x, in_x = at_x[None, :], inside[None, :]

    for start in tl.range(0, span, PATCHES, num_stages=STAGES):
        if EVEN:
            words = tl.load(at_codes + start * 128)
            words_of_scales = tl.load(at_scales + start * 16)
            right = tl.load(at_x + element + start * 64, in_x, other=0.0)
        else:
            words = tl.load(at_codes + start * 128, begin[:, :, :, None] + ahead + start < patches, other=0)
            words_of_scales = tl.load(at_scales + start * 16, begin + word // 16 + start < patches, other=0)
            right = tl.load(at_x + element + start * 64, in_x & (element + start * 64 < k), other=0.0)
        values = decoded(words, words_of_scales, PACKED)
        left = left_operand(values, x.dtype.element_ty, PARTS, BESIDE, STRIPS, PATCHES)
        # float32 stays float32; the precision means nothing to types of 16 bits.
        total = waited_for(tl.dot(left, right, total, input_precision="ieee"), PARTS, PACKED)

    if PARTS > 1:
        total = tl.sum(total, 0)
    total *= scale * left_to_scale(x.dtype.element_ty)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at_out = out + row.to(tl.int64)[None, :] * n + column[:, None]
    tl.store(at_out, total.to(out.dtype.element_ty), inside[None, :] & (column < n)[:, None])


@triton.jit
def row_of_x(row, inside, row_source, shared_rows, ROUTING: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row of x for each row of the result, int64."""
    source = row.to(tl.int64)
    if ROUTING == BY_ROW:
        source = source // shared_rows
    elif ROUTING == SORTED:
        source = tl.load(row_source + row, inside, other=0).to(tl.int64)
    return source


@triton.jit
def left_to_scale(dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a product of `left_operand` is to be multiplied by."""
    return LEFT_TO_SCALE if dtype == tl.bfloat16 else 1.0


@triton.jit
def left_operand(  # type: ignore[no-untyped-def]
    values, dtype: tl.constexpr,
    PARTS: tl.constexpr, BESIDE: tl.constexpr, STRIPS: tl.constexpr, PATCHES: tl.constexpr,
):  # fmt: skip
    """What `decoded` gives, in *dtype*, as [columns, features], or if there are PARTS that for each of them.

    Only the names of dimensions change: every value stays in the register where it was decoded.
    """
    if dtype != tl.bfloat16:
        # float16 has no room for numbers that small.
        values = values.to(tl.float32) * LEFT_TO_SCALE
    values = values.to(dtype)
    # part, beside, strip, patch, g, t, block, half of its features, half of the columns, one of two features
    values = tl.reshape(values, [PARTS, BESIDE, STRIPS, PATCHES, 8, 4, 4, 2, 2, 2])
    values = tl.permute(values, (0, 2, 1, 8, 4, 3, 6, 7, 5, 9))
    if PARTS > 1:
        values = tl.reshape(values, [PARTS, STRIPS * BESIDE * 16, PATCHES * 64])
    else:
        values = tl.reshape(values, [STRIPS * BESIDE * 16, PATCHES * 64])
    return values


@triton.jit
def waited_for(total, PARTS: tl.constexpr, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same, with one part once it is there.

    Triton 3.6 lets the products of a warp group run on while the next step decodes into the registers that they read;
    on an H200, results were wrong. A value that assembly reads has to be complete.
    """
    if PARTS == 1 and PACKED:
        total = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1)
    return total
