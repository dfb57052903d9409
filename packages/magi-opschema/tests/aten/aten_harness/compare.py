# SPDX-License-Identifier: Apache-2.0
"""Comparing results: bit for bit, or within the tolerance of a dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .torch_names import default_tolerances


def flat(result: Any) -> list[Any]:
    """The results of a call as a list."""
    return list(result) if isinstance(result, (list, tuple)) else [result]


def same_bits(got: Any, expected: Any, *, contents: bool = True) -> str | None:
    """The difference between two results in words, None if there is none; NaN equals NaN."""
    left, right = flat(got), flat(expected)
    if len(left) != len(right):
        return f"{len(left)} results instead of {len(right)}"
    for position, (a, b) in enumerate(zip(left, right, strict=True)):
        reason = _same_tensor(a, b, contents=contents) if isinstance(b, Tensor) else _same_value(a, b)
        if reason is not None:
            return f"result {position}: {reason}"
    return None


def close(got: Any, expected: Any, *, strides: bool, scale: float = 1.0, gross: bool = False) -> str | None:
    """The difference in words if it exceeds *scale* times the tolerance of `torch.testing.assert_close`.

    With *gross*, differences within the last digits of the largest element are accepted, because two kernels of one
    operator may sum in another order.
    """
    left, right = flat(got), flat(expected)
    if len(left) != len(right):
        return f"{len(left)} results instead of {len(right)}"
    for position, (a, b) in enumerate(zip(left, right, strict=True)):
        if not isinstance(a, Tensor):
            return f"result {position} is a {type(a).__name__}"
        form = _form(a, b, strides=strides)
        if form is not None:
            return f"result {position}: {form}"
        rtol, atol = _tolerance(b.dtype)
        if gross and rtol:
            atol = max(atol, 100 * rtol * _largest(b))
        if not torch.allclose(a, b, rtol=rtol * scale, atol=atol * scale, equal_nan=True):
            wide = torch.complex128 if b.dtype.is_complex else torch.float64
            worst = (a.to(wide) - b.to(wide)).abs().nan_to_num(float("inf"))
            return (
                f"result {position}: off by {worst.max().item():.3g}, rtol={rtol * scale:.2g} atol={atol * scale:.2g}"
            )
    return None


def _largest(t: Tensor) -> float:
    finite = t[t.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def same_strides(a: Tensor, b: Tensor) -> bool:
    """Whether the strides agree, without those of dimensions of one element, and for tensors with elements."""
    return a.numel() == 0 or all(
        size < 2 or left == right for size, left, right in zip(b.shape, a.stride(), b.stride(), strict=True)
    )


def _tolerance(dtype: torch.dtype) -> tuple[float, float]:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0, 0.0
    return default_tolerances(dtype)


def _form(a: Tensor, b: Tensor, *, strides: bool) -> str | None:
    if a.dtype != b.dtype:
        return f"dtype {a.dtype} instead of {b.dtype}"
    if a.shape != b.shape:
        return f"shape {tuple(a.shape)} instead of {tuple(b.shape)}"
    if a.device != b.device:
        return f"device {a.device} instead of {b.device}"
    if strides and not same_strides(a, b):
        return f"strides {a.stride()} instead of {b.stride()}"
    return None


def _same_tensor(a: Any, b: Tensor, *, contents: bool) -> str | None:
    if not isinstance(a, Tensor):
        return f"{type(a).__name__} instead of a tensor"
    form = _form(a, b, strides=True)
    if form is not None or not contents or a.layout is not torch.strided:
        return form
    count = differing_elements(a, b)
    return f"{count} of {b.numel()} elements differ" if count else None


def differing_elements(a: Tensor, b: Tensor) -> int:
    """How many elements of two tensors of one shape differ; NaN equals NaN."""
    if torch.equal(a, b):
        return 0
    return int(((a != b) & ~((a != a) & (b != b))).sum())  # noqa: PLR0124  # NaN is what differs from itself


def _same_value(a: Any, b: Any) -> str | None:
    return None if a == b or (a != a and b != b) else f"{a!r} instead of {b!r}"  # noqa: PLR0124
