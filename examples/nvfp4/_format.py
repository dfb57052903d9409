# SPDX-License-Identifier: Apache-2.0
"""The NVFP4 format: E2M1 values in blocks of 16, an E4M3 scale for each block, a float32 scale for the tensor.

    value = e2m1[code] * block_scale * tensor_scale

    code      0    1    2    3    4    5    6    7    8 ... 15
    e2m1      0  0.5    1  1.5    2    3    4    6   -0 ... -6

Two codes share a byte, the first in the low nibble. (NVIDIA, "Introducing NVFP4", and the OCP Microscaling
Formats specification v1.0 for E2M1.)
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor


BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX, E4M3_MAX = 6.0, 448.0


class NVFP4Tensor(NamedTuple):
    """A quantised tensor of shape [..., K]; K is a multiple of 16.

    Attributes:
        packed: uint8 [..., K / 2], two codes a byte, the first in the low nibble.
        block_scale: float8_e4m3fn [..., K / 16].
        tensor_scale: float32, a scalar, or [E] for E experts that are stacked in front.
    """

    packed: Tensor
    block_scale: Tensor
    tensor_scale: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all three parts."""
        return sum(part.nbytes for part in self)


def quantize_nvfp4(x: Tensor) -> NVFP4Tensor:
    """*x* rounded to the nearest values of the format, ties to the even code.

    The tensor scale maps the largest magnitude to 6 * 448; each block scale maps its block's to 6. Scales and codes
    are chosen by comparisons in float64 that are exact, so the result is that of real numbers.

    Args:
        x: a floating-point tensor of shape [..., K], all values finite, K a multiple of 16.

    Raises:
        ValueError: K is not a multiple of 16, or a value is not finite.
    """
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"quantize_nvfp4() wants a last dimension that is a multiple of {BLOCK}, got {list(x.shape)}.")
    if not torch.isfinite(x).all():
        raise ValueError("quantize_nvfp4() got a value that is not finite, which the format cannot hold.")
    blocks = x.detach().double().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
    tensor_scale = (largest.double() / (E2M1_MAX * E4M3_MAX)).float()
    tensor_scale = torch.where(tensor_scale > 0, tensor_scale, torch.ones_like(tensor_scale))
    unit = tensor_scale.double()
    block_scale = _nearest(blocks.abs().amax(-1) / E2M1_MAX, _e4m3(x.device), unit)
    step = block_scale.double() * unit
    codes = _codes(blocks, step.unsqueeze(-1)).flatten(-2)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return NVFP4Tensor(packed, block_scale, tensor_scale)


def dequantize_nvfp4(x: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of *x*, shape [..., K], rounded once to float32 and then to *dtype*."""
    codes = torch.stack([x.packed & 15, x.packed >> 4], -1).flatten(-2)
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=x.packed.device)
    # A value of 2 bits times a scale of 4 bits is exact in float32.
    values = table[codes.int()].unflatten(-1, (-1, BLOCK)) * x.block_scale.float().unsqueeze(-1)
    trailing = (1,) * (values.dim() - x.tensor_scale.dim())
    scaled: Tensor = values * x.tensor_scale.view(*x.tensor_scale.shape, *trailing)
    return scaled.flatten(-2).to(dtype)


def stack(tensors: list[NVFP4Tensor]) -> NVFP4Tensor:
    """Tensors of one shape, stacked in front; each keeps its own tensor scale."""
    packed, block_scale, tensor_scale = zip(*tensors, strict=True)
    scales = torch.stack([scale.view(torch.uint8) for scale in block_scale]).view(torch.float8_e4m3fn)
    return NVFP4Tensor(torch.stack(packed), scales, torch.stack(tensor_scale))


def _e4m3(device: torch.device) -> Tensor:
    """All magnitudes of E4M3, in order of their codes, float64."""
    return torch.arange(127, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).double()


def _nearest(values: Tensor, grid: Tensor, unit: Tensor) -> Tensor:
    """The E4M3 numbers whose multiple of *unit* is nearest to *values*, ties to the even code."""
    bounds = (grid[1:] + grid[:-1]) / 2 * unit
    below = torch.bucketize(values, bounds)
    tied = torch.bucketize(values, bounds, right=True) - below
    codes = below + (tied & below)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def _codes(values: Tensor, step: Tensor) -> Tensor:
    """The E2M1 codes, uint8, nearest to *values* in multiples of *step*, ties to the even code."""
    magnitude = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for code, (low, high) in enumerate(itertools.pairwise(E2M1)):
        bound = (low + high) / 2 * step
        codes += (magnitude >= bound) if code % 2 else (magnitude > bound)
    codes = torch.where(step > 0, codes, torch.zeros_like(codes))
    return codes | (torch.signbit(values).to(torch.uint8) << 3)
