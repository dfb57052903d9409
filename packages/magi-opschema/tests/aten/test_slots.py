# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, A006  # kernels name their parameters as ATen does
"""Which slot serves a call, and what ATen writes for the callers of its kernel: `out=`, gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _slot_kernels import Counted, save_input, square
from magi_opschema import aten
from torch import Tensor


Slot = Callable[..., None]


def test_slot_8_is_always_there() -> None:
    assert list(aten.slots("softmax")) == [8]
    assert list(aten.slots("linalg.norm")) == list(aten.slots("linalg_norm")) == [8]


def test_the_lowest_slot_that_supports_the_call_serves(slot: Slot) -> None:
    x = torch.randn(3, 4)
    first, second = Counted(1.0), Counted(2.0)
    slot("softmax", 5, second)
    slot("softmax", 1, first, supports=lambda input, dim, dtype=None: input.shape[0] == 3)

    assert list(aten.slots("softmax")) == [1, 5, 8]
    torch.testing.assert_close(aten.softmax(x, -1), x.softmax(-1) + 1)
    torch.testing.assert_close(aten.softmax(x[:2], -1), x[:2].softmax(-1) + 2)


def test_a_predicate_may_take_all_arguments_as_args(slot: Slot) -> None:
    kernel = Counted()
    slot("softmax", 1, kernel, supports=lambda args: args[1] == 0)
    aten.softmax(torch.ones(2, 2), 1)
    assert kernel.calls == 0
    aten.softmax(torch.ones(2, 2), 0)
    assert kernel.calls == 1


def test_use_slot_goes_before_pin_and_pin_before_the_lowest(slot: Slot) -> None:
    x = torch.randn(3, 4)
    one, two = Counted(1.0), Counted(2.0)
    slot("softmax", 1, one)
    slot("softmax", 2, two)
    aten.pin("softmax", 2)
    try:
        torch.testing.assert_close(aten.softmax(x, -1), x.softmax(-1) + 2)
        with aten.use_slot("softmax", 1):
            torch.testing.assert_close(aten.softmax(x, -1), x.softmax(-1) + 1)
            with aten.use_slot("softmax", 8):
                assert torch.equal(aten.softmax(x, -1), x.softmax(-1))
            torch.testing.assert_close(aten.softmax(x, -1), x.softmax(-1) + 1)
        torch.testing.assert_close(aten.softmax(x, -1), x.softmax(-1) + 2)
    finally:
        aten.pin("softmax", None)
    torch.testing.assert_close(aten.softmax(x, -1), x.softmax(-1) + 1)


def test_a_pinned_slot_that_does_not_support_the_call_leaves_it_to_aten(slot: Slot) -> None:
    one, two = Counted(1.0), Counted(2.0)
    slot("softmax", 1, one)
    slot("softmax", 2, two, dtypes=(torch.float64,))
    x = torch.randn(3)
    with aten.use_slot("softmax", 2):
        assert torch.equal(aten.softmax(x, 0), x.softmax(0))
        aten.softmax(x.double(), 0)
    assert (one.calls, two.calls) == (0, 1)


def test_devices_and_dtypes_limit_a_kernel(slot: Slot) -> None:
    kernel, other = Counted(), Counted()
    slot("softmax", 1, kernel, devices=("cuda",))
    aten.softmax(torch.ones(2), 0)
    slot("softmax", 2, other, devices=["cpu", "cuda"], dtypes={torch.float32})
    aten.softmax(torch.ones(2, dtype=torch.float64), 0)
    aten.softmax(torch.ones(2), 0)
    assert (kernel.calls, other.calls) == (0, 1)


def test_use_slot_is_seen_by_its_own_thread_only(slot: Slot) -> None:
    kernel = Counted(1.0)
    slot("softmax", 1, kernel)
    x = torch.randn(3)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with aten.use_slot("softmax", 8):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    torch.testing.assert_close(aten.softmax(x, 0), x.softmax(0) + 1)
    leave.set()
    thread.join()


def test_contexts_may_close_in_any_order(slot: Slot) -> None:
    slot("softmax", 1, Counted(1.0))
    slot("softmax", 2, Counted(2.0))
    x = torch.randn(3)
    first, second = aten.use_slot("softmax", 1), aten.use_slot("softmax", 2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    torch.testing.assert_close(aten.softmax(x, 0), x.softmax(0) + 2)
    torch.testing.assert_close(torch.compile(aten.softmax, backend="eager")(x, 0), x.softmax(0) + 2)
    second.__exit__(None, None, None)
    torch.testing.assert_close(aten.softmax(x, 0), x.softmax(0) + 1)


def test_register_slot_is_a_decorator_and_removing_all_lower_slots_restores_aten() -> None:
    x = torch.randn(3)

    @aten.register_slot("softmax", 4)
    def kernel(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros_like(input)

    assert aten.softmax(x, 0).sum() == 0
    assert callable(kernel)
    aten.unregister_slot("softmax", 4)
    assert torch.equal(aten.softmax(x, 0), x.softmax(0))


@pytest.mark.parametrize("named", [False, True])
def test_annotations_and_overload_names_narrow_a_kernel(named: bool, slot: Slot) -> None:
    calls = []

    def any_mul(input, other):  # type: ignore[no-untyped-def]
        calls.append("named" if named else type(other))
        return torch.mul(input, other)

    def tensors(input: Tensor, other: Tensor) -> Tensor:
        calls.append("annotated")
        return torch.mul(input, other)

    if named:
        slot("mul", 0, tensors)
    slot("mul.Scalar" if named else "mul", 0, any_mul)
    x = torch.ones(2)
    aten.mul(x, x)
    aten.mul(x, 2.0)
    assert calls == (["annotated", "named"] if named else [Tensor, float])


def test_an_overload_of_a_submodule_is_named_with_it(slot: Slot) -> None:
    def norm(input, ord=None, dim=None, keepdim=False, *, dtype=None):  # type: ignore[no-untyped-def]
        return torch.zeros(())

    slot("linalg.norm.default", 1, norm)
    assert aten.linalg.norm(torch.ones(3)) == 0
    assert aten.linalg.norm(torch.ones(3, 3), "fro") == 3  # another overload


def test_a_kernel_may_have_defaults_that_are_lists(slot: Slot) -> None:
    calls = []

    def pool(input, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):  # type: ignore[no-untyped-def]
        calls.append(stride)
        return torch.ops.aten.max_pool2d_with_indices(input, kernel_size, stride, padding, dilation, ceil_mode)

    slot("max_pool2d_with_indices", 1, pool)
    assert aten.max_pool2d_with_indices(torch.ones(1, 1, 4, 4), 2)[0].shape == (1, 1, 2, 2)
    assert calls == [()]


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
