# SPDX-License-Identifier: Apache-2.0
"""An op works the same wherever torch lets one run: compiled, modes, subclasses, transforms, autocast, tracing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from _signatures import Listening, count_graphs
from magi_opschema import errors, magi_register_custom_op, op_def, register_kernel, register_vmap
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.torch_version import TorchVersion


@dataclass(frozen=True)
class Config:
    weight: Tensor
    factor: float = 2.0
    mode: Literal["add", "mul"] = "mul"


Op = Callable[[Tensor, Config], Tensor]


def make_op(ns: str, calls: list[Any] | None = None) -> Op:
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None

    @magi_register_custom_op(f"{ns}::apply", infer_output_meta_fn=["x"], backward_fn=backward)
    def apply(x: Tensor, cfg: Config) -> Tensor:
        if calls is not None:
            calls.append((x.dtype, torch.is_grad_enabled()))
        return x * cfg.weight * cfg.factor if cfg.mode == "mul" else x + cfg.weight

    return apply


def test_fake_tensors_never_reach_the_body(ns: str) -> None:
    calls: list[Any] = []
    apply = make_op(ns, calls)
    with FakeTensorMode():
        assert apply(torch.empty(5), Config(torch.empty(5))).shape == (5,)
    assert apply(torch.empty(5, device="meta"), Config(torch.empty(5, device="meta"))).shape == (5,)
    assert not calls


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_autocast(ns: str, backend: str | None) -> None:
    calls: list[Any] = []
    apply: Any = make_op(ns, calls)
    apply.register_autocast("cpu", torch.bfloat16)
    call = apply if backend is None else torch.compile(apply, fullgraph=True, backend=backend)
    cfg = Config(torch.ones(2))
    with torch.autocast("cpu", torch.bfloat16):
        assert call(torch.ones(2), cfg).dtype == torch.bfloat16
        assert call(torch.ones(2, requires_grad=True), cfg).dtype == torch.bfloat16
    assert call(torch.ones(2), cfg).dtype == torch.float32
    assert [dtype for dtype, _ in calls] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_vmap_by_loop_and_by_rule(ns: str) -> None:
    calls: list[Any] = []
    apply: Any = make_op(ns, calls)
    x, weight = torch.randn(4, 3), torch.randn(3)
    expected = x * weight * 2
    torch.testing.assert_close(torch.vmap(lambda x: apply(x, Config(weight)))(x), expected)
    assert len(calls) == 4

    @apply.register_vmap
    def rule(info: Any, in_dims: Any, x: Tensor, cfg: Config) -> Any:
        assert (info.batch_size, in_dims[0], in_dims[1]) == (4, 0, {"weight": None, "factor": None, "mode": None})
        return apply(x, cfg), 0

    calls.clear()
    torch.testing.assert_close(torch.vmap(lambda x: apply(x, Config(weight)))(x), expected)
    assert len(calls) == 1


@pytest.mark.parametrize("mutates_args", [(), ("x",)])
def test_vmap_over_an_empty_batch_needs_a_rule(ns: str, mutates_args: tuple[str, ...]) -> None:
    def body(x: Tensor, y: Tensor) -> Tensor:
        return y * 2

    op = magi_register_custom_op(f"{ns}::op", mutates_args=mutates_args, infer_output_meta_fn=["y"])(body)
    batch = torch.ones(0, 3)
    sentence = (
        r"::op: torch.vmap calls it for each element of the batch, which is empty, so that nothing says what it "
        r"returns\. Give a rule for the whole batch with register_vmap\. \(test_contexts"
    )
    with pytest.raises(errors.RuleError, match=sentence):
        torch.vmap(op)(batch, batch)
    register_vmap(op, lambda info, in_dims, x, y: (y * 2, in_dims[1]))
    assert torch.vmap(op)(batch, batch).shape == (0, 3)


def test_kernel_for_one_device_type(ns: str) -> None:
    @magi_register_custom_op(f"{ns}::launch", infer_output_meta_fn=["x"])
    def launch(x: Tensor, cfg: Config) -> Tensor:
        raise AssertionError("the body of other devices")

    @launch.register_kernel("cpu")
    def launch_cpu(x: Tensor, cfg: Config) -> Tensor:
        return x * cfg.factor

    x, cfg = torch.ones(2), Config(torch.ones(2))
    assert launch(x, cfg).tolist() == [2.0, 2.0]
    assert torch.compile(launch, fullgraph=True, backend="aot_eager")(x, cfg).tolist() == [2.0, 2.0]
    with pytest.raises(errors.RuleError, match="it has a body for 'cpu' already"):
        register_kernel(launch, "cpu", launch_cpu)
    with pytest.raises(errors.RuleError, match=r"::launch: the body takes \(x\), expected \(x, cfg\)\. Give"):
        register_kernel(launch, "cuda", lambda x: x)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle")  # torch 2.10
def test_profiler_sees_the_op(ns: str) -> None:
    apply = make_op(ns)
    with torch.profiler.profile() as profile:
        apply(torch.ones(2), Config(torch.ones(2)))
    assert f"{ns}::apply" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("with_backward", [False, True])
def test_functionalize(ns: str, with_backward: bool) -> None:
    """As make_fx is often asked for it; torch has no rule for the autograd.Function that other transforms see."""

    @magi_register_custom_op(
        f"{ns}::op",
        infer_output_meta_fn=["x"],
        backward_fn=(lambda ctx, grad: (grad * 2, None)) if with_backward else None,
    )
    def op(x: Tensor, cfg: Config) -> Tensor:
        return x * 2 + cfg.weight

    def f(x: Tensor, weight: Tensor) -> Tensor:
        y = op(x.view(4), Config(weight))
        y.view(2, 2).add_(1)
        return y

    x, weight = torch.ones(2, 2), torch.ones(4)
    functional = torch.func.functionalize(f)
    assert functional(x, weight).tolist() == f(x, weight).tolist()
    code = make_fx(functional)(x, weight).code
    assert f"{ns}.op" in code
    assert "add_" not in code
    batched = torch.vmap(functional, in_dims=(0, None))(torch.ones(3, 2, 2), weight)
    assert batched.tolist() == [f(x, weight).tolist()] * 3
    if with_backward:
        assert torch.func.grad(lambda x: functional(x, weight).sum())(x).tolist() == [[2.0] * 2] * 2


@torch.compiler.disable(recursive=False)
def between_regions(call: Callable[..., Any], *args: Any) -> Any:
    """*call* as it is made in eager mode by a function of which parts are compiled."""
    return call(*args)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mutates", [False, True])
def test_no_code_of_this_package_is_compiled_between_two_regions(ns: str, mutates: bool, grad: bool) -> None:
    @magi_register_custom_op(
        f"{ns}::op",
        mutates_args=["out"] if mutates else (),
        backward_fn=None if mutates else lambda ctx, grad: (grad, grad),
    )
    def op(x: Tensor, out: Tensor) -> Tensor:
        return x + out

    x, out = torch.ones(2, requires_grad=grad), torch.ones(2)

    def frames(call: Callable[..., Any]) -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

        def region(x: Tensor) -> Tensor:
            between_regions(call, x * 2, out)
            return x * 3

        torch.compile(region, backend="eager")(x)
        return int(torch._dynamo.utils.counters["frames"]["total"])

    packet = getattr(torch.ops, ns).op
    assert frames(op_def(op).torch_op) == frames(packet) == frames(torch.add)
    assert frames(op) == frames(packet) + 1  # the exposed function, as any function of the user's would be


class Functional(torch.Tensor):
    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Lists:
    some: list[Tensor]
    maybe: list[Tensor] | None = None


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("where", ["x", "some", "maybe", "a mode"])
def test_torch_function_sees_the_op(ns: str, where: str, grad: bool) -> None:
    @magi_register_custom_op(f"{ns}::total", infer_output_meta_fn=["x"], backward_fn=lambda ctx, grad: (grad, None))
    def total(x: Tensor, cfg: Lists) -> Tensor:
        return x + sum(cfg.some) + sum(cfg.maybe or ())

    def made(place: str) -> Tensor:
        plain = torch.ones(2)
        return plain.as_subclass(Functional) if place == where else plain

    x = made("x").requires_grad_(grad)
    cfg = Lists([torch.ones(2), made("some")], [made("maybe")])
    torch_op = op_def(total).torch_op
    total(torch.ones(2), Lists([]))  # the check of the first call looks at Tensors too
    Functional.seen.clear()
    mode = Listening()
    with mode if where == "a mode" else contextlib.nullcontext():
        output = total(x, cfg)
    assert output.tolist() == [4.0, 4.0]
    assert torch_op in (mode.seen if where == "a mode" else Functional.seen)


def test_an_op_without_tensors_under_a_torch_function_mode(ns: str) -> None:
    @magi_register_custom_op(f"{ns}::ones", infer_output_meta_fn=torch.empty)
    def ones(n: int) -> Tensor:
        return torch.ones(n)

    ones(2)
    with Listening() as mode:
        assert ones(3).shape == (3,)
    assert op_def(ones).torch_op in mode.seen


@pytest.mark.parametrize("grad", [False, True])
def test_torch_jit_trace_records_the_op(ns: str, grad: bool) -> None:
    apply = make_op(ns)
    weight = torch.ones(3)

    def run(x: Tensor) -> Tensor:
        return apply(x, Config(weight))

    traced = torch.jit.trace(run, (torch.ones(3).requires_grad_(grad),))
    assert f"{ns}::apply" in str(traced.graph)
    assert "PythonOp" not in str(traced.graph)


def test_a_gradient_is_recorded_at_the_outermost_op_alone(ns: str) -> None:
    """Below the autograd keys nothing is recorded, whatever requires a gradient there."""
    apply = make_op(ns)
    weight = torch.ones(3, requires_grad=True)
    inner: list[Tensor] = []

    @magi_register_custom_op(f"{ns}::outer")
    def outer(x: Tensor) -> Tensor:
        inner.append(apply(weight, Config(x)))
        return x.clone()

    for _ in range(2):
        outer(torch.ones(3))
    assert not any(output.requires_grad for output in inner)
    assert apply(weight, Config(torch.ones(3))).requires_grad


@pytest.mark.parametrize("factor", [2.0, 2, True, np.float64(2.0)], ids=repr)
def test_the_setup_sees_what_the_body_sees(ns: str, factor: Any) -> None:
    """The dispatcher makes a float of an int, also where a gradient is wanted."""
    seen: list[Any] = []

    @magi_register_custom_op(
        f"{ns}::scale",
        setup_context_fn=lambda ctx, inputs, output: seen.append(inputs[1].factor),
        backward_fn=lambda ctx, grad: (grad, None),
    )
    def scale(x: Tensor, cfg: Config) -> Tensor:
        seen.append(cfg.factor)
        return x * cfg.factor

    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        scale(x, Config(torch.ones(1), factor)).sum().backward()
    assert seen == [float(factor)] * 4
    assert {type(value) for value in seen} == {float}


@pytest.mark.parametrize("mutates", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_contexts_of_the_fast_lane_are_left(ns: str, depth: int, mutates: bool) -> None:
    """Also by an error, and where an op calls itself; afterwards a gradient is recorded as before."""

    def body(x: Tensor, left: int, fail: bool) -> Tensor:
        if left:
            return op(x, left - 1, fail)  # type: ignore[no-any-return]
        if fail:
            raise RuntimeError("planted")
        return x.clone()

    op: Any = magi_register_custom_op(f"{ns}::op", mutates_args=["x"] if mutates else ())(body)
    for _ in range(3):
        op(torch.ones(2), depth, False)
        with pytest.raises(RuntimeError, match="planted"):
            op(torch.ones(2), depth, True)
    assert (torch.ones(2, requires_grad=True) * 2).requires_grad
    version = torch.ones(2)
    before = version._version
    version.add_(1)
    assert version._version == before + 1


class Crop(NamedTuple):
    start: int
    size: int


@dataclass(frozen=True)
class Affine:
    weight: Tensor
    bias: Tensor | None = None
    mode: Literal["mul", "add"] = "mul"


@dataclass(frozen=True)
class Plan:
    affine: Affine
    crop: Crop
    scale: float = 2.0
    terms: tuple[Tensor, ...] = ()


def plain(x: Tensor, plan: Plan) -> Tensor:
    """What the op does, in operators that autograd knows."""
    x = x[plan.crop.start : plan.crop.start + plan.crop.size]
    y = x * plan.affine.weight if plan.affine.mode == "mul" else x + plan.affine.weight
    y = y * plan.scale
    if plan.affine.bias is not None:
        y = y + plan.affine.bias
    for term in plan.terms:
        y = y + term
    return y


def fake(x: Tensor, plan: Plan) -> Tensor:
    return x.new_empty(plan.crop.size, x.shape[1])


def save(ctx: Any, inputs: Any, output: Any) -> None:
    x, plan = inputs
    ctx.save_for_backward(x, plan.affine.weight)
    ctx.plan = (plan.crop, plan.affine.mode, plan.scale, plan.affine.bias is not None, len(plan.terms))


def backward(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    crop, mode, scale, has_bias, terms = ctx.plan
    piece = x[crop.start : crop.start + crop.size]
    inner = grad * scale
    grad_piece, grad_weight = (inner * weight, inner * piece) if mode == "mul" else (inner, inner)
    below = x.new_zeros(x.shape[0] - crop.start - crop.size, x.shape[1])
    grad_x = torch.cat([x.new_zeros(crop.start, x.shape[1]), grad_piece, below])
    affine = {"weight": grad_weight.sum(0), "bias": grad.sum(0) if has_bias else None}
    return grad_x, {"affine": affine, "terms": [grad] * terms}


def make_crop(ns: str) -> Callable[[Tensor, Plan], Tensor]:
    options: Any = {"infer_output_meta_fn": fake, "setup_context_fn": save, "backward_fn": backward}

    @magi_register_custom_op(f"{ns}::apply", **options)
    def apply(x: Tensor, plan: Plan) -> Tensor:
        return plain(x, plan).clone()

    return apply


def inputs(rows: int, requires_grad: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = [(rows, 3), (3,), (3,), (rows - 1, 3)]
    return [torch.randn(shape, generator=generator, requires_grad=requires_grad) for shape in shapes]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("mode", [pytest.param("training", marks=pytest.mark.kernels), "no_grad", "inference"])
def test_as_the_plain_body(ns: str, mode: str, backend: str, dynamic: bool) -> None:
    """The sizes of a record are symbols of the graph when shapes are dynamic."""
    apply = make_crop(ns)

    def call(fn: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor, term: Tensor) -> Tensor:
        plan = Plan(Affine(weight, bias), Crop(1, x.shape[0] - 1), 3.0, (term,))
        return fn(x.sin(), plan).relu() + fn(x, Plan(Affine(weight, mode="add"), Crop(0, x.shape[0] - 1)))

    compiled, graphs = count_graphs(lambda *tensors: call(apply, *tensors), dynamic=dynamic, backend=backend)
    guard = {"training": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    sizes = (6, 9, 7) if dynamic else (6, 9)  # no two are equal, which would make them one symbol
    for rows in sizes:
        with guard():
            tensors = inputs(rows, mode == "training")
            expected, found, eager = call(plain, *tensors), compiled(*tensors), call(apply, *tensors)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(eager, expected)
        if mode == "training":
            for output in (found, eager):
                torch.testing.assert_close(
                    torch.autograd.grad(output.square().sum(), tensors),
                    torch.autograd.grad(expected.square().sum(), tensors, retain_graph=True),
                )
    # Up to torch 2.11 the float of the record is a symbol first, which AOTAutograd rejects, and Dynamo starts again.
    attempts = int(dynamic and backend != "eager" and torch.__version__.startswith(("2.10.", "2.11.")))
    assert len(graphs) == attempts + (1 if dynamic else len(sizes))
    targets = [node.target for node in graphs[-1].graph.nodes]
    assert targets.count(op_def(apply).torch_op) == 2


@pytest.mark.parametrize("form", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_tensor_subclass(ns: str, form: str, grad: bool) -> None:
    """A subclass gets the op once for each of its parts, also under autograd."""
    apply = make_crop(ns)
    parts = torch.randn(2, 4, 3)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return apply(x, Plan(Affine(weight), Crop(1, 3)))

    if form != "eager":
        call = torch.compile(call, fullgraph=True, backend=form)
    x = TwoTensor(parts[0].clone(), parts[1].clone()).requires_grad_(grad)
    weight = torch.arange(3.0)
    found = call(x, weight)
    assert isinstance(found, TwoTensor)
    torch.testing.assert_close(found.a, parts[0][1:] * weight * 2)
    torch.testing.assert_close(found.b, parts[1][1:] * weight * 2)
    if grad:
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert isinstance(gradient, TwoTensor)
        torch.testing.assert_close(gradient.b[1:], weight.expand(3, 3) * 2)


@pytest.mark.parametrize("form", ["eager", "compiled"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_dispatch_mode(ns: str, recorder: Any, form: str, grad: bool) -> None:
    """torch runs compiled functions in eager mode under a dispatch mode of the user's."""
    apply = make_crop(ns)

    def call(x: Tensor) -> Tensor:
        return apply(x, Plan(Affine(torch.ones(3)), Crop(0, 2)))

    if form == "compiled":
        call = torch.compile(call, backend="aot_eager")
    x = torch.ones(4, 3, requires_grad=grad)
    with recorder:
        found = call(x)
    assert found.tolist() == [[2.0] * 3] * 2
    assert op_def(apply).torch_op in recorder.seen


FAKES: dict[str, Any] = {
    "the argument": lambda x: (x, torch.empty_like(x)),
    "one twice": lambda x: (torch.empty_like(x),) * 2,
    "the argument twice": lambda x: (x, x),
    "a view": lambda x: (x.view(-1), x[:]),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", FAKES)
def test_a_fake_may_repeat_a_tensor(ns: str, kind: str, backend: str) -> None:
    """A tracer knows a Tensor by its identity: torch's own custom_op gives wrong values here, in silence."""

    @magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=FAKES[kind])
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    x = torch.arange(1.0, 4.0)
    compiled = torch.compile(lambda x: (*op(x), x + 1), fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), (x * 2, x * 3, x + 1))
    assert op(x)[0].tolist() == [2.0, 4.0, 6.0]


@dataclass(frozen=True)
class Nested:
    scale: float = 2.0


@dataclass(frozen=True)
class ByValue:
    nested: Nested = Nested()
    factor: float = 3.0


@dataclass(frozen=True)
class ByClass:
    nested: Nested = field(default_factory=Nested)
    factor: float = 3.0


@dataclass(frozen=True)
class ByFunction:
    nested: Nested = field(default_factory=lambda: Nested())  # noqa: PLW0108
    factor: float = 3.0


@pytest.mark.parametrize("cls", [ByValue, ByClass, ByFunction])
def test_a_record_with_a_record_for_a_default(ns: str, cls: Any) -> None:
    """What works in a compiled function, as README, ops-cookbook and compatibility say."""

    def body(x: Tensor, cfg: Any) -> Tensor:
        return x * float(cfg.nested.scale * cfg.factor)

    body.__annotations__["cfg"] = cls
    op: Any = magi_register_custom_op(f"{ns}::op")(body)
    outside = cls()
    makers: list[Callable[[], Any]] = [lambda: outside, lambda: cls(nested=Nested(), factor=3.0)]
    if cls is ByFunction:
        makers.append(cls)
    elif cls is ByValue and TorchVersion(torch.__version__) < "2.13":
        makers.pop()  # there Dynamo makes the default too, and cannot make a record
    for make in makers:
        compiled: Any = torch.compile(lambda x, make=make: op(x, make()), fullgraph=True, backend="eager")  # type: ignore[misc]
        torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 6.0))
