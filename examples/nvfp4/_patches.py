# SPDX-License-Identifier: Apache-2.0
"""The weight as the kernels read it: in patches, whose words need few instructions on their way to tensor cores.

A patch is 16 columns of the product by 64 features of x. It has 128 words of eight codes: lane 4 g + t of a warp reads
words 16 g + 4 t to 16 g + 4 t + 3, 16 bytes. Word j of a lane is the lane's part of block j, which is the features 16 j
to 16 j + 15: four registers of a left operand of mma.m16n8k16, each with the values of two features (PTX ISA, "Matrix
Fragments for mma.m16n8k16").

A value becomes bfloat16 when its sign is at bit 15 and its exponent and fraction (e, e, m) are at bits 8, 7 and 6; that
is 2**-126 times the value, also for zero and 0.5. The bits of a word are laid out for that, here those of the first of
two features; those of the second are 16 places higher, around the end of the word:

    register  column  features          s   e   e   m    to bits 15, 8, 7, 6 by
    0         g       2 t, 2 t + 1      15  8   7   6    a mask
    1         g + 8   2 t, 2 t + 1      19  12  11  10   rotating right by 4, a mask
    2         g       2 t + 8, 2 t + 9  9   2   1   0    shifting left by 6, a mask
    3         g + 8   2 t + 8, 2 t + 9  21  14  13  4    rotating right by 6, shifting left by 2, two masks

A patch has 16 words of scales. Words 2 g and 2 g + 1 are for columns g and g + 8: the first for blocks 0 and 1, the
second for blocks 2 and 3, in bytes (block 0, g), (block 0, g + 8), (block 1, g), (block 1, g + 8), rotated left by 4. A
byte `eeeeemmm` is 2**(e - 10) * (1 + m / 8): with that exponent no number of E4M3 is subnormal. 0xFF is NaN. There is
no zero: where a scale is zero, the magnitudes of its codes are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ._format import BLOCK, NVFP4Tensor


COLUMNS, FEATURES = 16, 64
"""Of a patch."""

PLACES = ((15, 8, 7, 6), (19, 12, 11, 10), (9, 2, 1, 0), (21, 14, 13, 4))
"""For each register the bits of a word that hold s, e, e and m of its first value."""

EXPONENT_OF_ONE = 10
"""Of a scale in a patch; 7 in E4M3."""


def patches_of(weight: NVFP4Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of *weight* [..., columns, features] in patches.

    Returns:
        int32 [..., columns / 16, features / 64, 128] and [..., columns / 16, features / 64, 16], rounded up; what is
        added decodes to zero.
    """
    codes = torch.stack([weight.packed & 15, weight.packed >> 4], -1).flatten(-2)
    scale = weight.block_scale.view(torch.uint8)
    codes = torch.where(scale.repeat_interleave(BLOCK, -1) >= 0x80, codes ^ 8, codes)  # a negative scale
    scale = scale & 0x7F
    codes = torch.where(scale.repeat_interleave(BLOCK, -1) == 0, codes & 8, codes)
    columns, features = codes.shape[-2:]
    beyond = -columns % COLUMNS
    codes = functional.pad(codes, (0, -features % FEATURES, 0, beyond)).int()
    scale = functional.pad(_without_subnormals(scale), (0, -features % FEATURES // BLOCK, 0, beyond)).int()
    return _words_of_codes(codes), _words_of_scales(scale)


def tensor_of(codes: Tensor, scales: Tensor, tensor_scale: Tensor, columns: int, features: int) -> NVFP4Tensor:
    """The inverse of `patches_of`; values of a block whose scale is zero are zero, and no scale is negative."""
    unpacked = _codes_of_words(codes)[..., :columns, :features]
    scale = _with_subnormals(_scales_of_words(scales)[..., :columns, : features // BLOCK])
    packed = (unpacked[..., ::2] | unpacked[..., 1::2] << 4).to(torch.uint8)
    return NVFP4Tensor(packed, scale.to(torch.uint8).view(torch.float8_e4m3fn), tensor_scale)


def _words_of_codes(codes: Tensor) -> Tensor:
    # column half, g; patch, block, feature half, t, which of two features
    parts = codes.unflatten(-2, (-1, 2, 8)).unflatten(-1, (-1, 4, 2, 4, 2))
    lanes = _moved(parts, (0, 3, 2, 6, 4, 7, 5, 1))
    words = torch.zeros(lanes.shape[:-3], dtype=torch.int32, device=codes.device)
    for register, places in enumerate(PLACES):
        for second in (0, 1):
            value = lanes[..., second, register // 2, register % 2]
            for bit, place in zip((3, 2, 1, 0), places, strict=True):
                words |= (value >> bit & 1) << (place + 16 * second) % 32
    return words.flatten(-3)


def _codes_of_words(words: Tensor) -> Tensor:
    lanes = words.unflatten(-1, (8, 4, 4))
    values = []
    for second in (0, 1):
        for places in PLACES:
            bits = (
                (lanes >> (place + 16 * second) % 32 & 1) << bit
                for bit, place in zip((3, 2, 1, 0), places, strict=True)
            )
            values.append(sum(bits, torch.zeros_like(lanes)))
    parts = torch.stack(values, -1).unflatten(-1, (2, 2, 2))
    return _moved(parts, (0, 7, 2, 1, 4, 6, 3, 5)).flatten(-5).flatten(-4, -2)


def _words_of_scales(scale: Tensor) -> Tensor:
    # column half, g; patch, word, which of two blocks
    parts = _moved(scale.unflatten(-2, (-1, 2, 8)).unflatten(-1, (-1, 2, 2)), (0, 3, 2, 4, 5, 1)).flatten(-2)
    words = sum((parts[..., byte] << (8 * byte + 4) % 32 for byte in range(3)), torch.zeros_like(parts[..., 0]))
    return (words | parts[..., 3] << 28 | parts[..., 3] >> 4).flatten(-2)


def _scales_of_words(words: Tensor) -> Tensor:
    lanes = words.unflatten(-1, (8, 2))
    bytes_ = [lanes >> 8 * byte + 4 & 0xFF for byte in range(3)]
    bytes_.append(lanes >> 28 & 0xF | (lanes & 0xF) << 4)
    parts = torch.stack(bytes_, -1).unflatten(-1, (2, 2))
    return _moved(parts, (0, 5, 2, 1, 3, 4)).flatten(-3).flatten(-4, -2)


def _moved(parts: Tensor, order: tuple[int, ...]) -> Tensor:
    """*parts* with its last dimensions in this order."""
    front = parts.dim() - len(order)
    return parts.permute(*range(front), *(front + dimension for dimension in order))


def _without_subnormals(scale: Tensor) -> Tensor:
    """The bits of E4M3 numbers, none negative, as bytes of patches."""
    wide = scale.int()
    exponent, fraction = wide >> 3, wide & 7
    leading = (fraction >= 2).int() + (fraction >= 4).int()
    normal = wide + (EXPONENT_OF_ONE - 7 << 3)
    subnormal = (leading + EXPONENT_OF_ONE - 9 << 3) | (fraction << 3 - leading) & 7
    found = torch.where(exponent > 0, normal, torch.where(fraction > 0, subnormal, 0))
    return torch.where(wide == 0x7F, 0xFF, found)


def _with_subnormals(scale: Tensor) -> Tensor:
    """The inverse of `_without_subnormals`."""
    exponent, fraction = scale >> 3, scale & 7
    normal = scale - (EXPONENT_OF_ONE - 7 << 3)
    subnormal = (8 | fraction) >> (EXPONENT_OF_ONE - 6 - exponent).clamp(0, 4)
    found = torch.where(exponent > EXPONENT_OF_ONE - 7, normal, torch.where(scale > 0, subnormal, 0))
    return torch.where(scale == 0xFF, 0x7F, found)
