# SPDX-License-Identifier: Apache-2.0
"""The decoded copy of a weight, for products with so many rows that a library's kernel is worth it."""

from __future__ import annotations

import triton
import triton.language as tl

from ._decode import LEFT_TO_SCALE, decoded, pairs_of, scales_of


@triton.jit
def nvfp4_copy_kernel(  # type: ignore[no-untyped-def]
    packed, block_scale, tensor_scale, out, words,
    WORDS: tl.constexpr,
):  # fmt: skip
    """WORDS of the *words* of a weight, eight values each, to *out* in order, each rounded once to the type of out."""
    first = tl.program_id(0).to(tl.int64) * WORDS
    word = first + tl.arange(0, WORDS)[None, :]
    codes = tl.load(packed.to(tl.pointer_type(tl.int32)) + word, word < words, other=0)
    block = first // 2 + tl.arange(0, WORDS // 2)[None, :]
    scale = scales_of(tl.load(block_scale + block, block < words // 2, other=0), False)
    scales = tl.reshape(tl.broadcast_to(scale[:, :, None], [1, WORDS // 2, 2]), [1, WORDS])
    w0, w1, w2, w3 = pairs_of(codes)
    # Of the pair i, the low half is code i of its word and the high half code 4 + i.
    even = tl.join(decoded(w0, scales, False), decoded(w2, scales, False))
    odd = tl.join(decoded(w1, scales, False), decoded(w3, scales, False))
    values = tl.reshape(tl.join(even, odd), [WORDS * 8]) * (tl.load(tensor_scale) * LEFT_TO_SCALE)
    at = first * 8 + tl.arange(0, WORDS * 8)
    tl.store(out + at, values.to(out.dtype.element_ty), at < words * 8)
