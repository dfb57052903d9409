# SPDX-License-Identifier: Apache-2.0
"""Records as nodes of torch's pytrees: the node and its saved form, export, transforms, control flow, two ranks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from _signatures import Access, Alike, Box, Calls, Mode, saved_and_loaded, with_annotation
from magi_opschema import lower_signature, magi_register_custom_op
from magi_opschema.errors import RecordTreeError
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch.fx.experimental.proxy_tensor import make_fx


NAN = float("nan")
X = torch.arange(1.0, 4.0)


class Point(NamedTuple):
    x: float
    y: Tensor


@dataclass(frozen=True)
class Inner:
    scale: Tensor
    eps: float = NAN
    mode: Mode = Mode.RMS


@dataclass(frozen=True)
class Cfg:
    inner: Inner
    weight: Tensor
    bias: Tensor | None = None
    other: Inner | None = None
    rest: tuple[Tensor, ...] = ()
    kind: Literal["rms", "layer"] = "rms"
    dtype: torch.dtype = torch.float32
    sizes: tuple[int, ...] = (1, 2)
    count: int = 3
    mode: Mode = Mode.RMS
    halves: float = field(init=False, default=0.5)

    def __post_init__(self) -> None:
        assert isinstance(self.weight, Tensor), "torch unflattens with other things, and nothing of the user's may run"


@dataclass(frozen=True, slots=True)
class Slotted:
    weight: Tensor
    eps: float = 1.0


@dataclass(frozen=True)
class OutInner:
    twice: Tensor


@dataclass(frozen=True)
class Out:
    inner: OutInner
    thrice: Tensor
    pair: tuple[Tensor, Tensor]


def save(ctx: Any, inputs: Any, output: Any) -> None:
    x, cfg = inputs
    ctx.save_for_backward(x, cfg.weight, cfg.inner.scale)


def derive(ctx: Any, grad: Tensor) -> Any:
    x, weight, scale = ctx.saved_tensors
    return grad * weight * scale, {"weight": grad * x * scale, "inner": {"scale": grad * x * weight}}


@magi_register_custom_op(
    "opschema_pytrees::scale", infer_output_meta_fn=["x"], setup_context_fn=save, backward_fn=derive
)
def scale(x: Tensor, cfg: Cfg) -> Tensor:
    return x * cfg.weight * cfg.inner.scale


@magi_register_custom_op("opschema_pytrees::slotted", backward_fn=lambda ctx, grad: (grad, None))
def slotted(x: Tensor, cfg: Slotted) -> Tensor:
    return x * cfg.weight


@magi_register_custom_op("opschema_pytrees::boxes", infer_output_meta_fn=["x"])
def boxes(x: Tensor, box: Box[Tensor], nested: Box[Inner], slotted: Slotted) -> Tensor:
    return x * box.value * nested.value.scale * slotted.weight


@magi_register_custom_op("opschema_pytrees::make", infer_output_meta_fn=lambda x: Out(OutInner(x), x, (x, x)))
def make(x: Tensor) -> Out:
    return Out(OutInner(x * 2), x * 3, (x * 4, x * 5))


@magi_register_custom_op("opschema_pytrees::numbers")
def numbers(x: Tensor, box: Box[float], point: Box[Point]) -> Tensor:
    return x * box.value


def cfg(value: float = 2.0, *shape: int, **options: Any) -> Cfg:
    sized = shape or (3,)
    return Cfg(Inner(torch.full(sized, value)), torch.full(sized, value + 1), **options)


def plus_one(record: Any) -> Any:
    return pytree.tree_map(lambda tensor: tensor + 1, record)


def same(actual: object, expected: object) -> None:
    leaves, spec = pytree.tree_flatten(actual)
    others, other_spec = pytree.tree_flatten(expected)
    assert spec == other_spec
    torch.testing.assert_close(leaves, others)


class TestNode:
    def test_tensors_records_and_what_holds_them_are_children(self) -> None:
        record = cfg(rest=(X, X + 1), bias=X)
        leaves, _ = pytree.tree_flatten(record)
        assert [id(leaf) for leaf in leaves] == [
            id(record.inner.scale), id(record.weight), id(X), id(record.rest[0]), id(record.rest[1])
        ]  # fmt: skip
        keys = [str(path) for path, _ in pytree.tree_flatten_with_path(record)[0]]
        assert len(keys) == 5
        assert "scale" in keys[0]
        assert "rest" in keys[4]
        assert len(pytree.tree_flatten(cfg())[0]) == 2

    def test_by_value_where_a_field_may_be_either(self) -> None:
        assert (
            len(pytree.tree_flatten(Box(X))[0])
            == len(pytree.tree_flatten(Box(Box(X)))[0])
            == len(pytree.tree_flatten(Box([X, 3]))[0]) - 1
        )
        assert pytree.tree_flatten(Box(3.0))[0] == []
        assert pytree.tree_flatten(Box((3.0, None)))[0] == []

    @pytest.mark.parametrize(
        ("one", "other", "is_same"),
        [
            (Inner(X), Inner(X + 1), True),
            (Inner(X, 1.0), Inner(X, 2.0), False),
            (Inner(X, mode=Mode.RMS), Inner(X, mode=Mode.LAYER), False),
            (Box(1), Box(True), False),
            (Box(1), Box(1.0), False),
            (Box(0.0), Box(-0.0), False),
            (Box(complex(0, NAN)), Box(complex(0, NAN)), True),
            (Box((1, (NAN, "a"))), Box((1, (NAN, "a"))), True),
            (Box(None), Box(X), False),
            (Box(Alike.ONE), Box(Alike.TWO), False),
            (Box(Access.READ | Access.WRITE), Box(Access.READ), False),
        ],
        ids=str,
    )
    def test_contexts_compare_by_value(self, one: object, other: object, is_same: bool) -> None:
        first, second = pytree.tree_flatten(one)[1], pytree.tree_flatten(other)[1]
        assert (first == second) is is_same
        assert (hash(first) == hash(second)) or not is_same
        context: Any = first._context
        assert context == pickle.loads(pickle.dumps(context)) == copy.deepcopy(context)

    def test_unflattening_runs_no_code_of_the_user_and_keeps_fields_that_init_does_not_take(self) -> None:
        record = cfg()
        object.__setattr__(record, "halves", 7.0)
        shapes = pytree.tree_map(lambda tensor: tensor.shape, record)
        assert shapes.weight == (3,)
        assert shapes.halves == 7.0
        for value, stand_in in ((record, 0), (record, None), (record, Tensor), (Slotted(X), 0), (Slotted(X), Tensor)):
            dims: Any = pytree.tree_map(lambda _, stand_in=stand_in: stand_in, value)
            assert pytree.tree_flatten(dims)[1] == pytree.tree_flatten(value)[1]
            assert pytree.tree_flatten(dims)[0] == [stand_in] * len(pytree.tree_flatten(value)[0])
        plain = pytree.tree_map(lambda tensor: tensor + 1, record)
        assert vars(plain).keys() == vars(record).keys()
        assert plain.halves == 7.0

    @pytest.mark.parametrize(
        "make", [cfg, lambda: Inner(X, mode=Mode.LAYER), lambda: Box(Box(X)), lambda: Slotted(X)],
        ids=["nested", "inner", "generic", "slotted"],
    )  # fmt: skip
    def test_optree_too(self, make: Callable[[], Any]) -> None:
        """With optree in the test group: without it this would pass without a test."""
        import optree
        from torch.utils import _cxx_pytree as cxx

        leaves, spec = cxx.tree_flatten(make())
        assert len(leaves) == len(pytree.tree_flatten(make())[0])
        assert spec == cxx.tree_flatten(make())[1]
        hash(spec)
        same(cxx.tree_unflatten(leaves, spec), make())
        doubled = optree.tree_map(lambda tensor: tensor * 2, make(), namespace="torch")
        same(doubled, pytree.tree_map(lambda tensor: tensor * 2, make()))

    def test_lowering_alone_registers_nothing(self) -> None:
        record = make_dataclass("Alone", [("weight", Tensor)], frozen=True)
        lower_signature(with_annotation(record))
        assert record not in pytree.SUPPORTED_NODES

    def test_not_where_the_decorator_is_told_so(self, ns: str) -> None:
        record = make_dataclass("Left", [("weight", Tensor)], frozen=True)

        body = with_annotation(record)
        magi_register_custom_op(f"{ns}::off", register_pytree=False)(body)
        assert record not in pytree.SUPPORTED_NODES
        magi_register_custom_op(f"{ns}::on")(body)
        assert record in pytree.SUPPORTED_NODES

    def test_an_earlier_registration_wins(self, ns: str) -> None:
        record = make_dataclass("Early", [("weight", Tensor), ("eps", float)], frozen=True)
        pytree.register_dataclass(record)
        magi_register_custom_op(f"{ns}::op")(with_annotation(record))
        assert len(pytree.tree_flatten(record(X, 1.0))[0]) == 2


class TestSaved:
    @pytest.mark.parametrize(
        "value",
        [
            cfg(), cfg(bias=X, rest=(X,), dtype=torch.bfloat16, sizes=()), Inner(X, float("inf")), Inner(X, -0.0),
            Inner(X, mode=Mode.LAYER), Box(Access.READ | Access.WRITE), Box(complex(NAN, 1)),
            Box(torch.device("cpu", 0)), Box(torch.strided), Box(torch.channels_last), Box((1, [True, None, "x"], ())),
            Box({"a": (1.5,)}), Box(Point(1.0, X)), Box(None), Slotted(X),
        ],
        ids=str,
    )  # fmt: skip
    def test_and_loaded(self, value: object) -> None:
        spec = pytree.tree_flatten(value)[1]
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec

    def test_what_has_no_such_form_is_named(self) -> None:
        spec = pytree.tree_flatten(Box((1, object())))[1]
        with pytest.raises(RecordTreeError, match=r"Box\.value\[1\] is <object object .*cannot be saved"):
            pytree.treespec_dumps(spec)

    def test_another_class_of_the_name_does_not_take_that_of_a_module(self, ns: str) -> None:
        other = make_dataclass("Inner", [("scale", Tensor)], frozen=True)
        other.__module__ = __name__
        magi_register_custom_op(f"{ns}::op")(with_annotation(other))
        spec = pytree.tree_flatten(Inner(X))[1]
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
        with pytest.raises(RecordTreeError, match="2 classes named"):
            pytree.treespec_dumps(pytree.tree_flatten(other(X))[1])


@pytest.fixture(autouse=True)
def safe_globals() -> Iterator[None]:
    """The example inputs are in a saved program; torch loads their classes without a word if they are declared safe."""
    with torch.serialization.safe_globals([Cfg, Inner, Box, Slotted, Mode]):
        yield


EXPORTED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "nested": (scale, (X, cfg()), (X, cfg(5.0))),
    "every field": (
        scale,
        (X, cfg(other=Inner(X, float("nan")), rest=(X, X), mode=Mode.LAYER)),
        (X, cfg(5.0, other=Inner(X, float("nan")), rest=(X, X), mode=Mode.LAYER)),
    ),
    "generic and slotted": (
        boxes,
        (X, Box(X.clone()), Box(Inner(X.clone())), Slotted(X.clone())),
        (X, Box(X + 1), Box(Inner(X + 2)), Slotted(X + 3)),
    ),
    "in containers": (lambda x, held: scale(x, held["a"][0]), (X, {"a": [cfg()]}), (X, {"a": [cfg(5.0)]})),
    "returned": (make, (X,), (X + 1,)),
    "returned in a list": (lambda x: [make(x), {"out": make(x + 1)}], (X,), (X + 1,)),
    "passed on": (plus_one, (cfg(),), (cfg(5.0),)),
    "made in the forward": (lambda x: Box(Slotted(x + 1)), (X,), (X + 1,)),
}


@pytest.mark.parametrize("strict", [False, True])
class TestExport:
    @pytest.mark.parametrize("kind", EXPORTED)
    def test_round_trip_and_compiled(self, strict: bool, kind: str) -> None:
        fn, example, other = EXPORTED[kind]
        program = torch.export.export(Calls(fn), example, strict=strict)
        compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
        same(compiled(*example), fn(*example))
        for run in (program.module(), saved_and_loaded(program), compiled):
            same(run(*other), fn(*other))

    @pytest.mark.parametrize("form", ["by place", "collected"])
    def test_dynamic_shapes(self, strict: bool, form: str) -> None:
        size = torch.export.Dim("size")
        x, record = X.clone(), cfg()
        shapes: Any = ({0: size}, [[{0: size}], {0: size}])
        if form == "collected":
            shapes = torch.export.ShapesCollection()
            for tensor in (x, record.weight, record.inner.scale):
                shapes[tensor] = {0: size}
        program = torch.export.export(Positional(), (x, record), strict=strict, dynamic_shapes=shapes)
        other = cfg(5.0, 7)
        same(saved_and_loaded(program)(torch.ones(7), other), scale(torch.ones(7), other))

    def test_other_fields_are_constants(self, strict: bool) -> None:
        program = torch.export.export(Calls(scale), (X, cfg()), strict=strict)
        with pytest.raises(Exception, match=r"tree ?spec|structure|match"):
            saved_and_loaded(program)(X, cfg(mode=Mode.LAYER))


class Positional(torch.nn.Module):
    def forward(self, x: Tensor, cfg: Cfg) -> Tensor:
        return scale(x, cfg)


@pytest.mark.parametrize("how", ["real", "fake", "symbolic", "aot_function"])
@pytest.mark.parametrize("kind", ["nested", "generic and slotted", "passed on", "returned"])
def test_a_trace_bakes_nothing_in(how: Any, kind: str) -> None:
    fn, example, other = EXPORTED[kind]
    if how == "aot_function":
        compiled = aot_function(fn, lambda graph, _: graph)
        same(compiled(*example), fn(*example))
        same(compiled(*other), fn(*other))
        return
    graph = make_fx(fn, tracing_mode=how)(*example)
    same(graph(*other), fn(*other))
    assert not [node for node in graph.graph.nodes if node.op == "get_attr"]
    if kind == "nested":
        assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [scale.torch_op]


class TestFunc:
    @pytest.fixture(params=["eager", "compiled"])
    def run(self, request: pytest.FixtureRequest) -> Callable[..., Any]:
        if request.param == "eager":
            return lambda fn, *args: fn(*args)
        return lambda fn, *args: torch.compile(fn, fullgraph=True, backend="aot_eager")(*args)  # type: ignore[no-untyped-call]

    def test_grad_and_value_with_an_auxiliary_record(self, run: Callable[..., Any]) -> None:
        differentiate: Any = torch.func.grad_and_value(lambda c: (scale(X, c).sum(), c), has_aux=True)  # type: ignore[misc]
        grads, (value, aux) = run(differentiate, cfg())
        torch.testing.assert_close(grads.weight, X * 2)
        torch.testing.assert_close(grads.inner.scale, X * 3)
        assert grads.kind == "rms"
        torch.testing.assert_close(value, (X * 6).sum())
        same(aux, cfg())

    def test_jacrev_of_and_into_records(self, run: Callable[..., Any]) -> None:
        jacobian = run(torch.func.jacrev(lambda c: Box(scale(X, c))), cfg())
        torch.testing.assert_close(jacobian.value.weight, torch.diag(X * 2))
        torch.testing.assert_close(jacobian.value.inner.scale, torch.diag(X * 3))

    @pytest.mark.parametrize("in_dims", [0, (0, None), (None, 0)], ids=str)
    def test_vmap(self, run: Callable[..., Any], in_dims: Any) -> None:
        dims = (in_dims, in_dims) if isinstance(in_dims, int) else in_dims
        x = torch.randn(4, 3) if dims[0] == 0 else X
        record = cfg(2.0, 4, 3) if dims[1] == 0 else cfg()
        output = run(torch.vmap(scale, in_dims=in_dims), x, record)
        torch.testing.assert_close(output, (x * 6).expand(4, 3))

    def test_vmap_of_grad_over_a_slotted_record(self) -> None:
        grads = torch.vmap(torch.func.grad(lambda x, c: slotted(x, c).sum()), in_dims=(0, None))(
            torch.ones(4, 3), Slotted(X)
        )
        assert grads.shape == (4, 3)

    @pytest.mark.parametrize("out_dims", [0, 1])
    def test_vmap_with_dimensions_by_field(self, out_dims: int) -> None:
        record = Cfg(Inner(torch.full((3, 4), 2.0)), torch.full((4, 3), 3.0))
        places = iter([1, 0])
        in_dims: Any = pytree.tree_map(lambda _: next(places), record)
        output = torch.vmap(scale, in_dims=(None, in_dims), out_dims=out_dims)(X, record)
        torch.testing.assert_close(output, (X * 6).expand(4, 3).movedim(0, out_dims))

    @pytest.mark.parametrize("out_dims", [0, 1])
    def test_vmap_of_a_returned_record(self, out_dims: int) -> None:
        output = torch.vmap(make, out_dims=out_dims)(torch.ones(4, 3))
        assert type(output) is Out
        assert {tensor.shape for tensor in pytree.tree_leaves(output)} == {
            torch.Size((4, 3) if out_dims == 0 else (3, 4))
        }


def test_scan_over_a_record() -> None:
    from torch._higher_order_ops.scan import scan

    def step(carry: Tensor, c: Cfg) -> tuple[Tensor, Tensor]:
        return scale(carry, c), carry.clone()

    for run in (scan, torch.compile(scan, fullgraph=True, backend="aot_eager")):
        carry, outputs = run(step, X, cfg(2.0, 4, 3))
        torch.testing.assert_close(carry, X * 6**4)
        assert outputs.shape == (4, 3)


def test_gradients_through_a_returned_record() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def fn(c: Cfg) -> Any:
        return Box(Slotted(scale(X, c)))

    record = pytree.tree_map(lambda tensor: tensor.requires_grad_(), cfg())
    fn(record).value.weight.sum().backward()
    torch.testing.assert_close(record.weight.grad, X * 2)


@pytest.mark.parametrize("field_name", ["weight", "inner"])
def test_a_field_that_is_missing_is_an_error(field_name: str) -> None:
    """Dynamo loses fields in the bodies of control flow: a record without them must not pass for one."""
    record = cfg()
    object.__delattr__(record, field_name)
    with pytest.raises(AttributeError, match=field_name):
        pytree.tree_flatten(record)


def test_a_field_that_init_does_not_take_may_be_missing(ns: str) -> None:
    @dataclass(frozen=True)
    class Late:
        weight: Tensor
        cache: int = field(init=False)

    @magi_register_custom_op(f"{ns}::op")
    def op(x: Tensor, late: Late) -> Tensor:
        return x * 2

    assert plus_one(Late(X)).weight[0] == 2
    assert not hasattr(plus_one(Late(X)), "cache")
