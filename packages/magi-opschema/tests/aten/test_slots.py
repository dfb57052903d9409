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


X = torch.randn(3, 4)


def serving(x: Tensor = X, call: Callable[..., Tensor] = aten.softmax) -> int:
    """The shift of the kernel that serves a softmax of *x*, which tells it; 0 is ATen, bit for bit."""
    apart = call(x, -1) - x.softmax(-1)
    shift = int(apart.flatten()[0].round())
    torch.testing.assert_close(apart, torch.full_like(apart, shift), rtol=0, atol=1e-6 if shift else 0)
    return shift


def test_slot_8_is_always_there() -> None:
    assert list(aten.slots("softmax")) == [8]
    assert list(aten.slots("linalg.norm")) == list(aten.slots("linalg_norm")) == [8]


def test_the_lowest_slot_that_supports_the_call_serves(slot: Slot) -> None:
    slot("softmax", 5, Counted(2.0))
    slot("softmax", 1, Counted(1.0), supports=lambda input, dim, dtype=None: input.shape[0] == 3)

    assert list(aten.slots("softmax")) == [1, 5, 8]
    assert (serving(X), serving(X[:2])) == (1, 2)


def test_a_predicate_may_take_all_arguments_as_args(slot: Slot) -> None:
    slot("softmax", 1, Counted(1.0), supports=lambda args: args[0].shape[0] == 3)

    assert (serving(X), serving(X[:2])) == (1, 0)


def test_use_slot_goes_before_pin_and_pin_before_the_lowest(slot: Slot) -> None:
    slot("softmax", 1, Counted(1.0))
    slot("softmax", 2, Counted(2.0))
    aten.pin("softmax", 2)
    try:
        assert serving() == 2
        with aten.use_slot("softmax", 1):
            assert serving() == 1
            with aten.use_slot("softmax", 8):
                assert serving() == 0
            assert serving() == 1
        assert serving() == 2
    finally:
        aten.pin("softmax", None)
    assert serving() == 1


def test_a_chosen_slot_that_does_not_support_the_call_leaves_it_to_aten(slot: Slot) -> None:
    slot("softmax", 1, Counted(1.0))
    slot("softmax", 2, Counted(2.0), dtypes=(torch.float64,))
    with aten.use_slot("softmax", 2):
        assert (serving(X), serving(X.double())) == (0, 2)


def test_devices_and_dtypes_limit_a_kernel(slot: Slot) -> None:
    slot("softmax", 1, Counted(1.0), devices=("cuda",))
    slot("softmax", 2, Counted(2.0), devices=["cpu", "cuda"], dtypes={torch.float32})

    assert (serving(X), serving(X.double())) == (2, 0)


def test_use_slot_is_seen_by_its_own_thread_only(slot: Slot) -> None:
    slot("softmax", 1, Counted(1.0))
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with aten.use_slot("softmax", 8):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    assert serving() == 1
    leave.set()
    thread.join()


def test_contexts_may_close_in_any_order(slot: Slot) -> None:
    slot("softmax", 1, Counted(1.0))
    slot("softmax", 2, Counted(2.0))
    first, second = aten.use_slot("softmax", 1), aten.use_slot("softmax", 2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert serving() == serving(call=torch.compile(aten.softmax, backend="eager")) == 2
    second.__exit__(None, None, None)
    assert serving() == 1


def test_register_slot_is_a_decorator_and_removing_all_lower_slots_restores_aten() -> None:
    @aten.register_slot("softmax", 4)
    def kernel(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.softmax(input, dim) + 4

    assert serving() == 4
    assert callable(kernel)
    aten.unregister_slot("softmax", 4)
    assert serving() == 0


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
    slot("softmax", 1, Counted(1.0))
    x = X.clone().requires_grad_()
    aten.softmax(x, -1)[0, 0].backward()

    assert x.grad is not None
    assert serving(x) == 0
    with torch.no_grad():
        assert serving(x) == 1
    assert serving(x.detach()) == 1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("supported", [False, True])
def test_a_backward_is_used_where_the_kernel_supports_the_call(slot: Slot, compiled: bool, supported: bool) -> None:
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 20 * ctx.saved_tensors[0] * grad  # ten times too much, to be told from ATen's

    slot("square", 1, square, supports=lambda input: supported, backward=backward, setup_context=save_input)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    call: Any = torch.compile(aten.square, fullgraph=True, backend="aot_eager") if compiled else aten.square
    call(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == ([20, 40] if supported else [2, 4])
