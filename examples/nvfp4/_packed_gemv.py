# SPDX-License-Identifier: Apache-2.0
"""One row in bfloat16 times NVFP4 weights, two products an instruction.

Shifts and masks that put one code into a float32 take longer than reading the weights. Here two codes of a word, j and
j + 4, become two float16 at once, and a packed multiply-add takes both:

    word       … 7 6 5 4 | 3 2 1 0        codes of 4 bits, s e e m
    float16    s 0 0 0 e e m 0 …          2**-14 times the E2M1 value, subnormals too

As in `_decode`, signs are moved once for two codes of a lane, here three bits up: eleven instructions for eight codes.

Sixteen elements of x, what one E4M3 scale belongs to, are multiplied by the power of two that brings the largest to the
top of float16's range. A product has 2 + 8 significant bits of float16's 11, so it is exact, or off by 2**-29 of the
largest; sixteen of them are summed in float16, eight in each half, and all else in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


# The PTX has no line ends: in the module that Inductor generates, a line end would break a string of the kernel in two.
def _beside_their_signs(word: str) -> str:
    """PTX for two words in which codes 0 and 2 of *word*, and 1 and 3, stand beside their signs as in a float16.

    lop3 with 0xE4 takes the bits under the mask from the word and the others from the rotated one.
    """
    return (
        f"shf.l.wrap.b32 signs, {word}, {word}, 3;"
        f"lop3.b32 even, {word}, signs, 0x07070707, 0xE4; lop3.b32 odd, {word}, signs, 0x70707070, 0xE4;"
    )


_TO_EXPONENT = (
    "shl.b32 value, even, 9",
    "shl.b32 value, odd, 5",
    "shl.b32 value, even, 1",
    "shf.r.wrap.b32 value, odd, odd, 3",
)


def _decode_and_multiply(index: int) -> str:
    """PTX for the codes *index* % 4 and that + 4 of word *index* // 4."""
    begin = _beside_their_signs(f"word{index // 4}") if index % 4 == 0 else ""
    product = f"fma.rn.f16x2 sum, value, ${2 + index}, sum" if index else f"mul.rn.f16x2 sum, value, ${2 + index}"
    return f"{begin} {_TO_EXPONENT[index % 4]}; and.b32 value, value, 0x8E008E00; {product};"


def _unpack(index: int) -> str:
    """PTX for elements 2 * *index* and the next, bfloat16, to float32."""
    return (
        f"shl.b32 bits, ${9 + index}, 16; mov.b32 x{2 * index}, bits;"
        f"and.b32 bits, ${9 + index}, 0xFFFF0000; mov.b32 x{2 * index + 1}, bits;"
    )


def _pack(index: int) -> str:
    """PTX for the elements that `_decode_and_multiply` wants at *index*."""
    low = index // 4 * 8 + index % 4
    return (
        f"mul.f32 x{low}, x{low}, factor; mul.f32 x{low + 4}, x{low + 4}, factor;"
        f"cvt.rn.f16x2.f32 ${index}, x{low + 4}, x{low};"
    )


# $0 float32: the sum; $1 int64: the codes of a block; $2 to $9 int32: its elements of x, two float16 each.
DOT_OF_A_BLOCK = tl.constexpr(
    "{ .reg .b32 word<2>, signs, even, odd, value, sum; .reg .b16 low, high; .reg .f32 first, second;"
    "mov.b64 {word0, word1}, $1;"
    + "".join(map(_decode_and_multiply, range(8)))
    + "mov.b32 {low, high}, sum; cvt.f32.f16 first, low; cvt.f32.f16 second, high; add.f32 $0, first, second; }"
)

# $0 to $7 int32: the elements of a block, two float16 each; $8 float32: what to multiply the dot product by;
# $9 to $16 int32: the elements as they lie in memory. The exponent of the largest becomes that of 2**15.
HALVES_OF_A_BLOCK = tl.constexpr(
    "{ .reg .f32 x<16>, largest, factor; .reg .b32 exponent, bits;"
    + "".join(map(_unpack, range(8)))
    + "abs.f32 largest, x0;"
    + "".join(f"abs.f32 factor, x{i}; max.f32 largest, largest, factor;" for i in range(1, 16))
    + "mov.b32 exponent, largest; shr.u32 exponent, exponent, 23; max.u32 exponent, exponent, 16;"
    + "sub.u32 bits, 269, exponent; shl.b32 bits, bits, 23; mov.b32 factor, bits;"
    + "".join(map(_pack, range(8)))
    + "sub.u32 bits, exponent, 1; shl.b32 bits, bits, 23; mov.b32 $8, bits; }"
)


@triton.jit
def nvfp4_packed_gemv_kernel(  # type: ignore[no-untyped-def]
    x, packed, block_scale, tensor_scale, out, n, blocks, stride_x, row_expert,
    SHARED_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out[r, n] for one row r and BLOCK_N columns; x and out in bfloat16, an even number of elements from row to row.

    A row of the weight has so many *blocks*. EVEN says that BLOCKS divides them. With SHARED_ROWS, row r of out is row
    r // SHARED_ROWS of x times the weight of expert row_expert[r].
    """
    row = tl.program_id(1).to(tl.int64)
    expert = row * 0
    source = row
    if SHARED_ROWS > 0:
        expert = tl.load(row_expert + row).to(tl.int64)
        source = row // SHARED_ROWS
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = (expert * n + tl.minimum(column, n - 1))[:, None] * blocks
    codes_of_blocks = packed.to(tl.pointer_type(tl.int64))
    pairs_of_x = x.to(tl.pointer_type(tl.int32)) + source * (stride_x // 2)
    total = tl.zeros([BLOCK_N, BLOCKS], tl.float32)
    for first in tl.range(0, blocks, BLOCKS, num_stages=STAGES):
        # Else 16 neighbouring scales would decide which thread has which block, and threads would share few rows.
        block = tl.max_contiguous(first + tl.arange(0, BLOCKS), 2)
        if EVEN:
            codes = tl.load(codes_of_blocks + line + block[None, :])
            scale = tl.load(block_scale + line + block[None, :])
        else:
            inside = (block < blocks)[None, :]
            codes = tl.load(codes_of_blocks + line + block[None, :], inside, other=0)
            scale = tl.load(block_scale + line + block[None, :], inside, other=0)
        here = (block < blocks)[:, None]
        pairs = tl.load(pairs_of_x + (block * 8)[:, None] + tl.arange(0, 8)[None, :], here, other=0)
        halves = tl.reshape(pairs, [BLOCKS, 2, 2, 2])
        even, odd = tl.split(halves)
        x04, x26 = tl.split(even)
        x15, x37 = tl.split(odd)
        x0, x4 = tl.split(x04)
        x2, x6 = tl.split(x26)
        x1, x5 = tl.split(x15)
        x3, x7 = tl.split(x37)
        x0, x1, x2, x3, x4, x5, x6, x7, unit = tl.inline_asm_elementwise(
            HALVES_OF_A_BLOCK,
            "=r,=r,=r,=r,=r,=r,=r,=r,=f,r,r,r,r,r,r,r,r",
            [x0, x1, x2, x3, x4, x5, x6, x7],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.float32),
            is_pure=True,
            pack=1,
        )
        dots = tl.inline_asm_elementwise(
            DOT_OF_A_BLOCK,
            "=f,l,r,r,r,r,r,r,r,r",
            [codes, x0[None], x1[None], x2[None], x3[None], x4[None], x5[None], x6[None], x7[None]],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        scale = (scale.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
        total += dots * (scale * unit[None])
    result = tl.sum(total, 1) * tl.load(tensor_scale + expert)
    tl.store(out + row * n + column, result.to(out.dtype.element_ty), column < n)
