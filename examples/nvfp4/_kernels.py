# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that decode NVFP4 weights inside the product.

Both put the bits of a code where float32 has them and mend the exponent with one factor:

    code      s e e m                  E4M3 scale   0 e e e e m m m
    float32   s 0 0 0 0 0 0 e e m 0 …  float32      0 0 0 0 0 e e e e m m m 0 …

The first is 2**-126 times the E2M1 value and the second 2**-120 times the E4M3 value, subnormals too.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nvfp4_gemv_kernel(  # type: ignore[no-untyped-def]
    x, packed, block_scale, tensor_scale, out, n, k, stride_x,
    BLOCK_N: tl.constexpr, BLOCK_WORDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[m, n] for one row m and BLOCK_N columns; a word is 8 codes in an int32."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    words, blocks = k // 8, k // 16
    at_word = tl.arange(0, BLOCK_WORDS)
    at_block = tl.arange(0, BLOCK_WORDS // 2)
    in_column = (column < n)[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_WORDS // 2], tl.float32)
    for first in tl.range(0, words, BLOCK_WORDS, num_stages=STAGES):
        word = first + at_word
        inside = in_column & (word < words)[None, :]
        codes = tl.load(packed + column.to(tl.int64)[:, None] * words + word[None, :], inside, other=0)
        part = tl.zeros([BLOCK_N, BLOCK_WORDS], tl.float32)
        for i in tl.static_range(8):
            # The sign fills the upper bits when the code is shifted down; the mask keeps one of them.
            bits = ((codes << (28 - 4 * i)) >> 6) & -0x7E400000
            value = bits.to(tl.float32, bitcast=True)
            # 2**64 keeps the products far from subnormal numbers.
            factor = tl.load(x + row * stride_x + word * 8 + i, word < words, other=0.0).to(tl.float32)
            part += value * (factor * 1.8446744073709552e19)[None, :]
        sums = tl.sum(tl.reshape(part, [BLOCK_N, BLOCK_WORDS // 2, 2]), 2)
        block = first // 2 + at_block
        scale = tl.load(
            block_scale + column.to(tl.int64)[:, None] * blocks + block[None, :],
            in_column & (block < blocks)[None, :],
            other=0,
        )
        scale = (scale.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
        total += sums * scale
    result = tl.sum(total, 1) * 4.611686018427388e18 * tl.load(tensor_scale)  # 2**62 is left of 2**(126 - 64)
    tl.store(out + row * n + column, result.to(out.dtype.element_ty), column < n)


@triton.jit
def decode_nibbles(codes):  # type: ignore[no-untyped-def]
    """E2M1 values, float32, of codes in the low nibbles of an int32 tensor."""
    bits = ((codes << 28) >> 6) & -0x7E400000
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def nvfp4_gemm_kernel(  # type: ignore[no-untyped-def]
    x, packed, block_scale, tensor_scale, out, m, n, k, stride_x, tile_expert, tile_row, tile_end, row_source,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One tile of x @ weight.T, for float32 x with EXACT, else in the 16-bit type of x.

    With EXPERTS, tile t has the sorted rows tile_row[t] to tile_end[t], all of expert tile_expert[t], and sorted row
    r is row row_source[r] of x. An expert number of EXPERTS means that there is no such tile.
    """
    tile = tl.program_id(1)
    expert = (tile * 0).to(tl.int64)
    first, end = tile * BLOCK_M, m
    if EXPERTS > 0:
        expert = tl.load(tile_expert + tile).to(tl.int64)
        if expert >= EXPERTS:
            return
        first, end = tl.load(tile_row + tile), tl.load(tile_end + tile)
    row = first + tl.arange(0, BLOCK_M)
    in_row = row < end
    source = row.to(tl.int64)
    if EXPERTS > 0:
        source = tl.load(row_source + row, in_row, other=0).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_column = column < n
    line = expert * n + column
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        byte = start // 2 + tl.arange(0, BLOCK_K // 2)
        in_byte = byte < k // 2
        inside = in_byte[:, None] & in_column[None, :]
        pair = tl.load(packed + line[None, :] * (k // 2) + byte[:, None], inside, other=0).to(tl.int32)
        scale = tl.load(block_scale + line[None, :] * (k // 16) + (byte // 8)[:, None], inside, other=0).to(tl.int32)
        scale = (scale << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
        at = x + source[:, None] * stride_x + byte[None, :] * 2
        there = in_row[:, None] & in_byte[None, :]
        even, odd = tl.load(at, there, other=0.0), tl.load(at + 1, there, other=0.0)
        # The product of a value and its scale has 6 bits, so it is exact in bfloat16 too.
        low = (decode_nibbles(pair) * scale).to(x.dtype.element_ty)
        high = (decode_nibbles(pair >> 4) * scale).to(x.dtype.element_ty)
        precision: tl.constexpr = "ieee" if EXACT else "tf32"
        total = tl.dot(even, low, total, input_precision=precision)
        total = tl.dot(odd, high, total, input_precision=precision)
    total *= tl.load(tensor_scale + expert)
    at = out + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), in_row[:, None] & in_column[None, :])
