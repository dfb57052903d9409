# SPDX-License-Identifier: Apache-2.0
"""The forms of arguments: layouts and edge shapes of inputs, and the tensors that a check passes as `out`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .subject import Sample, Subject


def flat(result: Any) -> list[Any]:
    """The results of a call as a list."""
    return list(result) if isinstance(result, (list, tuple)) else [result]


def layouts(sample: Sample, *, elementwise: bool) -> Iterator[tuple[str, Sample]]:
    """The sample as it is, and in every other layout that its tensors can have; without dimensions if *elementwise*."""
    yield "dense", sample

    def dense(change: Any, dims: int = 1) -> Sample:
        return sample.map_tensors(lambda t: change(t) if t.layout is torch.strided and t.dim() >= dims else t)

    tensors = [t for t in sample.tensors() if t.layout is torch.strided]
    dims = {t.dim() for t in tensors}
    if not dims or dims == {0}:
        return
    # Every second element of a buffer twice as large; the last two dimensions swapped in memory; the first slice with
    # stride 0, as broadcasting passes it.
    yield "strided", dense(lambda t: t.new_zeros((*t.shape, 2))[..., 0].copy_(t))
    if max(dims) >= 2:
        yield "transposed", dense(lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2), dims=2)
    if dims & {4, 5}:
        yield "channels_last", sample.map_tensors(_channels_last)
    yield "broadcast", dense(lambda t: t[:1].clone().expand(t.shape) if t.shape[0] > 1 else t)
    yield "empty", dense(lambda t: t[:0].clone())
    if elementwise and all(t.numel() for t in tensors):
        yield "0-d", sample.map_tensors(lambda t: t.reshape(-1)[0].clone() if t.dim() else t)


def _channels_last(t: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.contiguous(memory_format=formats[t.dim()]) if t.dim() in formats else t


def out_modes(sample: Sample, expected: Any, *, edges: bool) -> Iterator[str]:
    """The modes in which a call can have an `out`; none if a result is not a strided Tensor."""
    if not all(isinstance(e, Tensor) and e.layout is torch.strided for e in flat(expected)):
        return
    yield "out"
    if not edges:
        return
    yield from ("out empty", "out strided", "out dtype")
    if _alias_of(sample, expected) is not None:
        yield "out alias"


def outs_of(sample: Sample, expected: Any, mode: str, subject: Subject) -> Any:
    """The `out` in *mode*: like *expected*, with other contents, and with shape, strides or dtype set by the mode."""
    if mode == "out alias":
        return _alias_of(sample, expected)
    outs = [_one_out(e, mode) for e in flat(expected)]
    if isinstance(expected, Tensor):
        return outs[0]
    return outs if subject.lists_out else tuple(outs)


def _one_out(expected: Tensor, mode: str) -> Tensor:
    if mode == "out empty":
        return expected.new_empty(0)
    if mode == "out strided":
        buffer = expected.new_empty((*expected.shape, 2))
        return _sentinel(buffer)[..., 0]
    if mode == "out dtype":
        return _sentinel(expected.new_empty(expected.shape, dtype=_other_dtype(expected.dtype)))
    return _sentinel(torch.empty_like(expected))


def _sentinel(t: Tensor) -> Tensor:
    """Values that no result has, to detect an `out` that was not written."""
    if t.dtype.is_floating_point or t.dtype.is_complex:
        return t.fill_(float("nan"))
    return t.fill_(True) if t.dtype is torch.bool else t.fill_(101)


def _other_dtype(dtype: torch.dtype) -> torch.dtype:
    """A dtype that a result of *dtype* cannot be cast to; for booleans, which can be cast to all, a wider one."""
    if dtype.is_complex:
        return torch.float32
    if dtype.is_floating_point:
        return torch.int64
    return torch.float32 if dtype is torch.bool else torch.bool


def _alias_of(sample: Sample, expected: Any) -> Tensor | None:
    if not isinstance(expected, Tensor):
        return None
    fitting = (t for t in sample.tensors() if t.shape == expected.shape and t.dtype == expected.dtype)
    return next((t for t in fitting if t.layout is torch.strided and t.is_contiguous()), None)
