# SPDX-License-Identifier: Apache-2.0
"""The decoded copy of a weight, for products with so many rows that a library's kernel is worth it."""

from __future__ import annotations

import triton
import triton.language as tl

from ._decode import LEFT_TO_SCALE, decoded


@triton.jit
def nvfp4_copy_kernel(  # type: ignore[no-untyped-def]
    codes, scales, tensor_scale, out, n, k, patches,
    PATCHES: tl.constexpr,
):  # fmt: skip
    """PATCHES of the *patches* of a strip of 16 columns to out [n, k], each value rounded once to the type of out."""
    first = tl.program_id(0) * PATCHES
    at_patch = tl.program_id(1).to(tl.int64) * patches + first
    patch = tl.arange(0, PATCHES)[None, None, :, None]
    word = tl.arange(0, PATCHES * 16)[None, None, :]
    words = tl.load(
        codes + (at_patch + patch) * 128 + tl.arange(0, 128)[None, None, None, :], first + patch < patches, other=0
    )
    words_of_scales = tl.load(scales + at_patch * 16 + word, first + word // 16 < patches, other=0)
    # Here the layout of the store decides which thread has which words, and the assembly needs its own.
    values = decoded(words, words_of_scales, False)
    # patch, g, t, block, half of its features, half of the columns, one of two features
    values = tl.permute(tl.reshape(values, [PATCHES, 8, 4, 4, 2, 2, 2]), (5, 1, 0, 3, 4, 2, 6))
    values = tl.reshape(values, [16, PATCHES * 64]).to(tl.float32) * (tl.load(tensor_scale) * LEFT_TO_SCALE)
    row = (tl.program_id(1) * 16 + tl.arange(0, 16))[:, None]
    column = (first * 64 + tl.arange(0, PATCHES * 64))[None, :]
    tl.store(out + row.to(tl.int64) * k + column, values.to(out.dtype.element_ty), (row < n) & (column < k))
