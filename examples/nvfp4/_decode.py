# SPDX-License-Identifier: Apache-2.0
"""NVFP4 words to bfloat16 values inside Triton kernels, by shifts and masks, two codes an instruction.

An int32 word holds eight codes. The low half of an int32 and its high half are two lanes, and code i of the low half is
decoded together with code 4 + i:

    word       7 6 5 4 | 3 2 1 0        codes of 4 bits, s e e m
    bfloat16   s 0 0 0 0 0 0 e e m 0 …  2**-126 times the E2M1 value, subnormals too

A sign belongs six bits further above its magnitude than it lies. Words in which two of the four magnitudes stand beside
signs that are six bits higher need one shift and one mask for each pair: eleven instructions a word, not fifteen.

A scale in E4M3 stands in both lanes likewise, 2**-120 times its value. It is multiplied by 2**119 twice, and a product
with 2**-126 times a value is 2**-8 times what it stands for: six significant bits of bfloat16's eight, so exact.
"""

from __future__ import annotations

import triton
import triton.language as tl


LEFT_TO_SCALE = tl.constexpr(256.0)
"""What the values of `decoded` are to be multiplied by."""


@triton.jit
def rotated(words, bits: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each of the int32 *words* rotated to the left by *bits*."""
    high = words.to(tl.uint32, bitcast=True) >> (32 - bits)
    return (words << bits) | high.to(tl.int32, bitcast=True)


@triton.jit
def pairs_of(words):  # type: ignore[no-untyped-def]
    """Four tensors like *words*, int32: codes i and 4 + i of each word as two bfloat16, 2**-126 times their values."""
    signs = rotated(words, 6)
    first = signs ^ ((signs ^ words) & 0x00770077)
    second = signs ^ ((signs ^ words) & 0x77007700)
    # The mask keeps a sign and the three bits below it: 0x81C0 in both halves.
    return (
        (first << 6) & -0x7E3F7E40,
        (first << 2) & -0x7E3F7E40,
        rotated(second, 30) & -0x7E3F7E40,
        rotated(second, 26) & -0x7E3F7E40,
    )


@triton.jit
def multiplied_pairs(a, b):  # type: ignore[no-untyped-def]
    """The products of two tensors of bfloat16 pairs, int32."""
    return tl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def scales_of(codes, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """2**118 times the E4M3 numbers *codes*: pairs of bfloat16 in int32 if PACKED, else float32."""
    if PACKED:
        pairs = codes.to(tl.int32) * 0x00100010
        scales = multiplied_pairs(multiplied_pairs(pairs, 0x7B007B00), 0x7B007B00)
    else:
        bits = (codes.to(tl.int32) << 20).to(tl.float32, bitcast=True)
        scales = bits * 6.646139978924579e35 * 6.646139978924579e35  # 2**119
    return scales


@triton.jit
def decoded(pairs, scales, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """2**-8 times the values of *pairs* [R, W], bfloat16 if PACKED, else float32 [R, 2 W]; *scales* as of `scales_of`.

    Triton's interpreter has no PTX, which is what PACKED needs; the values are the same.
    """
    if PACKED:
        products = multiplied_pairs(pairs, scales)
        halves = tl.join(products.to(tl.int16), (products >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)
    else:
        halves = tl.join(pairs << 16, pairs & -0x10000).to(tl.float32, bitcast=True) * scales[:, :, None]
    return tl.reshape(halves, [pairs.shape[0], pairs.shape[1] * 2])
