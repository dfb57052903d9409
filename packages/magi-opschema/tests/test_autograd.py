# SPDX-License-Identifier: Apache-2.0
"""Gradients at the user's signature: every form of them, double backward, transforms, compilation, errors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import pytest
import torch
from magi_opschema import ObjectHandle, errors, magi_register_custom_op, op_def, see_through_object
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.torch_version import TorchVersion


@dataclass(frozen=True)
class Inner:
    shift: Tensor | None = None
    scale: float = 2.0


# Up to torch 2.12 Dynamo makes no instance of a class that has an instance of another for a default.
NO_INNER: Any = Inner() if TorchVersion(torch.__version__) >= "2.13.0" else field(default_factory=Inner)


@dataclass(frozen=True)
class Params:
    weight: Tensor
    inner: Inner = NO_INNER


@dataclass(frozen=True)
class Outputs:
    y: Tensor
    z: Tensor
    count: int


class Pair(NamedTuple):
    y: Tensor
    z: Tensor


def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, params = inputs
    assert isinstance(params, Params)
    ctx.save_for_backward(x, params.weight)
    ctx.scale, ctx.has_shift = params.inner.scale, params.inner.shift is not None


def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    x, weight = ctx.saved_tensors
    return grad * weight * ctx.scale, grad * x * ctx.scale, grad if ctx.has_shift else None


def as_dict(ctx: Any, grad: Tensor) -> Any:
    x, weight, shift = gradients(ctx, grad)
    return x, {"weight": weight, "inner": {"shift": shift}}


def as_instance(ctx: Any, grad: Tensor) -> Any:
    x, weight, shift = gradients(ctx, grad)
    return x, Params(weight, Inner(shift, 77.0))


def as_tuple(ctx: Any, grad: Tensor) -> Any:
    x, weight, shift = gradients(ctx, grad)
    return x, (weight, (shift, None))


FORMS = [as_dict, as_instance, as_tuple]


def make_affine(ns: str, backward: Callable[..., Any], setup: Callable[..., None] = save) -> Callable[..., Tensor]:
    @magi_register_custom_op(f"{ns}::affine", infer_output_meta_fn=["x"], setup_context_fn=setup, backward_fn=backward)
    def affine(x: Tensor, params: Params) -> Tensor:
        y = x * params.weight * params.inner.scale
        return y if params.inner.shift is None else y + params.inner.shift

    return affine


def make_lists(ns: str) -> Callable[..., Any]:
    def backward(ctx: Any, grads: list[Tensor]) -> Any:
        return [grad * 2 for grad in grads], None

    def fake(xs: list[Tensor], rest: list[Tensor | None]) -> list[Tensor]:
        return [torch.empty_like(x) for x in xs]

    @magi_register_custom_op(f"{ns}::lists", infer_output_meta_fn=fake, backward_fn=backward)
    def lists(xs: list[Tensor], rest: list[Tensor | None]) -> list[Tensor]:
        return [x * 2 for x in xs]

    return lists


def doubles(count: int) -> list[Tensor]:
    return [torch.randn(3, dtype=torch.double, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize("form", FORMS)
def test_first_and_second_gradients_through_dataclass_leaves(ns: str, form: Callable[..., Any]) -> None:
    affine = make_affine(ns, form)

    def call(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        return affine(x, Params(weight, Inner(shift)))

    assert gradcheck(call, doubles(3))
    assert gradgradcheck(call, doubles(3))
    assert gradcheck(lambda x, weight: affine(x, Params(weight)), doubles(2))


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.11.0", reason="Dynamo of torch 2.10 traces no match statement")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_compiled_autograd(ns: str, form: Callable[..., Any], is_compiled: bool) -> None:
    """Dynamo traces the backward too, with symbolic sizes."""
    affine, lists = make_affine(ns, form), make_lists(ns)

    def loss(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        return affine(sum(lists([x, x + 1], [])), Params(weight, Inner(shift))).sum()

    inputs = doubles(3)
    expected = torch.autograd.grad(loss(*inputs), inputs)
    forward = torch.compile(loss, fullgraph=True, backend="aot_eager") if is_compiled else loss
    with compiled_autograd._enable(torch.compile(fullgraph=True, backend="aot_eager")):
        forward(*inputs).backward()
    torch.testing.assert_close(tuple(tensor.grad for tensor in inputs), expected)


def test_transforms(ns: str) -> None:
    affine = make_affine(ns, as_dict)
    x, weight, shift = (t.detach() for t in doubles(3))

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return affine(x, Params(weight, Inner(shift))).sum()

    torch.testing.assert_close(torch.func.grad(loss)(weight, x), x * 2)
    of_grad = torch.func.grad(lambda w: torch.func.grad(loss, 1)(w, x).sum())(weight)
    torch.testing.assert_close(of_grad, torch.full_like(weight, 2.0))
    batch = torch.randn(4, 3, dtype=torch.double)
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss), (None, 0))(weight, batch), batch * 2)


def test_context_says_what_needs_a_gradient(ns: str) -> None:
    seen: list[Any] = []

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        save(ctx, inputs, output)
        seen.append((ctx.needs_input_grad, dict(ctx.needs_grad)))

    affine = make_affine(ns, as_dict, setup)
    x, weight, shift = doubles(3)
    affine(x.detach(), Params(weight, Inner(shift.detach())))
    assert seen == [((False, True), {"x": False, "params.weight": True, "params.inner.shift": False})]


BAD_GRADIENTS: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (
        lambda ctx, g: g,
        r"returned a Tensor of shape \(3,\), expected a tuple with one gradient for each of \(x, params\)",
    ),
    (lambda ctx, g: (g,), r"returned 1 gradients, expected 2, one for each of \(x, params\)"),
    (
        lambda ctx, g: (g, {"wieght": g}),
        r"'params' names the field 'wieght', .*; it has weight, inner\. Did you mean 'weight'\? ",
    ),
    (lambda ctx, g: (g, {"zz": g}), r"'params' names the field 'zz', .*; it has weight, inner\. "),
    (lambda ctx, g: (g, {"inner": {"scale": g}}), r"'params.inner.scale' returned .*expected None: a float has no"),
    (lambda ctx, g: (g[:2], None), r"'x' returned shape \(2,\), expected \(3,\) or one that sums to it"),
    (lambda ctx, g: (g, 3), r"'params' returned a int, expected None, a dict by field, a Params, or a tuple"),
    (lambda ctx, g: (g, (g,)), r"'params' returned 1 gradients, expected 2, one for each of \(weight, inner\)"),
    (lambda ctx, g: (g, {"inner": {"shift": g}}), r"'params.inner.shift' returned .* this call passed None"),
    (lambda ctx, g: (3.0, None), r"'x' returned a float, expected None or a Tensor of shape \(3,\)"),
]


@pytest.mark.parametrize(("backward", "sentence"), BAD_GRADIENTS)
def test_wrong_gradients_name_op_and_path(ns: str, backward: Callable[..., Any], sentence: str) -> None:
    affine = make_affine(ns, backward)
    y = affine(torch.ones(3, requires_grad=True), Params(torch.ones(3)))
    with pytest.raises(
        errors.GradientError, match=rf"{ns}::affine: backward_fn.*{sentence}.*\(test_autograd\.py:\d+\)"
    ):
        y.sum().backward()


@dataclass(frozen=True)
class AsDataclass:
    weight: Tensor
    rest: Sequence[Tensor]
    factor: float = 2.0


class AsNamedTuple(NamedTuple):
    weight: Tensor
    rest: Sequence[Tensor]
    factor: float = 2.0


class AsTypedDict(TypedDict):
    weight: Tensor
    rest: Sequence[Tensor]
    factor: float


@see_through_object
class AsObject:
    weight: Tensor
    rest: Sequence[Tensor]
    factor: float

    def __init__(self, weight: Any, rest: Any, factor: Any = 2.0) -> None:
        self.weight, self.rest, self.factor = weight, rest, factor


RECORDS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "dataclass": (AsDataclass, AsDataclass),
    "named tuple": (AsNamedTuple, AsNamedTuple),
    "TypedDict": (AsTypedDict, lambda weight, rest, factor=2.0: {"weight": weight, "rest": rest, "factor": factor}),
    "object": (ObjectHandle[AsObject], AsObject),
    "tuple": (tuple[Tensor, list[Tensor], float], lambda weight, rest, factor=2.0: (weight, rest, factor)),
}
GRADIENTS: dict[str, Callable[[Callable[..., Any], Tensor], Any]] = {
    "an instance": lambda make, g: make(g, [g, None], None),
    "an instance with a tuple": lambda make, g: make(g, (g, None), None),
    "a tuple": lambda make, g: (g, (g, None), None),
    "a list": lambda make, g: [g, [g, None], None],
    "a dict": lambda make, g: {"weight": g, "rest": [g, None]},
    "an OrderedDict": lambda make, g: OrderedDict(rest=(g, None), weight=g),
    "None": lambda make, g: None,
    "too short a tuple": lambda make, g: (g,),
    "a Tensor": lambda make, g: g,
    "a set": lambda make, g: {1, 2},
}


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("form", GRADIENTS)
@pytest.mark.parametrize("kind", RECORDS)
def test_every_form_of_a_gradient_for_every_kind_of_record(ns: str, kind: str, form: str, is_alone: bool) -> None:
    annotation, make = RECORDS[kind]

    def backward(ctx: Any, g: Tensor) -> Any:
        gradient = GRADIENTS[form](make, g * 3)
        return (gradient,) if is_alone and type(gradient) is tuple else gradient if is_alone else (g * 2, gradient)

    def body(x: Tensor, record: Any) -> Tensor:
        return x * 2

    def alone(record: Any) -> Tensor:
        return torch.ones(3)

    op_body = alone if is_alone else body
    op_body.__annotations__["record"] = annotation
    fake = (lambda record: torch.empty(3)) if is_alone else ["x"]
    op: Any = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=fake, backward_fn=backward)(op_body)
    x, weight, first, second = (torch.ones(3, requires_grad=True) for _ in range(4))
    output = op(*([] if is_alone else [x]), make(weight, [first, second]))
    by_name = {"a dict", "an OrderedDict"}
    is_wrong = form in {"too short a tuple", "a Tensor", "a set"} or (kind == "tuple" and form in by_name)
    refused = pytest.raises(errors.GradientError, match="backward_fn for 'record' returned ")
    with refused if is_wrong else nullcontext():
        output.sum().backward()
        expected = None if form == "None" else [3.0] * 3
        assert [t.grad if t.grad is None else t.grad.tolist() for t in (weight, first, second)] == [
            expected, expected, None
        ]  # fmt: skip


def test_gradient_that_sums_to_the_shape_is_right(ns: str) -> None:
    @magi_register_custom_op(
        f"{ns}::spread", infer_output_meta_fn=lambda x: x.new_empty(2, 3), backward_fn=lambda ctx, g: g
    )
    def spread(x: Tensor) -> Tensor:
        return x.expand(2, 3).clone()

    x = torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad(spread(x * 3).sum(), x)  # its first call, on a Tensor inside a graph
    assert grad.tolist() == [6.0, 6.0, 6.0]


@pytest.mark.parametrize("call", ["eager", "torch_op", "compiled"])
def test_missing_backward_is_an_error_and_never_a_missing_gradient(ns: str, call: str) -> None:
    @magi_register_custom_op(f"{ns}::double", infer_output_meta_fn=["params.weight"])
    def double(params: Params) -> Tensor:
        return params.weight * 2

    weight = torch.ones(3, requires_grad=True)
    functions: dict[str, Callable[[], Tensor]] = {
        "eager": lambda: double(Params(weight)),
        "torch_op": lambda: op_def(double).torch_op(weight, None, 2.0),
        "compiled": torch.compile(lambda: double(Params(weight, Inner())), fullgraph=True, backend="aot_eager"),
    }
    with pytest.raises(errors.MissingBackwardError if call != "compiled" else Exception, match="has no backward_fn"):
        functions[call]().sum().backward()


def test_lists_in_and_out(ns: str) -> None:
    lists = make_lists(ns)

    def total(*xs: Tensor) -> Tensor:
        return torch.stack(lists(list(xs), [None, torch.ones(1)])).sum()

    xs = [torch.randn(2, requires_grad=True) for _ in range(3)]
    for function in (total, torch.compile(total, fullgraph=True, backend="aot_eager")):
        for grad in torch.autograd.grad(function(*xs), xs):
            assert grad.tolist() == [2.0, 2.0]
    assert torch.func.grad(total)(*(x.detach() for x in xs)).tolist() == [2.0, 2.0]


def test_list_of_optional_tensors_keeps_its_gradients(ns: str) -> None:
    def backward(ctx: Any, grad: Tensor) -> Any:
        return [grad, None, grad * 3]

    @magi_register_custom_op(f"{ns}::masked", infer_output_meta_fn=lambda xs: torch.empty(2), backward_fn=backward)
    def masked(xs: list[Tensor | None]) -> Tensor:
        first, missing, last = xs
        assert missing is None
        return first + last * 3  # type: ignore[operator,return-value]

    tensors = [torch.randn(2, requires_grad=True) for _ in range(2)]
    grads = torch.autograd.grad(masked([tensors[0], None, tensors[1]]).sum(), tensors)
    assert [grad.tolist() for grad in grads] == [[1.0, 1.0], [3.0, 3.0]]


def test_record_return_gives_grads_by_field(ns: str) -> None:
    def fake(x: Tensor) -> Outputs:
        return Outputs(torch.empty_like(x), torch.empty_like(x), 3)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        assert output["count"] == 3
        ctx.count = output.count

    def backward(ctx: Any, grads: Any) -> Tensor:
        return grads["y"] * 2 + grads.z * ctx.count  # type: ignore[no-any-return]

    @magi_register_custom_op(f"{ns}::out", infer_output_meta_fn=fake, setup_context_fn=setup, backward_fn=backward)
    def out(x: Tensor) -> Outputs:
        return Outputs(x * 2, x * 3, 3)

    x = torch.ones(2, requires_grad=True)
    for function in (out, torch.compile(out, fullgraph=True, backend="aot_eager")):
        result = function(x)
        assert isinstance(result, Outputs)
        assert result.count == 3
        (grad,) = torch.autograd.grad((result.y + result.z).sum(), x)
        assert grad.tolist() == [5.0, 5.0]


def test_tuple_return_gives_one_grad_for_each_item(ns: str) -> None:
    def fake(x: Tensor) -> Pair:
        return Pair(torch.empty_like(x), torch.empty_like(x))

    @magi_register_custom_op(f"{ns}::pair", infer_output_meta_fn=fake, backward_fn=lambda ctx, gy, gz: gy * 2 + gz * 3)
    def pair(x: Tensor) -> Pair:
        return Pair(x * 2, x * 3)

    x = torch.ones(2, requires_grad=True)
    result = pair(x)
    assert isinstance(result, Pair)
    (grad,) = torch.autograd.grad((result.y + result.z).sum(), x)
    assert grad.tolist() == [5.0, 5.0]


def jvp(f: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return torch.func.jvp(f, (x,), (torch.ones_like(x),))


def dual(f: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x))))


FORWARD_MODES: dict[str, Callable[..., Any]] = {
    "jvp": jvp,
    "compiled jvp": lambda f, x: torch.compile(lambda x: jvp(f, x), backend="aot_eager")(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "dual numbers": dual,
    "dual numbers, no_grad": torch.no_grad()(dual),
}


def in_forward_mode(ns: str, kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """One op of each kind, as a function of the Tensor that has a derivative, or may have one, and of another."""
    if kind == "mutating":

        @magi_register_custom_op(f"{ns}::fill", mutates_args=["out"])
        def fill(x: Tensor, out: Tensor) -> None:
            out.copy_(x * 2)

        def filled(x: Tensor, other: Tensor) -> Tensor:
            out = torch.zeros(3)
            fill(x, out)
            return out * other

        return filled
    affine = make_affine(ns, as_dict)
    return lambda x, other: affine(x, Params(other, Inner()))


@pytest.mark.parametrize("mode", FORWARD_MODES)
@pytest.mark.parametrize("kind", ["functional", "mutating"])
def test_forward_mode_is_refused_by_name(ns: str, mode: str, kind: str) -> None:
    """Of torch.library.custom_op the derivative is zero, without a word."""
    op, other = in_forward_mode(ns, kind), torch.ones(3)
    sentence = "this op has no forward-mode derivative, which torch.func.jvp, jacfwd and dual numbers need"
    error = Exception if mode.startswith("compiled") else errors.ForwardModeError
    with pytest.raises(error, match=rf"{sentence}\. .*\(test_autograd.py:\d+\)"):
        FORWARD_MODES[mode](lambda x: op(x, other), torch.ones(3))


@pytest.mark.parametrize("kind", ["functional", "mutating"])
def test_forward_mode_around_an_op_without_a_derivative(ns: str, kind: str) -> None:
    op, other, x = in_forward_mode(ns, kind), torch.ones(3), torch.full((3,), 2.0)
    expected = op(x, other)
    for found, tangent in (jvp(lambda x: x * op(x.detach(), other), x), dual(lambda x: x * op(x.detach(), other), x)):
        torch.testing.assert_close((found, tangent), (x * expected, expected))
