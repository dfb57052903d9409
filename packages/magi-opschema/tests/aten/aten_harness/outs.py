# SPDX-License-Identifier: Apache-2.0
"""The Tensors that a check passes as `out`: equal in form, empty, strided, of another dtype, or one of the inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .compare import flat, same_strides


if TYPE_CHECKING:
    from collections.abc import Iterator

    from .samples import Sample
    from .subject import Subject


def out_modes(sample: Sample, expected: Any, *, edges: bool) -> Iterator[str]:
    """The modes in which a call can have an `out`; none if a result is not a strided Tensor."""
    if not all(isinstance(e, Tensor) and e.layout is torch.strided for e in flat(expected)):
        return
    yield "out"
    if not edges:
        return
    yield "out empty"
    yield "out strided"
    yield "out dtype"
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


def castable(expected: Any, out: Any) -> bool:
    """Whether every result may be cast to the dtype of its *out*."""
    return all(torch.can_cast(e.dtype, o.dtype) for e, o in zip(flat(expected), flat(out), strict=True))


def _alias_of(sample: Sample, expected: Any) -> Tensor | None:
    if not isinstance(expected, Tensor):
        return None
    fitting = (t for t in sample.tensors() if t.shape == expected.shape and t.dtype == expected.dtype)
    return next((t for t in fitting if t.layout is torch.strided and same_strides(t, t.contiguous())), None)
