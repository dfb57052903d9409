# SPDX-License-Identifier: Apache-2.0
"""A few rows of x times NVFP4 weights on tensor cores; the rows stay in registers while columns of the weight go by."""

from __future__ import annotations

import triton
import triton.language as tl

from ._decode import LEFT_TO_SCALE, decoded, pairs_of
from ._gemm import quarters_of, words_and_scales


@triton.jit
def nvfp4_few_rows_kernel(  # type: ignore[no-untyped-def]
    x, packed, block_scale, tensor_scale, out, m, n, words, blocks, stride_x, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """out[s, m, n]: part s of k, PARTS * BLOCK_K elements of it, for all rows and so many *columns*, BLOCK_N at a time."""
    WORDS: tl.constexpr = BLOCK_K // 8
    first_word = tl.program_id(1) * (PARTS * WORDS)
    strip = tl.arange(0, PARTS * BLOCK_M)
    row = strip % BLOCK_M
    at_x = x + row.to(tl.int64) * stride_x
    x0, x1, x2, x3 = quarters_of(at_x, (row < m)[:, None], first_word + strip // BLOCK_M * WORDS, words, WORDS)
    x0 = operand(x0, PARTS)
    x1 = operand(x1, PARTS)
    x2 = operand(x2, PARTS)
    x3 = operand(x3, PARTS)

    line = tl.arange(0, PARTS * BLOCK_N)
    line_word = first_word + line // BLOCK_N * WORDS
    first_column = tl.program_id(0) * columns
    scale = tl.load(tensor_scale) * LEFT_TO_SCALE
    for step in tl.range(0, columns, BLOCK_N, num_stages=STAGES):
        at_line = tl.minimum(first_column + step + line % BLOCK_N, n - 1)
        at_words = packed.to(tl.pointer_type(tl.int32)) + at_line * words
        codes, scales = words_and_scales(at_words, block_scale + at_line * blocks, line_word, words, WORDS, EVEN, PACKED)
        w0, w1, w2, w3 = pairs_of(codes)
        total = tl.zeros([PARTS, BLOCK_N, BLOCK_M], tl.float32)
        total = accumulated_part(decoded(w0, scales, PACKED), x0, total, PARTS)
        total = accumulated_part(decoded(w1, scales, PACKED), x1, total, PARTS)
        total = accumulated_part(decoded(w2, scales, PACKED), x2, total, PARTS)
        total = accumulated_part(decoded(w3, scales, PACKED), x3, total, PARTS)
        result = tl.sum(total, 0) * scale
        column = first_column + step + tl.arange(0, BLOCK_N)
        result_row = tl.arange(0, BLOCK_M)
        at_out = out + (tl.program_id(1) * m + result_row)[None, :] * n + column[:, None]
        tl.store(at_out, result.to(out.dtype.element_ty), (result_row < m)[None, :] & (column < n)[:, None])


@triton.jit
def operand(x, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[PARTS, K, rows] of [PARTS * rows, K]."""
    return tl.trans(tl.reshape(x, [PARTS, x.shape[0] // PARTS, x.shape[1]]), 0, 2, 1)


@triton.jit
def accumulated_part(weight, right, total, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Total + weight @ right for each of PARTS parts."""
    weight = tl.reshape(weight.to(right.dtype), [PARTS, weight.shape[0] // PARTS, weight.shape[1]])
    return tl.dot(weight, right, total, input_precision="ieee")


@triton.jit
def nvfp4_sum_kernel(parts, out, elements, PARTS: tl.constexpr, ELEMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[elements], the sum of parts[PARTS, elements]."""
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    total = tl.zeros([ELEMENTS], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * elements + at, at < elements)
    tl.store(out + at, total.to(out.dtype.element_ty), at < elements)
