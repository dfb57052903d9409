# SPDX-License-Identifier: Apache-2.0
"""Words of a patch to the values of a left operand of tensor cores, in registers.

`_patches` says which bits are where. A code becomes bfloat16 by a rotation and a mask, 2**-126 times its value. A scale
gets the exponent 224 + e, which makes it 2**107 times its value; a rotation and two masks do this for four. The product
of both has six significant bits of bfloat16's eight, so it is exact. It is 2**-19 times what it stands for, which
leaves room enough in float32, where products with x are summed.
"""

from __future__ import annotations

import triton
import triton.language as tl


LEFT_TO_SCALE = tl.constexpr(524288.0)
"""What the values of `decoded` are to be multiplied by."""

# $0 to $7: the registers of two words, two bfloat16 each; $8 to $23: the words, each as often as it has values; $24 to
# $39: the word of their scales. The PTX has no line ends: in the module that Inductor generates, a line end would break
# a string of the kernel in two.
_TO_PLACES = (
    "and.b32 value, {word}, 0x81C081C0;",
    "shf.r.wrap.b32 value, {word}, {word}, 4; and.b32 value, value, 0x81C081C0;",
    "shl.b32 value, {word}, 6; and.b32 value, value, 0x81C081C0;",
    (
        "shf.r.wrap.b32 value, {word}, {word}, 6; and.b32 value, value, 0x81808180;"
        "shl.b32 lowest, {word}, 2; lop3.b32 value, lowest, 0x00400040, value, 0xEA;"
    ),
)
_SCALES = (
    "shf.r.wrap.b32 odd, $24, $24, 8;"
    "lop3.b32 even, $24, 0x0FF00FF0, 0x70007000, 0xEA; lop3.b32 odd, odd, 0x0FF00FF0, 0x70007000, 0xEA;"
    "mov.b32 {low0, high0}, even; mov.b32 {low1, high1}, odd;"
    "mov.b32 scale0, {low0, low0}; mov.b32 scale1, {low1, low1};"
    "mov.b32 scale2, {high0, high0}; mov.b32 scale3, {high1, high1};"
)


def _registers_of(word: int) -> str:
    """PTX for the four registers of word 0 or 1."""
    return "".join(
        to_place.format(word=f"${8 + 8 * word}")
        + f"mul.rn.bf16x2 ${4 * word + register}, value, scale{2 * word + register % 2};"
        for register, to_place in enumerate(_TO_PLACES)
    )


DECODE = tl.constexpr(
    "{ .reg .b32 value, lowest, even, odd, scale<4>; .reg .b16 low<2>, high<2>;"
    f"{_SCALES}{_registers_of(0)}{_registers_of(1)}}}"
)
_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 32))


@triton.jit
def decoded(codes, scales, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """2**-19 times the values of *codes* [A, B, C, 128] with *scales* [A, B, 16 C]: [A, B, C, 128, 8].

    bfloat16 if PACKED, else float32, with the same values. The eight values of a word are its four registers, two
    values each.

    PACKED is for the left operand of a product alone. The assembly takes two words at once, the next sixteen values
    that a thread has, so a thread must have pairs of words whole: as a load of 16 bytes a lane gives them.
    """
    A: tl.constexpr = codes.shape[0]
    B: tl.constexpr = codes.shape[1]
    C: tl.constexpr = codes.shape[2]
    words = tl.broadcast_to(codes[:, :, :, :, None], [A, B, C, 128, 8])
    # A pair of words of scales is for the four lanes of its columns, and one for two words of codes.
    pairs = tl.reshape(scales, [A, B, C, 8, 1, 2])
    spread = tl.broadcast_to(pairs[:, :, :, :, :, :, None], [A, B, C, 8, 4, 2, 16])
    of_words = tl.reshape(spread, [A, B, C, 128, 8])
    if PACKED:
        values = tl.inline_asm_elementwise(
            DECODE, _CONSTRAINTS, [words, of_words], dtype=tl.bfloat16, is_pure=True, pack=16
        )
    else:
        values = decoded_one_by_one(words, of_words)
    return values


@triton.jit
def rotated(words, bits: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each of the uint32 *words* rotated to the right by *bits*."""
    return (words >> bits) | (words << (32 - bits))


@triton.jit
def decoded_one_by_one(words, scales):  # type: ignore[no-untyped-def]
    """What DECODE does, in float32."""
    word = words.to(tl.uint32, bitcast=True)
    scale = scales.to(tl.uint32, bitcast=True)
    value = tl.arange(0, 8)[None, None, None, None, :]
    register = value // 2
    second_block = tl.arange(0, 128)[None, None, None, :, None] % 2
    both = tl.where(register == 0, word, tl.where(register == 1, rotated(word, 4), word << 6))
    last = (rotated(word, 6) & 0x81808180) | ((word << 2) & 0x00400040)
    both = tl.where(register == 3, last, both & 0x81C081C0)
    scales_of_both = (tl.where(register % 2 == 0, scale, rotated(scale, 8)) & 0x0FF00FF0) | 0x70007000
    return upper_half_as_float(both, value % 2) * upper_half_as_float(scales_of_both, second_block)


@triton.jit
def upper_half_as_float(words, half):  # type: ignore[no-untyped-def]
    """The bfloat16 in the lower half of each word, or where *half* is 1 in the upper one, as float32."""
    return ((words >> (half * 16).to(tl.uint32)) << 16).to(tl.float32, bitcast=True)
