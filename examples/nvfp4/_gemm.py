# SPDX-License-Identifier: Apache-2.0
"""x @ weight.T on tensor cores, the weight decoded in registers on its way there; also grouped by expert."""

from __future__ import annotations

import triton
import triton.language as tl

from ._decode import LEFT_TO_SCALE, decoded, pairs_of, scales_of


@triton.jit
def nvfp4_gemm_kernel(  # type: ignore[no-untyped-def]
    x, packed, block_scale, tensor_scale, out, m, n, words, blocks, stride_x,
    tile_expert, tile_row, tile_end, row_source,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """out[m, n] for BLOCK_M rows and BLOCK_N columns, in the type of x: float32, float16 or bfloat16.

    A row of the weight has so many *words* of eight codes and so many *blocks* with a scale. The weight is the left
    operand, as 8 rows of x then take the least work that tensor cores can do. Dots are over codes i and 4 + i of the
    words, so x is taken apart into the elements 4 j + i.

    Each of PARTS parts of k has warps of its own, and their sums are added at the end: a few rows give too few tiles
    to occupy a GPU. EVEN says that BLOCK_K * PARTS divides k.

    With EXPERTS, row tile t has the sorted rows tile_row[t] to tile_end[t], all of expert tile_expert[t], and sorted
    row r is row row_source[r] of x. A tile whose expert is EXPERTS does nothing.
    """
    WORDS: tl.constexpr = BLOCK_K // 8
    tile = tl.program_id(0)
    expert = (tile * 0).to(tl.int64)
    first, end = tile * BLOCK_M, m
    if EXPERTS > 0:
        expert = tl.load(tile_expert + tile).to(tl.int64)
        if expert >= EXPERTS:
            return
        first, end = tl.load(tile_row + tile), tl.load(tile_end + tile)

    first_column = tl.program_id(1) * BLOCK_N
    span = tl.cdiv(words, PARTS * WORDS) * WORDS
    line = tl.arange(0, PARTS * BLOCK_N)
    # A column behind the last is not stored; it reads the last.
    at_line = expert * n + tl.minimum(first_column + line % BLOCK_N, n - 1)
    line_word = (line // BLOCK_N) * span
    at_words = packed.to(tl.pointer_type(tl.int32)) + at_line * words
    at_scales = block_scale + at_line * blocks

    strip = tl.arange(0, PARTS * BLOCK_M)
    row = first + strip % BLOCK_M
    in_row = (row < end)[:, None]
    source = row.to(tl.int64)
    if EXPERTS > 0:
        source = tl.load(row_source + row, row < end, other=0).to(tl.int64)
    strip_word = (strip // BLOCK_M) * span
    at_x = x + source * stride_x

    # With one part the product has two dimensions: only then does it get the tensor cores of a warp group.
    shape: tl.constexpr = (PARTS, BLOCK_N, BLOCK_M) if PARTS > 1 else (BLOCK_N, BLOCK_M)
    total = tl.zeros(shape, tl.float32)
    for start in tl.range(0, span, WORDS, num_stages=STAGES):
        codes, scales = words_and_scales(at_words, at_scales, line_word + start, words, WORDS, EVEN, PACKED)
        w0, w1, w2, w3 = pairs_of(codes)
        x0, x1, x2, x3 = quarters_of(at_x, in_row, strip_word + start, words, WORDS, EVEN)
        total = accumulated(decoded(w0, scales, PACKED), x0, total, PARTS)
        total = accumulated(decoded(w1, scales, PACKED), x1, total, PARTS)
        total = accumulated(decoded(w2, scales, PACKED), x2, total, PARTS)
        total = accumulated(decoded(w3, scales, PACKED), x3, total, PARTS)

    if PARTS > 1:
        total = tl.sum(total, 0)
    total *= tl.load(tensor_scale + expert) * LEFT_TO_SCALE
    column = first_column + tl.arange(0, BLOCK_N)
    row = first + tl.arange(0, BLOCK_M)
    at_out = out + row.to(tl.int64)[None, :] * n + column[:, None]
    tl.store(at_out, total.to(out.dtype.element_ty), (row < end)[None, :] & (column < n)[:, None])


@triton.jit
def words_and_scales(  # type: ignore[no-untyped-def]
    at_words, at_scales, first, words,
    WORDS: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Of each line WORDS words from its *first* on, and for each word the scale of its block as of `scales_of`."""
    word = first[:, None] + tl.arange(0, WORDS)[None, :]
    block = (first // 2)[:, None] + tl.arange(0, WORDS // 2)[None, :]
    if EVEN:
        codes = tl.load(at_words[:, None] + word)
        scale = tl.load(at_scales[:, None] + block)
    else:
        codes = tl.load(at_words[:, None] + word, word < words, other=0)
        scale = tl.load(at_scales[:, None] + block, block < words // 2, other=0)
    scales = scales_of(scale, PACKED)
    lines: tl.constexpr = first.shape[0]
    return codes, tl.reshape(tl.broadcast_to(scales[:, :, None], [lines, WORDS // 2, 2]), [lines, WORDS])


@triton.jit
def quarters_of(  # type: ignore[no-untyped-def]
    at_x, in_row, first, words,
    WORDS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The elements 4 j, 4 j + 1, 4 j + 2 and 4 j + 3 of x behind 8 * *first*, each [rows, 2 WORDS]; 0 where none is."""
    element = (first * 8)[:, None] + tl.arange(0, 8 * WORDS)[None, :]
    inside = in_row if EVEN else in_row & (element < words * 8)
    rows = tl.load(at_x[:, None] + element, inside, other=0.0)
    even, odd = tl.split(tl.reshape(rows, [first.shape[0], 2 * WORDS, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def accumulated(weight, x, total, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Total + weight @ x.T, for each of PARTS parts, which lie one below the other."""
    weight = weight.to(x.dtype)
    if PARTS > 1:
        weight = tl.reshape(weight, [PARTS, weight.shape[0] // PARTS, weight.shape[1]])
        right = tl.trans(tl.reshape(x, [PARTS, x.shape[0] // PARTS, x.shape[1]]), 0, 2, 1)
    else:
        right = tl.trans(x)
    # float32 stays float32; the precision means nothing to types of 16 bits.
    return tl.dot(weight, right, total, input_precision="ieee")
