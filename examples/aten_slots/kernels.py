# SPDX-License-Identifier: Apache-2.0
"""Two Triton kernels in slots of ATen operators: softmax in slot 0, add in slot 1.

`python -m aten_harness softmax --slot 0 --kernels kernels.py`, in the tests of magi-opschema, checks one against ATen.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from magi_opschema import aten
from torch import Tensor


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ("cpu", "cuda") if INTERPRETED else ("cuda",)
DTYPES = (torch.float32, torch.float16)
LONGEST_ROW = 65536


@triton.jit
def _softmax_rows(x, y, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's language
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    values = tl.load(x + row * columns + offsets, mask=inside, other=-float("inf")).to(tl.float32)
    # The largest value is taken off first: exp overflows beyond 88.
    exponentials = tl.exp(values - tl.max(values, 0))
    tl.store(y + row * columns + offsets, (exponentials / tl.sum(exponentials, 0)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _add(x, y, z, alpha, elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's language
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < elements
    left = tl.load(x + offsets, mask=inside).to(tl.float32)
    right = tl.load(y + offsets, mask=inside).to(tl.float32)
    tl.store(z + offsets, (left + alpha * right).to(z.dtype.element_ty), mask=inside)


def rows_fit(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> bool:  # noqa: A002  # ATen's name
    """Dense rows along the last dimension that one program can hold, and the result in the input's dtype."""
    return (
        dtype in (None, input.dtype)
        and input.dim() > 0
        and dim in (-1, input.dim() - 1)
        and input.is_contiguous()
        and input.numel() > 0
        and input.shape[-1] <= LONGEST_ROW
    )


@aten.register_slot("softmax.int", 0, devices=DEVICES, dtypes=DTYPES, supports=rows_fit)
def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:  # noqa: A002, ARG001
    """Softmax over the last dimension, a row per program; float32 inside."""
    result = torch.empty_like(input)
    columns = input.shape[-1]
    _softmax_rows[(input.numel() // columns,)](input, result, columns, BLOCK=triton.next_power_of_2(columns))
    return result


def same_and_dense(input: Tensor, other: Tensor, *, alpha: object = 1) -> bool:  # noqa: A002
    """No broadcasting, no promotion: two dense tensors of one shape and dtype."""
    return (
        isinstance(alpha, (int, float))
        and input.shape == other.shape
        and input.dtype == other.dtype
        and input.is_contiguous()
        and other.is_contiguous()
        and input.numel() > 0
    )


@aten.register_slot("add.Tensor", 1, devices=DEVICES, dtypes=DTYPES, supports=same_and_dense)
def add(input: Tensor, other: Tensor, *, alpha: float = 1, out: Tensor | None = None) -> Tensor:  # noqa: A002
    """`input + alpha * other`, written straight into `out` where that is dense and of the same dtype."""
    target = torch.empty_like(input)
    if out is not None:
        aten.prepare_out(out, input.shape, input.dtype, input.device)
        if out.is_contiguous() and out.dtype == input.dtype:
            target = out
    _add[(triton.cdiv(input.numel(), 1024),)](input, other, target, float(alpha), input.numel(), BLOCK=1024)
    if out is None:
        return target
    return out if target is out else out.copy_(target)
