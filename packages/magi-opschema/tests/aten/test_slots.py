# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, A006  # kernels name their parameters as ATen does
"""Which slot serves a call, and what ATen writes for the callers of its kernel: `out=`, gradients.

Then the kernels of slots under what traces a call: compilation, export, fakes, modes, subclasses. Last what the slots
refuse, from the environment, from a signature, from a call.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _signatures import Calls, Unshowable, count_graphs
from _slot_kernels import Counted, save_input, square
from magi_opschema import aten
from magi_opschema.aten import _torch_compat, errors
from magi_opschema.aten._dispatch import kernels as _kernels
from magi_opschema.aten._dispatch import route
from magi_opschema.aten._dispatch import slots as _slots
from magi_opschema.aten._dispatch.slots import _FirstCall
from magi_opschema.aten.errors import KernelSignatureError, SlotError, UnknownOpError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


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


@pytest.mark.parametrize(
    ("kernels", "served"),
    [
        ({5: {}, 1: {"supports": lambda input, dim, dtype=None: input.shape[0] == 3}}, (1, 5, 1)),
        ({1: {"supports": lambda args: args[0].shape[0] == 3}}, (1, 0, 1)),
        ({1: {"devices": ("cuda",)}, 2: {"devices": ["cpu", "cuda"], "dtypes": {torch.float32}}}, (2, 2, 0)),
    ],
    ids=["predicate", "predicate of all arguments", "devices and dtypes"],
)
def test_the_lowest_slot_that_supports_the_call_serves(
    kernels: dict[int, dict[str, Any]], served: tuple[int, ...], slot: Slot
) -> None:
    for number, options in kernels.items():
        slot("softmax", number, Counted(float(number)), **options)

    assert list(aten.slots("softmax")) == [*sorted(kernels), 8]
    assert (serving(X), serving(X[:2]), serving(X.double())) == served


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


@pytest.mark.parametrize("compiled", [False, True])
def test_a_number_in_the_place_of_a_tensor_is_left_to_aten(slot: Slot, compiled: bool) -> None:
    def kernel(input: Tensor, other: Tensor) -> Tensor:
        return torch.mul(input, other) + 100

    slot("mul.Tensor", 0, kernel, supports=lambda input, other: input.dim() == 2)

    mul: Any = aten.mul

    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return mul(2, x), mul(2, x, out=torch.empty_like(x)), mul(x, x)

    graphs: list[Any] = []
    call: Any = run
    if compiled:
        call, graphs = count_graphs(run, backend="aot_eager")
    torch.testing.assert_close(call(X), (2 * X, 2 * X, X * X + 100))
    with aten.use_slot("mul", 8):
        torch.testing.assert_close(call(X), (2 * X, 2 * X, X * X))
    torch.testing.assert_close(call(X), (2 * X, 2 * X, X * X + 100))
    assert len(graphs) == 2 * compiled


def test_what_is_no_tensor_reaches_no_kernel(slot: Slot) -> None:
    slot("square", 0, lambda input: pytest.fail("ATen must refuse this call"))
    with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor' for argument 'self'"):
        aten.square(2)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_kernel_without_out_serves_out_calls(slot: Slot, mode: Any) -> None:
    slot("softmax", 1, Counted(1.0))
    with mode():
        x, out = torch.randn(3), torch.empty(0)
        assert aten.softmax(x, 0, out=out) is out
        torch.testing.assert_close(out, x.softmax(0) + 1)
    assert out.is_inference() or out._version > 0


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
    assert torch.autograd.grad(call(x).sum(), x)[0].tolist() == ([20, 40] if supported else [2, 4])


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_calls_the_kernel_and_recompiles_once_on_a_change(slot: Slot, backend: str) -> None:
    slot("softmax", 1, Counted(1.0))
    x = torch.randn(3, 4)
    compiled, graphs = count_graphs(lambda x: aten.softmax(x, -1) * 2, backend=backend)

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
    called = [next(node.target for node in graph.graph.nodes if node.op == "call_function") for graph in graphs]
    assert list(map(str, called)) == ["magi_aten.softmax__int.default", "aten.softmax.int"]


@pytest.mark.parametrize("tag_out", [True, False])
def test_compiled_out_calls_reach_the_kernel(slot: Slot, tag_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tag = _torch_compat.tag_out() if tag_out else None
    if tag_out and tag is None:
        pytest.skip("Tag.out serves from torch 2.13")
    monkeypatch.setattr(route, "tag_out", lambda: tag)
    base, function = ("exp", torch.exp) if tag_out else ("exp2", torch.exp2)

    def kernel(input: Tensor) -> Tensor:
        return torch.add(function(input), 1)

    # An operator stays defined, with or without the tag. No other test asks for this one, which prefers the slot 6.
    slot(base, 6, kernel)
    surface = getattr(aten, base)

    def run(x: Tensor, out: Tensor) -> Any:
        return surface(x, out=out) * 1

    x, out = torch.randn(3), torch.empty(3)
    with aten.use_slot(base, 6):
        got = torch.compile(run, fullgraph=True, backend="aot_eager")(x, out)
    torch.testing.assert_close(got, function(x) + 1)
    torch.testing.assert_close(out, function(x) + 1)
    op = route.library_ops[f"{base}__out__use6"]
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

    x = torch.randn(3, 4)
    for strict in (True, False):
        program = torch.export.export(Calls(lambda x: aten.softmax(x, -1)), (x,), strict=strict)
        assert "magi_aten" in str(program.graph)
        torch.testing.assert_close(program.module()(x), x.softmax(-1) + 1)


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


def test_dispatch_modes_see_one_operator(slot: Slot, recorder: Any) -> None:
    slot("softmax", 1, Counted())
    x = torch.ones(2)
    with recorder:
        aten.softmax(x, 0)
    assert str(recorder.seen[0]) == "magi_aten.softmax__int.default"


def test_wrapper_subclasses_keep_atens_operators(slot: Slot) -> None:
    kernel = Counted(1.0)
    slot("softmax", 1, kernel)
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.randn(3), torch.randn(3))
    assert isinstance(aten.softmax(x, 0), TwoTensor)
    assert kernel.calls == 0


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


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("value", "outcome"),
    [("8", (0, 0)), ("2", (0, 2)), ("3", "slot 3 of aten::softmax has no kernel; active are 1, 2, 8")],
)
def test_the_environment_is_read_once_at_the_first_call(
    slot: Slot, value: str, outcome: tuple[int, int] | str, compiled: bool
) -> None:
    first, second = Counted(), Counted()
    slot("softmax", 1, first)
    slot("softmax", 2, second)
    cell = _kernels.cells["softmax"]
    call: Any = torch.compile(aten.softmax, fullgraph=True, backend="aot_eager") if compiled else aten.softmax
    with pytest.MonkeyPatch.context() as patch:
        for name, unread in (("environment_read", False), ("from_environment", None), ("eager", _FirstCall(cell))):
            patch.setattr(cell, name, unread)
        patch.setenv("MAGI_SLOT_softmax", value)
        if isinstance(outcome, str):
            with pytest.raises(SlotError, match=outcome):
                call(torch.ones(2), 0)
            return
        call(torch.ones(2), 0)
        patch.setenv("MAGI_SLOT_softmax", "nonsense")
        call(torch.ones(2), 0)
    assert (first.calls, second.calls) == outcome


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("MAGI_SLOT_sofmax", "1", "names no operator of the ATen surface; did you mean 'MAGI_SLOT_softmax'"),
        ("MAGI_SLOT_", "1", "MAGI_SLOT_ names no operator of the ATen surface"),
        ("MAGI_SLOT_linalg.norm", "8", "did you mean 'MAGI_SLOT_linalg_norm'?"),
        ("MAGI_SLOT_relu_", "8", "MAGI_SLOT_relu_ names no operator of the ATen surface"),
        ("MAGI_SLOT_softmax", "9", "MAGI_SLOT_softmax=9: slots are numbered 0 to 8"),
        ("MAGI_SLOT_softmax", "fast", "MAGI_SLOT_softmax='fast' is not a slot; give a number from 0 to 8"),
        ("MAGI_SLOT_softmax", "-1", "MAGI_SLOT_softmax='-1' is not a slot"),
        ("MAGI_SLOT_softmax", "²", "is not a slot; give a number from 0 to 8"),
    ],
)
def test_a_variable_that_means_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, sentence: str
) -> None:
    assert "softmax" in dir(aten)  # loaded before
    monkeypatch.setenv(variable, value)
    _slots.default_surface.cache_clear()
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
}


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


def _of_a_number(input: int, dim: int, dtype: torch.dtype | None = None) -> Any:
    return input


BAD_KERNELS: list[tuple[str, Any, str]] = [
    ("softmax", lambda dim, input, dtype=None: input, r"its positional parameters are \(input, dim, dtype\)"),
    ("softmax", lambda input, dim=-1, dtype=None: input, "its dim has no default"),
    ("softmax", lambda input, dim, dtype=3: input, "its dtype has the default None"),
    ("softmax", lambda *args, **kwargs: None, r"\*args hides parameters; spell them out"),
    ("softmax", lambda input, dim, dtype=None, *, out: input, "takes out as a keyword with default None"),
    ("softmax", lambda input, dim, dtype=None, out=None: input, "takes out as a keyword with default None"),
    ("add", lambda input, other, *, beta=1: input, r"its keyword parameters are \(alpha\)"),
    ("add.Tensor", lambda input, other, alpha=1: input, r"its positional parameters are \(input, other\)"),
    ("softmax", _of_a_number, "its input is a Tensor"),
    ("relu", max, "has no signature that Python can read|is that of no overload"),
]


@pytest.mark.parametrize(("base", "kernel", "sentence"), BAD_KERNELS, ids=range(len(BAD_KERNELS)))
def test_a_wrong_signature_is_refused(base: str, kernel: Any, sentence: str) -> None:
    with pytest.raises(KernelSignatureError, match=sentence):
        aten.register_slot(base, 1, kernel)
    assert list(aten.slots(base.partition(".")[0])) == [8]


BAD_CALLS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: aten.register_slot("softmax", 8, _softmax), SlotError, "numbered 0 to 7; 8 is ATen itself"),
    (lambda: aten.register_slot("softmax", True, _softmax), SlotError, "numbered 0 to 7"),
    (lambda: aten.register_slot("sofmax", 1, _softmax), UnknownOpError, "did you mean 'softmax'"),
    (lambda: aten.register_slot("softmax.outt", 1, _softmax), KernelSignatureError, "softmax"),
    (lambda: aten.register_slot("softmax", 1, _softmax, devices="cuda"), SlotError, r"devices=\('cuda',\)"),
    (
        lambda: aten.register_slot("softmax", 1, _softmax, dtypes=[3]),  # type: ignore[list-item]
        SlotError,
        "must be a collection of dtype",
    ),
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
