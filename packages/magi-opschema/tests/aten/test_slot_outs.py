# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, A006  # kernels name their parameters as ATen does
"""Kernels of slots and what ATen writes for its callers: `out=`, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _slot_kernels import Counted, save_input, square
from magi_opschema import aten
from torch import Tensor


Slot = Callable[..., None]


def test_a_factorys_kernel_takes_its_options_from_out(slot: Slot) -> None:
    given = []

    def full(size, fill_value, *, dtype=None, layout=None, device=None, pin_memory=None):  # type: ignore[no-untyped-def]
        given.append((dtype, layout, device))
        return torch.full(size, fill_value, dtype=dtype, device=device)

    slot("full", 1, full)
    out = torch.empty(2, dtype=torch.int32)
    assert aten.full([2], 3, out=out) is out
    assert out.tolist() == [3, 3]
    assert given == [(torch.int32, torch.strided, torch.device("cpu"))]


def test_an_out_that_a_result_does_not_fit_is_atens(slot: Slot) -> None:
    def total(input, dim, keepdim=False, *, dtype=None):  # type: ignore[no-untyped-def]
        return torch.sum(input, dim, keepdim, dtype=dtype) + 1

    slot("sum.dim_IntList", 1, total)
    slot("exp", 1, lambda input: torch.exp(input) + 1)
    x = torch.ones(2, 3)
    out = torch.empty(2, dtype=torch.int64)
    assert aten.sum(x, 1, out=out) is out
    assert out.tolist() == [3, 3]  # ATen sums in the dtype of out
    with pytest.raises(RuntimeError, match="can't be cast"):
        aten.exp(x, out=torch.empty(2, 3, dtype=torch.int64))


def test_a_kernel_without_out_serves_out_calls(slot: Slot) -> None:
    slot("softmax", 1, Counted(1.0))
    x, out = torch.randn(3), torch.empty(0)
    version = out._version

    assert aten.softmax(x, 0, out=out) is out
    torch.testing.assert_close(out, x.softmax(0) + 1)
    assert out._version > version


def test_a_kernel_with_out_writes_it(slot: Slot) -> None:
    given: list[Any] = []

    def kernel(input: Tensor, other: Tensor, *, alpha: float = 1, out: Tensor | None = None) -> Tensor:
        given.append(out)
        if out is None:
            return input + alpha * other
        shape = torch.broadcast_shapes(input.shape, other.shape)
        aten.prepare_out(out, shape, torch.promote_types(input.dtype, other.dtype), input.device)
        return out.copy_(input + alpha * other)

    slot("add", 0, kernel)
    x, out = torch.ones(3), torch.empty(0)
    assert aten.add(x, x, alpha=3, out=out) is out
    assert out.tolist() == [4, 4, 4]
    aten.add(x, x)
    assert [value is out for value in given] == [True, False]
    with pytest.raises(RuntimeError, match="can't be cast"):
        aten.add(x, x, out=torch.empty(3, dtype=torch.int64))


def test_a_kernel_with_several_outs(slot: Slot) -> None:
    def kernel(input: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
        values, indices = torch.sort(input, dim, descending)
        return values + 1, indices

    slot("sort", 0, kernel)
    x = torch.tensor([3.0, 1.0])
    outs = (torch.empty(0), torch.empty(0, dtype=torch.int64))
    assert aten.sort(x, out=outs) is outs
    assert outs[0].tolist() == [2, 4]
    assert aten.sort(x)[0].tolist() == [2, 4]


def test_out_and_gradients_give_atens_error(slot: Slot) -> None:
    slot("exp", 1, lambda input: input)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        aten.exp(torch.ones(2, requires_grad=True), out=torch.empty(2))


def test_without_a_backward_gradients_go_to_aten(slot: Slot) -> None:
    kernel = Counted(1.0)
    slot("softmax", 1, kernel)
    x = torch.randn(3, requires_grad=True)
    aten.softmax(x, 0)[0].backward()

    assert kernel.calls == 0
    assert x.grad is not None
    with torch.no_grad():
        aten.softmax(x, 0)
    assert kernel.calls == 1
    aten.softmax(x.detach(), 0)
    assert kernel.calls == 2


def _square_backward(ctx: Any, grad: Tensor) -> Any:
    (x,) = ctx.saved_tensors
    return 20 * x * grad  # ten times too much, to be told from ATen's


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("supported", [False, True])
def test_a_backward_is_used_where_the_kernel_supports_the_call(slot: Slot, compiled: bool, supported: bool) -> None:
    options: dict[str, Any] = {"backward": _square_backward, "setup_context": save_input}
    slot("square", 1, square, supports=lambda input: supported, **options)
    x = torch.tensor([1.0, 2.0], requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return aten.square(x)

    call = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    call(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == ([20, 40] if supported else [2, 4])
