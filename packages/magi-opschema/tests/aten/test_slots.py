# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, A006  # kernels name their parameters as ATen does
from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from magi_opschema import aten
from magi_opschema.aten import _torch_compat, errors, testing
from magi_opschema.aten._dispatch import library as _library
from magi_opschema.aten._dispatch import load as _load
from magi_opschema.aten._dispatch import registry as _registry
from magi_opschema.aten._dispatch.library import library_ops
from magi_opschema.aten.errors import KernelSignatureError, SlotError, UnknownOpError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


if TYPE_CHECKING:
    from collections.abc import Callable

    Slot = Callable[..., None]


class Counted:
    """A softmax kernel that counts its calls."""

    def __init__(self, shift: float = 0.0) -> None:
        self.calls = 0
        self.shift = shift

    def __call__(self, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        self.calls += 1
        return torch.softmax(input, dim, dtype=dtype) + self.shift


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
    kernel = Counted()
    slot("softmax", 1, kernel, devices=("cuda",))
    aten.softmax(torch.ones(2), 0)
    assert kernel.calls == 0
    other = Counted()
    slot("softmax", 2, other, devices=["cpu", "cuda"], dtypes={torch.float32})
    aten.softmax(torch.ones(2, dtype=torch.float64), 0)
    aten.softmax(torch.ones(2), 0)
    assert other.calls == 1


def test_removing_all_lower_slots_restores_aten(slot: Slot) -> None:
    x = torch.randn(3, 4)
    before = aten.softmax(x, -1)
    aten.register_slot("softmax", 3, Counted(1.0))
    assert not torch.equal(aten.softmax(x, -1), before)
    aten.unregister_slot("softmax", 3)
    assert torch.equal(aten.softmax(x, -1), before)


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


def test_register_slot_is_a_decorator(slot: Slot) -> None:
    @aten.register_slot("softmax", 4)
    def kernel(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros_like(input)

    try:
        assert aten.softmax(torch.ones(2), 0).sum() == 0
        assert callable(kernel)
    finally:
        aten.unregister_slot("softmax", 4)


def test_a_kernel_serves_every_overload_that_it_fits(slot: Slot) -> None:
    calls = []

    def any_mul(input, other):  # type: ignore[no-untyped-def]
        calls.append(type(other))
        return torch.mul(input, other)

    slot("mul", 0, any_mul)
    x = torch.ones(2)
    aten.mul(x, x)
    aten.mul(x, 2.0)
    assert calls == [Tensor, float]


def test_annotations_and_overload_names_narrow_a_kernel(slot: Slot) -> None:
    calls = []

    def tensors(input: Tensor, other: Tensor) -> Tensor:
        calls.append("annotated")
        return torch.mul(input, other)

    def scalars(input, other):  # type: ignore[no-untyped-def]
        calls.append("named")
        return torch.mul(input, other)

    slot("mul", 0, tensors)
    slot("mul.Scalar", 0, scalars)
    x = torch.ones(2)
    aten.mul(x, x)
    aten.mul(x, 2.0)
    assert calls == ["annotated", "named"]


def test_an_overload_of_a_submodule_is_named_with_it(slot: Slot) -> None:
    def norm(input, ord=None, dim=None, keepdim=False, *, dtype=None):  # type: ignore[no-untyped-def]
        return torch.zeros(())

    aten.register_slot("linalg.norm.default", 1, norm)
    try:
        assert aten.linalg.norm(torch.ones(3)) == 0
        assert aten.linalg.norm(torch.ones(3, 3), "fro") == 3  # another overload
    finally:
        aten.unregister_slot("linalg.norm", 1)


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
    def kernel(input: Tensor) -> Tensor:
        return input

    slot("exp", 1, kernel)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        aten.exp(x, out=torch.empty(2))


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


def _square(input: Tensor) -> Tensor:
    return input.detach() ** 2


def _square_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _square_backward(ctx: Any, grad: Tensor) -> Any:
    (x,) = ctx.saved_tensors
    return 20 * x * grad  # ten times too much, to be told from ATen's


@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_is_used(slot: Slot, compiled: bool) -> None:
    slot("square", 1, _square, backward=_square_backward, setup_context=_square_context)
    x = torch.tensor([1.0, 2.0], requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return aten.square(x)

    call = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    call(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [20, 40]


def test_a_backward_is_not_used_where_the_kernel_does_not_support_the_call(slot: Slot) -> None:
    slot(
        "square",
        1,
        _square,
        backward=_square_backward,
        setup_context=_square_context,
        supports=lambda input: input.shape[0] > 5,
    )
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    aten.square(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 4]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_calls_the_kernel_and_recompiles_on_a_change(slot: Slot, backend: str) -> None:
    kernel = Counted(1.0)
    slot("softmax", 1, kernel)
    x = torch.randn(3, 4)
    compiled = torch.compile(lambda x: aten.softmax(x, -1) * 2, fullgraph=True, backend=backend)

    torch.testing.assert_close(compiled(x), 2 * (x.softmax(-1) + 1))
    with aten.use_slot("softmax", 8):
        torch.testing.assert_close(compiled(x), 2 * x.softmax(-1))
    torch.testing.assert_close(compiled(x), 2 * (x.softmax(-1) + 1))
    aten.pin("softmax", 8)
    torch.testing.assert_close(compiled(x), 2 * x.softmax(-1))
    aten.pin("softmax", None)
    torch.testing.assert_close(compiled(x), 2 * (x.softmax(-1) + 1))
    aten.register_slot("softmax", 0, Counted(5.0))
    try:
        torch.testing.assert_close(compiled(x), 2 * (x.softmax(-1) + 5))
    finally:
        aten.unregister_slot("softmax", 0)


def test_a_change_of_slot_recompiles_once(slot: Slot) -> None:
    slot("softmax", 1, Counted(1.0))
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    compiled = torch.compile(lambda x: aten.softmax(x, -1), fullgraph=True, backend=backend)
    x = torch.randn(2)
    for _ in range(2):
        compiled(x)
        with aten.use_slot("softmax", 8):
            compiled(x)
    assert len(graphs) == 2
    assert graphs[1] == [torch.ops.aten.softmax.int]


@pytest.mark.parametrize("tag_out", [True, False])
def test_compiled_out_calls_reach_the_kernel(slot: Slot, tag_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tag = _torch_compat.tag_out() if tag_out else None
    if tag_out and tag is None:
        pytest.skip("Tag.out serves from torch 2.13")
    monkeypatch.setattr(_library, "tag_out", lambda: tag)
    base, function = ("exp", torch.exp) if tag_out else ("exp2", torch.exp2)

    def kernel(input: Tensor) -> Tensor:
        return torch.add(function(input), 1)

    slot(base, 1, kernel)
    surface = getattr(aten, base)

    def run(x: Tensor, out: Tensor) -> Any:
        return surface(x, out=out) * 1

    x, out = torch.randn(3), torch.empty(3)
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(x, out)
    torch.testing.assert_close(got, function(x) + 1)
    torch.testing.assert_close(out, function(x) + 1)
    op = library_ops()[f"{base}__out"]
    assert len(op._schema.returns) == (1 if tag_out else 0)


def test_an_out_operator_takes_symbolic_shapes_where_atens_own_fake_does_not(slot: Slot) -> None:
    slot("angle", 1, lambda input: torch.angle(input) + 1)

    def run(x: Tensor, out: Tensor) -> Tensor:
        return aten.angle(x, out=out) * 1

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (3, 5):
        x, out = torch.randn(size), torch.zeros(size)
        torch.testing.assert_close(compiled(x, out), torch.angle(x) + 1)
        torch.testing.assert_close(out, torch.angle(x) + 1)


def test_exported_programs_hold_the_library_operator(slot: Slot) -> None:
    slot("softmax", 1, Counted(1.0))

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return aten.softmax(x, -1)

    x = torch.randn(3, 4)
    for strict in (True, False):
        program = torch.export.export(Model(), (x,), strict=strict)
        assert "magi_aten" in str(program.graph)
        torch.testing.assert_close(program.module()(x), x.softmax(-1) + 1)


def _opcheck_kernels() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    x = torch.randn(3, 4)

    def relu(input: Tensor) -> Tensor:
        return input.clamp(min=0)

    def add(input: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
        return torch.add(input, other, alpha=alpha)

    def cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
        return torch.cat(tensors, dim)

    def sort(input: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
        values, indices = torch.ops.aten.sort.default(input, dim, descending)
        return values, indices

    return {
        "relu": (relu, (x,)),
        "add": (add, (x, x)),
        "cat": (cat, ([x, x],)),
        "sort": (sort, (x,)),
        "softmax": (Counted(), (x, -1)),
    }


@pytest.mark.parametrize("base", ["relu", "add", "cat", "sort", "softmax"])
def test_opcheck_passes_on_every_library_operator_of_a_base(slot: Slot, base: str) -> None:
    kernel, args = _opcheck_kernels()[base]
    slot(base, 1, kernel)
    function: Callable[..., Any] = getattr(aten, base)
    torch.compile(function, fullgraph=True, backend="eager")(*args)
    cell = __import__("magi_opschema.aten._dispatch.cells", fromlist=["cell_of"]).cell_of(base)
    pair = next(p for p in cell.pairs if p.leading in aten.slots(base)[1].kernels[0].serves)
    functional = _library.library_op(cell, pair, pair.functional, None)
    out = _library.library_op(cell, pair, pair.out, None)
    pinned = _library.library_op(cell, pair, pair.functional, 1)
    result = getattr(torch.ops.aten, base)(*args)
    results = result if isinstance(result, tuple) else (result,)
    names = [a.name for a in out._schema.arguments if a.is_out or (a.alias_info is not None and a.alias_info.is_write)]
    torch.library.opcheck(functional, args)
    torch.library.opcheck(pinned, args)
    torch.library.opcheck(out, args, {name: torch.empty_like(t) for name, t in zip(names, results, strict=True)})


def test_opcheck_passes_on_an_operator_with_a_backward(slot: Slot) -> None:
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad

    slot("square", 1, _square, backward=backward, setup_context=_square_context)
    x = torch.randn(3, requires_grad=True)
    aten.square(x)
    checked = [op for name, op in library_ops().items() if name.startswith("square__")]
    assert len(checked) >= 2
    for op in checked:
        if "slot" in op.name() or "out" not in op.name():
            torch.library.opcheck(op, (x,))


def test_fake_tensors_take_atens_meta(slot: Slot) -> None:
    kernel = Counted()
    slot("softmax", 1, kernel)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(3, 4))
        assert aten.softmax(fake, -1).shape == (3, 4)
    assert aten.softmax(fake, -1).shape == (3, 4)  # outside the mode too
    assert kernel.calls == 0


def test_vmap_and_autocast_are_atens(slot: Slot) -> None:
    kernel = Counted(1.0)
    slot("softmax", 1, kernel)
    x = torch.randn(5, 3)
    torch.testing.assert_close(torch.func.vmap(lambda row: aten.softmax(row, 0))(x), x.softmax(-1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert aten.softmax(x.bfloat16(), 0).dtype == torch.softmax(x.bfloat16(), 0).dtype
    torch.testing.assert_close(
        torch.func.grad(lambda t: aten.softmax(t, 0)[0])(x[0]), torch.func.grad(lambda t: t.softmax(0)[0])(x[0])
    )


def test_dispatch_modes_see_one_operator(slot: Slot) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    slot("softmax", 1, Counted())
    seen: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Log():  # type: ignore[no-untyped-call]
        aten.softmax(x, 0)
    assert seen[0] == "magi_aten.softmax__int.default"


def test_wrapper_subclasses_keep_atens_operators(slot: Slot) -> None:
    kernel = Counted(1.0)
    slot("softmax", 1, kernel)
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.randn(3), torch.randn(3))
    assert isinstance(aten.softmax(x, 0), TwoTensor)
    assert kernel.calls == 0


def test_inference_mode(slot: Slot) -> None:
    slot("softmax", 1, Counted(1.0))
    with torch.inference_mode():
        x, out = torch.ones(2), torch.empty(2)
        torch.testing.assert_close(aten.softmax(x, 0, out=out), x.softmax(0) + 1)


def test_parameters_and_lists_reach_the_kernel(slot: Slot) -> None:
    calls = []

    def cat(tensors, dim=0):  # type: ignore[no-untyped-def]
        calls.append(len(tensors))
        return torch.cat(tensors, dim)

    slot("cat", 1, cat)
    weight = torch.nn.Parameter(torch.ones(2))
    aten.cat([torch.ones(2), torch.ones(1)])
    with torch.no_grad():
        aten.cat([weight, weight, weight])
    assert calls == [2, 3]
    aten.cat([weight]).sum().backward()
    assert calls == [2, 3]
    assert weight.grad is not None


ENVIRONMENT = [
    ("8", "", "[8]\n8\n"),
    ("1", "", "[1, 8]\n1\n"),
    ("3", "slot 3 of aten::softmax has no kernel; active are 1, 8", ""),
    ("9", "MAGI_SLOT_softmax=9: slots are numbered 0 to 8", ""),
    ("fast", "MAGI_SLOT_softmax='fast' is no slot; give a number from 0 to 8", ""),
    ("-1", "MAGI_SLOT_softmax='-1' is no slot", ""),
]


@pytest.mark.slow
@pytest.mark.parametrize(("value", "error", "output"), ENVIRONMENT, ids=[value for value, _, _ in ENVIRONMENT])
def test_the_environment_is_read_at_the_first_call(value: str, error: str, output: str) -> None:
    code = """
import os, torch
from magi_opschema import aten
used = []
def kernel(input, dim, dtype=None):
    used.append(1)
    return torch.softmax(input, dim, dtype=dtype)
aten.register_slot("softmax", 1, kernel)
os.environ["MAGI_SLOT_softmax"] = VALUE
aten.softmax(torch.ones(2), 0)
if VALUE == "8":
    print([8]); print(8 if not used else 1)
else:
    print(list(aten.slots("softmax"))); print(1 if used else 8)
os.environ["MAGI_SLOT_softmax"] = "nonsense"
aten.softmax(torch.ones(2), 0)
""".replace("VALUE", repr(value))
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ}, capture_output=True, text=True, check=False)

    assert error in done.stderr
    assert done.stdout == output, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("value", "error", "used"), [("8", "", "0"), ("2", "", "2"), ("7", "slot 7 of aten", "")])
def test_the_environment_is_read_by_a_first_call_that_is_compiled(value: str, error: str, used: str) -> None:
    code = f"""
import os, torch
from magi_opschema import aten
used = [0]
def kernel(number):
    def softmax(input, dim, dtype=None):
        used.append(number)
        return torch.softmax(input, dim, dtype=dtype)
    return softmax
aten.register_slot("softmax", 1, kernel(1))
aten.register_slot("softmax", 2, kernel(2))
os.environ["MAGI_SLOT_softmax"] = {value!r}
call = torch.compile(lambda x: aten.softmax(x, 0), fullgraph=True, backend="aot_eager")
call(torch.ones(2))
print(used[-1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert error in done.stderr
    assert done.stdout.strip() == used, done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        (
            "MAGI_SLOT_sofmax",
            "1",
            "MAGI_SLOT_sofmax names no operator of the ATen surface; did you mean 'MAGI_SLOT_so",
        ),
        ("MAGI_SLOT_", "1", "MAGI_SLOT_ names no operator of the ATen surface"),
        ("MAGI_SLOT_linalg.norm", "8", "did you mean 'MAGI_SLOT_linalg_norm'?"),
        ("MAGI_SLOT_relu_", "8", "MAGI_SLOT_relu_ names no operator of the ATen surface"),
        ("MAGI_SLOT_softmax", "9", "MAGI_SLOT_softmax=9: slots are numbered 0 to 8"),
        ("MAGI_SLOT_softmax", "fast", "MAGI_SLOT_softmax='fast' is no slot; give a number from 0 to 8"),
        ("MAGI_SLOT_softmax", "²", "is no slot; give a number from 0 to 8"),
    ],
)
def test_a_variable_that_means_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, sentence: str
) -> None:
    assert "softmax" in dir(aten)  # loaded before
    monkeypatch.setenv(variable, value)
    with pytest.raises(SlotError, match=re.escape(sentence)):
        _registry.check_environment(is_complete=True)
    _load.default_surface.cache_clear()
    with pytest.raises(SlotError, match=re.escape(sentence)):
        getattr(aten, "not_an_operator")  # noqa: B009
    monkeypatch.delenv(variable)
    assert "softmax" in dir(aten)


WRONG: dict[str, Callable[[Any], object]] = {
    "slots": aten.slots,
    "load": aten.load,
    "pin": lambda value: aten.pin(value, 8),
    "pin, slot": lambda value: aten.pin("softmax", [value]),  # type: ignore[arg-type]
    "use_slot": lambda value: aten.use_slot(value, 8).__enter__(),
    "unregister_slot": lambda value: aten.unregister_slot(value, 1),
    "register_slot": lambda value: aten.register_slot(value, 1, _softmax),
    "register_slot, slot": lambda value: aten.register_slot("softmax", value, _softmax),
    "register_slot, fn": lambda value: aten.register_slot("softmax", 1, value),
    **{
        f"register_slot, {option}": lambda value, option=option: aten.register_slot(  # type: ignore[misc]
            "softmax", 1, _softmax, **{option: value}
        )
        for option in ("devices", "dtypes", "supports", "backward", "setup_context")
    },
    "check": lambda value: testing.check([value]),
    "check, device": lambda value: testing.check([("softmax", 8)], device=value),
}


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.parametrize("entry", WRONG)
@pytest.mark.parametrize("value", [3.5, b"q", [1], {"a": 1}, Unshowable(), object()], ids=lambda v: type(v).__name__)
def test_a_wrong_value_is_an_error_of_the_surface(entry: str, value: object) -> None:
    if (entry, type(value)) == ("register_slot, devices", dict):
        pytest.skip("a collection of names")
    with pytest.raises(errors.AtenError):
        WRONG[entry](value)
    assert list(aten.slots("softmax")) == [8]


def _softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return input


BAD_KERNELS: list[tuple[str, Any, str]] = [
    ("softmax", lambda input, dim: input, r"its positional parameters are \(input, dim, dtype\)"),
    ("softmax", lambda x, dim, dtype=None: x, r"its positional parameters are \(input, dim, dtype\)"),
    ("softmax", lambda dim, input, dtype=None: input, r"its positional parameters are"),
    ("softmax", lambda input, dim=-1, dtype=None: input, "its dim has no default"),
    ("softmax", lambda input, dim, dtype=3: input, "its dtype has the default None"),
    ("softmax", lambda *args, **kwargs: None, r"\*args hides parameters; spell them out"),
    ("softmax", lambda input, dim, dtype=None, *, out: input, "takes out as a keyword with default None"),
    ("softmax", lambda input, dim, dtype=None, out=None: input, "takes out as a keyword with default None"),
    ("add", lambda input, other, alpha=2: input, "its alpha has the default 1"),
    ("add", lambda input, other, *, beta=1: input, r"its keyword parameters are \(alpha\)"),
    ("add.Tensor", lambda input, other, alpha=1: input, r"its positional parameters are \(input, other\)"),
    ("relu", max, "has no signature that Python can read|is that of no overload"),
]


@pytest.mark.parametrize(("base", "kernel", "sentence"), BAD_KERNELS, ids=range(len(BAD_KERNELS)))
def test_a_wrong_signature_is_refused(base: str, kernel: Any, sentence: str) -> None:
    with pytest.raises(KernelSignatureError, match=sentence):
        aten.register_slot(base, 1, kernel)
    assert list(aten.slots(base.partition(".")[0])) == [8]


def test_a_wrong_annotation_is_refused() -> None:
    def kernel(input: int, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.ones(1)

    with pytest.raises(KernelSignatureError, match="its input is a Tensor"):
        aten.register_slot("softmax", 1, kernel)


BAD_CALLS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: aten.register_slot("softmax", 8, _softmax), SlotError, "numbered 0 to 7; 8 is ATen itself"),
    (lambda: aten.register_slot("softmax", -1, _softmax), SlotError, "numbered 0 to 7"),
    (lambda: aten.register_slot("softmax", True, _softmax), SlotError, "numbered 0 to 7"),
    (lambda: aten.register_slot("sofmax", 1, _softmax), UnknownOpError, "did you mean 'softmax'"),
    (lambda: aten.register_slot("softmax.outt", 1, _softmax), KernelSignatureError, "softmax"),
    (lambda: aten.register_slot("softmax", 1, _softmax, devices="cuda"), SlotError, r"devices=\('cuda',\)"),
    (
        lambda: aten.register_slot("softmax", 1, _softmax, dtypes=[3]),  # type: ignore[list-item]
        SlotError,
        "must be a collection of dtype",
    ),
    (lambda: aten.register_slot("softmax", 1, _softmax, devices=()), SlotError, "must be a collection of str"),
    (lambda: aten.pin("softmax", 3), SlotError, "slot 3 of aten::softmax has no kernel; active are 8"),
    (lambda: aten.pin("softmax", 9), SlotError, "numbered 0 to 8"),
    (lambda: aten.use_slot("softmax", 3).__enter__(), SlotError, "has no kernel"),
    (lambda: aten.use_slot("nothing_like_it", 8).__enter__(), UnknownOpError, "no operator 'nothing_like_it'"),
    (lambda: aten.slots("linalg.nrm"), UnknownOpError, "no operator"),
    (lambda: aten.unregister_slot("softmax", 3), SlotError, "has no kernel"),
]


@pytest.mark.parametrize(("call", "kind", "sentence"), BAD_CALLS, ids=range(len(BAD_CALLS)))
def test_bad_calls_are_told(call: Callable[[], Any], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        call()
    assert list(aten.slots("softmax")) == [8]


def test_a_taken_slot_is_refused(slot: Slot) -> None:
    slot("softmax", 1, _softmax)
    with pytest.raises(SlotError, match=r"slot 1 of aten::softmax already serves int; call unregister_slot"):
        aten.register_slot("softmax", 1, Counted())
