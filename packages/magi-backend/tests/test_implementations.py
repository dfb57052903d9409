# SPDX-License-Identifier: Apache-2.0
"""The compiler sees through an op to the implementation that serves the call that it traces."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from _pretended_gpu import generated
from magi_backend import magi_register_custom_op
from magi_opschema import op_def, use_implementation
from magi_tritonwrap import see_through_report
from torch import Tensor


@triton.jit
def long_kernel(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)


@triton.jit
def short_kernel(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)


@magi_register_custom_op("magi_implementations::double")
def double(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    long_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out


@double.implementation(when=lambda x: x.numel() <= 64, devices=("cuda",), priority=1)
def short(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    short_kernel[(1,)](x, out, x.numel(), BLOCK=64)
    return out


@magi_register_custom_op("magi_implementations::negate")
def negate(x: Tensor) -> Tensor:
    return -x


@negate.implementation(devices=("cuda",))
def negate_by_kernel(x: Tensor) -> Tensor:
    return -double(x) / 2


def code(fn: object, size: int, **how: object) -> str:
    torch._dynamo.reset()
    return generated(fn, torch.empty(size, device="cpu"), backend="magi", **how)  # type: ignore[arg-type]


@pytest.mark.kernels
def test_the_kernel_of_the_implementation_is_in_the_code() -> None:
    assert "short_kernel" in code(double, 48)
    assert "long_kernel" not in code(double, 48)
    assert "long_kernel" in code(double, 96)
    with use_implementation(double, "default"):
        assert "long_kernel" in code(double, 48)
    found = {kernel.name for kernel in see_through_report(double).kernels}
    assert found == {"long_kernel", "short_kernel"}
    assert set(op_def(double).served) == {"default", "short"}


@pytest.mark.kernels
def test_an_op_of_torch_operators_is_seen_through_to_an_implementation_with_a_kernel() -> None:
    assert "short_kernel" in code(negate, 48)
