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
    x, codes, scales, tensor_scale, out, m, stride_x, routing, shared_rows,
    N: tl.constexpr, K: tl.constexpr, ROUTING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr, PATCHES: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    TILED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """out[m, N] for BLOCK_M rows and BLOCK_N columns, in the type of x: float32, float16 or bfloat16.

    x is a pointer or, if TILED, a tensor descriptor, by which the tensor memory accelerator of a Hopper GPU loads the
    part of x for a step; then there is one part, and rows are not routed.

    A strip is 16 columns of a weight. The weight is the left operand: its values are decoded in the registers in which
    tensor cores take a left operand. 8 rows of x are the least that a right one has; one row is taken 8 times.

    A warp reads and decodes patches of its own. With one of PARTS all WARPS have the same features, and lie beside each
    other along the columns. With more, each warp has one or several, whose sums are added at the end: a few rows give
    too few tiles to occupy a GPU. A step takes PATCHES patches of a strip for each part, one part behind the other.

    By ROUTING: with BY_ROW, row r is row r // *shared_rows* of x, by expert routing[r]. With SORTED, routing has four
    parts: for each row tile its expert, its first row, and the row behind its last; then for each row its row of x. A
    tile whose first row is not below its end does nothing.
    """
    BESIDE: tl.constexpr = WARPS if PARTS == 1 else 1
    STRIPS: tl.constexpr = BLOCK_N // (16 * BESIDE)
    OWN: tl.constexpr = PATCHES * PARTS * BESIDE // WARPS
    OF_K: tl.constexpr = (K + 63) // 64
    EVEN: tl.constexpr = K % (64 * PARTS * PATCHES) == 0
    # Products of fewer rows are over too soon.
    OVERLAPPED: tl.constexpr = TILED and PACKED and BLOCK_M >= 64
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
    scale = tl.load(tensor_scale + expert) * left_to_scale(out.dtype.element_ty)

    begin = tl.arange(0, WARPS)[:, None, None] // BESIDE * OWN
    patch = expert * ((N + 15) // 16 * OF_K) + strips_of_warps(N, WARPS, BESIDE, STRIPS) * OF_K + begin
    word, ahead = tl.arange(0, OWN * 16)[None, None, :], tl.arange(0, OWN)[None, None, :, None]
    at_scales = scales + patch * 16 + word
    at_codes = codes + (patch[:, :, :, None] + ahead) * 128 + tl.arange(0, 128)[None, None, None, :]

    row = first + (tl.arange(0, BLOCK_M) if BLOCK_M > 1 else 0)
    if not TILED:
        source = row_of_x(row, row < end, routing + 3 * tiles, shared_rows, ROUTING)
        feature = features_of_x(BLOCK_M, PARTS, PATCHES, WARPS)
        at_x = x + across(source * stride_x, BLOCK_M, PARTS) + feature
        wanted = across(row < end, BLOCK_M, PARTS) if BLOCK_M > 1 else True

    # With one part the product has two dimensions: only then does it get the tensor cores of a warp group.
    ROWS: tl.constexpr = max(BLOCK_M, 8)
    total = tl.zeros((PARTS, BLOCK_N, ROWS) if PARTS > 1 else (BLOCK_N, ROWS), tl.float32)
    for start in tl.range(0, OF_K, PARTS * PATCHES, num_stages=STAGES):
        of_codes = True if EVEN else begin[:, :, :, None] + ahead + start < OF_K
        of_scales = True if EVEN else begin + word // 16 + start < OF_K
        words = tl.load(at_codes + start * 128, of_codes, other=0)
        words_of_scales = tl.load(at_scales + start * 16, of_scales, other=0)
        if TILED:
            right = tl.trans(x.load([first, start * 64]))
        else:
            of_x = wanted if EVEN else wanted & (feature + start * 64 < K)
            right = right_operand(tl.load(at_x + start * 64, of_x, other=0.0), BLOCK_M, PARTS, WARPS)
        if OVERLAPPED:
            words_of_scales = after_products(words_of_scales)
        values = decoded(words, words_of_scales, PACKED)
        left = left_operand(values, out.dtype.element_ty, PARTS, BESIDE, STRIPS, PATCHES)
        # float32 stays float32; the precision means nothing to types of 16 bits.
        total = tl.dot(left, right, total, input_precision="ieee")
        if PARTS == 1 and PACKED and not OVERLAPPED:
            total = waited_for(total)

    total = sum_of_parts(total, BLOCK_M, PARTS) * scale
    store_rows(out, total.to(out.dtype.element_ty), row, end, N, BLOCK_M, BLOCK_N)


@triton.jit
def strips_of_warps(  # type: ignore[no-untyped-def]
    N: tl.constexpr, WARPS: tl.constexpr, BESIDE: tl.constexpr, STRIPS: tl.constexpr
):
    """The strips of each warp [WARPS, STRIPS, 1]. One behind the last of a weight is not stored; it reads the last."""
    beside = tl.arange(0, WARPS)[:, None, None] % BESIDE
    strip = tl.program_id(1) * (STRIPS * BESIDE) + tl.arange(0, STRIPS)[None, :, None] * BESIDE + beside
    return tl.minimum(strip, (N + 15) // 16 - 1)


@triton.jit
def features_of_x(  # type: ignore[no-untyped-def]
    BLOCK_M: tl.constexpr, PARTS: tl.constexpr, PATCHES: tl.constexpr, WARPS: tl.constexpr
):
    """Which features of x a step loads first, for several rows in the shape of a right operand.

    Parts w, w + WARPS, ... are those of warp w, and lie behind each other.
    """
    if BLOCK_M == 1:
        feature = tl.arange(0, PARTS * PATCHES * 64)
    elif PARTS > 1:
        part = tl.arange(0, PARTS)[:, None, None]
        place = part % WARPS * (PARTS // WARPS) + part // WARPS
        feature = place * (PATCHES * 64) + tl.arange(0, PATCHES * 64)[None, :, None]
    else:
        feature = tl.arange(0, PATCHES * 64)[:, None]
    return feature


@triton.jit
def across(of_rows, BLOCK_M: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What *of_rows* has for each row, along the last dimension of a right operand."""
    if BLOCK_M > 1:
        of_rows = of_rows[None, None, :] if PARTS > 1 else of_rows[None, :]
    return of_rows


@triton.jit
def right_operand(  # type: ignore[no-untyped-def]
    loaded, BLOCK_M: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr
):
    """What was loaded of x as [features, rows], or if there are PARTS that for each of them; one row eight times."""
    if BLOCK_M == 1:
        EACH: tl.constexpr = loaded.shape[0] // PARTS
        if PARTS > 1:
            loaded = tl.permute(tl.reshape(loaded, [WARPS, PARTS // WARPS, EACH]), (1, 0, 2))
            loaded = tl.broadcast_to(tl.reshape(loaded, [PARTS, EACH, 1]), [PARTS, EACH, 8])
        else:
            loaded = tl.broadcast_to(loaded[:, None], [EACH, 8])
    return loaded


@triton.jit
def sum_of_parts(total, BLOCK_M: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[columns, rows], or for one row [columns]."""
    if BLOCK_M == 1:
        # A sum of eight equal rows is exact, and needs no other layout to be stored.
        total = tl.sum(total, len(total.shape) - 1) * 0.125
    if PARTS > 1:
        total = tl.sum(total, 0)
    return total


@triton.jit
def store_rows(  # type: ignore[no-untyped-def]
    out, total, row, end, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """*total*, as `sum_of_parts` gives it, to the rows of out before *end*, in the columns of this program."""
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if BLOCK_M == 1:
        tl.store(out + row.to(tl.int64) * N + column, total, column < N)
    else:
        at_out = out + row.to(tl.int64)[None, :] * N + column[:, None]
        tl.store(at_out, total, (row < end)[None, :] & (column < N)[:, None])


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
    WARPS: tl.constexpr = values.shape[0]
    OF_WARP: tl.constexpr = PARTS * BESIDE // WARPS
    # warp, beside, strip, part of the warp, patch, g, t, block, half of its features, half of the columns, one of two
    values = tl.reshape(values, [WARPS // BESIDE, BESIDE, STRIPS, OF_WARP, PATCHES, 8, 4, 4, 2, 2, 2])
    values = tl.permute(values, (3, 0, 2, 1, 9, 5, 4, 7, 8, 6, 10))
    if PARTS > 1:
        values = tl.reshape(values, [PARTS, STRIPS * 16, PATCHES * 64])
    else:
        values = tl.reshape(values, [STRIPS * BESIDE * 16, PATCHES * 64])
    return values


@triton.jit
def waited_for(total):  # type: ignore[no-untyped-def]
    """The same, once it is there.

    Triton 3.6 lets the products of a warp group run on while the next step decodes into the registers that they read;
    on an H200, results were wrong. A value that assembly reads has to be complete.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def after_products(words):  # type: ignore[no-untyped-def]
    """The same, once the products of the step before are there: `waited_for`, but later.

    Triton multiplies 16 features at a time, and the next 16 are decoded meanwhile. The last products of a step run
    while the next one waits for what it loads. Only what is decoded with *words* needs their registers.
    """
    return tl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;",
        "=r,=r,=r,=r,r,r,r,r", [words], dtype=tl.int32, is_pure=True, pack=4,
    )  # fmt: skip
