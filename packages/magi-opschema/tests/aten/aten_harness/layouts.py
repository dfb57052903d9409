# SPDX-License-Identifier: Apache-2.0
"""The same values in other layouts, and edge shapes: no elements, no dimensions, broadcast."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor


if TYPE_CHECKING:
    from collections.abc import Iterator

    from .samples import Sample


def layouts(sample: Sample, *, elementwise: bool) -> Iterator[tuple[str, Sample]]:
    """The sample as it is, and in every other layout that its tensors can have.

    Args:
        sample: The sample, its tensors dense.
        elementwise: Whether the operator works on one element at a time, so that tensors without dimensions make sense.
    """
    yield "dense", sample
    tensors = [t for t in sample.tensors() if t.layout is torch.strided]
    dims = {t.dim() for t in tensors}
    if not dims or dims == {0}:
        return
    yield "strided", sample.map_tensors(_strided)
    if max(dims) >= 2:
        yield "transposed", sample.map_tensors(_transposed)
    if dims & {4, 5}:
        yield "channels_last", sample.map_tensors(_channels_last)
    yield "broadcast", sample.map_tensors(_expanded)
    yield "empty", sample.map_tensors(_emptied)
    if elementwise and all(t.numel() for t in tensors):
        yield "0-d", sample.map_tensors(lambda t: t.reshape(-1)[0].clone() if t.dim() else t)


def _strided(t: Tensor) -> Tensor:
    """*t* as every second element of a buffer twice as large."""
    if t.dim() == 0 or t.layout is not torch.strided:
        return t
    view = torch.zeros((*t.shape, 2), dtype=t.dtype, device=t.device)[..., 0]
    return view.copy_(t)


def _transposed(t: Tensor) -> Tensor:
    """*t* with the last two dimensions swapped in memory."""
    if t.dim() < 2 or t.layout is not torch.strided:
        return t
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def _channels_last(t: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.contiguous(memory_format=formats[t.dim()]) if t.dim() in formats else t


def _expanded(t: Tensor) -> Tensor:
    """The first slice of *t*, repeated with stride 0, as broadcasting passes it to a kernel."""
    if t.dim() == 0 or t.shape[0] < 2 or t.layout is not torch.strided:
        return t
    return t[:1].clone().expand(t.shape)


def _emptied(t: Tensor) -> Tensor:
    return t[:0].clone() if t.dim() and t.layout is torch.strided else t
