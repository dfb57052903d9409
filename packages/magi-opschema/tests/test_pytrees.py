# SPDX-License-Identifier: Apache-2.0
"""Records as nodes of torch's pytrees: what a node is, its saved form, and torch.func over records."""

from __future__ import annotations

import copy
import enum
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import pytest
import torch
import torch.utils._pytree as pytree
from _bad_inputs import with_annotation
from magi_opschema import lower_signature, magi_register_custom_op
from magi_opschema.errors import OptionError, RecordTreeError
from torch import Tensor
from torch.utils.checkpoint import checkpoint


T = TypeVar("T")
NAN = float("nan")


class Mode(enum.Enum):
    RMS = 1
    LAYER = "layer"


class Bits(enum.Flag):
    A = 1
    B = 2


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
    rest: tuple[Tensor, ...] = ()
    kind: Literal["rms", "layer"] = "rms"
    dtype: torch.dtype = torch.float32
    sizes: tuple[int, ...] = (1, 2)
    count: int = 3
    halves: float = field(init=False, default=0.5)

    def __post_init__(self) -> None:
        assert isinstance(self.weight, Tensor), "torch unflattens with other things, and nothing of the user's may run"


@dataclass(frozen=True, slots=True)
class Slotted:
    weight: Tensor
    eps: float = 1.0


@dataclass(frozen=True)
class Box(Generic[T]):
    value: T


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


@magi_register_custom_op("opschema_pytrees::boxed")
def boxed(x: Tensor, box: Box[Tensor]) -> Tensor:
    return x * box.value


@magi_register_custom_op("opschema_pytrees::numbers")
def numbers(x: Tensor, box: Box[float], nested: Box[Box[Tensor]], point: Box[Point]) -> Tensor:
    return x * box.value + nested.value.value


X = torch.arange(1.0, 4.0)


def cfg(*shape: int, value: float = 2.0, **options: Any) -> Cfg:
    sized = shape or (3,)
    return Cfg(Inner(torch.full(sized, value)), torch.full(sized, value + 1), **options)


def same(a: object, b: object) -> None:
    """The two trees hold equal Tensors in one structure."""
    leaves, spec = pytree.tree_flatten(a)
    others, other_spec = pytree.tree_flatten(b)
    assert spec == other_spec
    torch.testing.assert_close(leaves, others)


def flattened(value: object) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(value)


class Alike(enum.Enum):
    ONE = 1
    TWO = 2

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)

    def __hash__(self) -> int:
        return 0


class TestNode:
    """What a record is to torch.utils._pytree."""

    def test_tensors_records_and_what_holds_them_are_children(self) -> None:
        record = cfg(rest=(X, X + 1), bias=X)
        leaves, _ = flattened(record)
        assert [id(leaf) for leaf in leaves] == [
            id(record.inner.scale), id(record.weight), id(X), id(record.rest[0]), id(record.rest[1])
        ]  # fmt: skip
        keys = [str(path) for path, _ in pytree.tree_flatten_with_path(record)[0]]
        assert len(keys) == 5
        assert "scale" in keys[0]
        assert "rest" in keys[4]
        assert len(flattened(cfg())[0]) == 2

    def test_by_value_where_a_field_may_be_either(self) -> None:
        assert len(flattened(Box(X))[0]) == len(flattened(Box(Box(X)))[0]) == len(flattened(Box([X, 3]))[0]) - 1
        assert flattened(Box(3.0))[0] == []
        assert flattened(Box((3.0, None)))[0] == []

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
            (Box(Bits.A | Bits.B), Box(Bits.A), False),
        ],
        ids=str,
    )
    def test_contexts_compare_by_value(self, one: object, other: object, is_same: bool) -> None:
        first, second = flattened(one)[1], flattened(other)[1]
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
        for stand_in in (0, None, Tensor):
            dims: Any = pytree.tree_map(lambda _, stand_in=stand_in: stand_in, record)
            assert flattened(dims)[1] == flattened(record)[1]
            assert flattened(dims)[0] == [stand_in] * 2
        plain = pytree.tree_map(lambda tensor: tensor + 1, record)
        assert vars(plain).keys() == vars(record).keys()
        assert plain.halves == 7.0

    @pytest.mark.parametrize("stand_in", [0, Tensor])
    def test_a_class_with_slots(self, stand_in: object) -> None:
        record = Slotted(X)
        dims = pytree.tree_map(lambda _: stand_in, record)
        assert flattened(dims)[1] == flattened(record)[1]

    @pytest.mark.parametrize(
        "make", [cfg, lambda: Inner(X, mode=Mode.LAYER), lambda: Box(Box(X)), lambda: Slotted(X)],
        ids=["nested", "inner", "generic", "slotted"],
    )  # fmt: skip
    def test_optree_too(self, make: Callable[[], Any]) -> None:
        """With optree in the test group: without it this would pass without a test."""
        import optree
        from torch.utils import _cxx_pytree as cxx

        leaves, spec = cxx.tree_flatten(make())
        assert len(leaves) == len(flattened(make())[0])
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
        with pytest.raises(OptionError, match="register_pytree=0 \\(int\\) is not True or False"):
            magi_register_custom_op(f"{ns}::wrong", register_pytree=0)(body)  # type: ignore[arg-type]
        magi_register_custom_op(f"{ns}::on")(body)
        assert record in pytree.SUPPORTED_NODES

    def test_a_returned_record_too(self, ns: str) -> None:
        record: Any = make_dataclass("Returned", [("a", Tensor), ("pair", tuple[Tensor, Box[Tensor]])], frozen=True)

        def body(x: Tensor) -> Any:
            return record(x * 2, (x * 3, Box(x * 4)))

        body.__annotations__["return"] = record
        op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=lambda x: record(x, (x, Box(x))))(body)
        assert len(flattened(op(X))[0]) == 3


class TestRegistrations:
    """Those of others."""

    def test_an_earlier_one_wins(self, ns: str) -> None:
        record = make_dataclass("Early", [("weight", Tensor), ("eps", float)], frozen=True)
        pytree.register_dataclass(record)
        magi_register_custom_op(f"{ns}::op")(with_annotation(record))
        assert len(flattened(record(X, 1.0))[0]) == 2

    def test_a_later_one(self, ns: str) -> None:
        record = make_dataclass("Late", [("weight", Tensor), ("eps", float)], frozen=True)
        magi_register_custom_op(f"{ns}::op")(with_annotation(record))
        assert len(flattened(record(X, 1.0))[0]) == 1
        with pytest.raises(ValueError, match="already registered as pytree node"):
            pytree.register_pytree_node(record, lambda r: ([], None), lambda c, _: record(*c))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytree.register_dataclass(record)
        assert len(flattened(record(X, 1.0))[0]) == 2


class TestSaved:
    """The form in which torch.export saves a tree."""

    @pytest.mark.parametrize(
        "value",
        [
            cfg(), cfg(bias=X, rest=(X,), dtype=torch.bfloat16, sizes=()), Inner(X, float("inf")), Inner(X, -0.0),
            Inner(X, mode=Mode.LAYER), Box(Bits.A | Bits.B), Box(complex(NAN, 1)), Box(torch.device("cpu", 0)),
            Box(torch.strided), Box(torch.channels_last), Box((1, [True, None, "x"], ())), Box({"a": (1.5,)}),
            Box(Point(1.0, X)), Box(None), Slotted(X),
        ],
        ids=str,
    )  # fmt: skip
    def test_and_loaded(self, value: object) -> None:
        spec = flattened(value)[1]
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec

    def test_what_has_no_such_form_is_named(self) -> None:
        spec = flattened(Box((1, object())))[1]
        with pytest.raises(RecordTreeError, match=r"Box\.value\[1\] is <object object .*cannot be saved"):
            pytree.treespec_dumps(spec)

    def test_two_classes_of_one_name(self, ns: str) -> None:
        def make(i: int) -> Any:
            @dataclass(frozen=True)
            class Local:
                weight: Tensor

            magi_register_custom_op(f"{ns}::op{i}")(with_annotation(Local))
            return Local

        first = make(1)
        text = pytree.treespec_dumps(flattened(first(X))[1])
        assert pytree.treespec_loads(text) == flattened(first(X))[1]
        second = make(2)
        for cls in (first, second):
            with pytest.raises(RecordTreeError, match="there are 2 classes named .*Local, and a saved program finds"):
                pytree.treespec_dumps(flattened(cls(X))[1])

    def test_another_class_of_the_name_does_not_take_that_of_a_module(self, ns: str) -> None:
        other = make_dataclass("Inner", [("scale", Tensor)], frozen=True)
        other.__module__ = __name__
        magi_register_custom_op(f"{ns}::op")(with_annotation(other))
        spec = flattened(Inner(X))[1]
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
        with pytest.raises(RecordTreeError, match="2 classes named"):
            pytree.treespec_dumps(flattened(other(X))[1])


class TestFunc:
    """torch.func over records, eager and compiled."""

    @pytest.fixture(params=["eager", "compiled"])
    def run(self, request: pytest.FixtureRequest) -> Callable[..., Any]:
        if request.param == "eager":
            return lambda fn, *args: fn(*args)
        return lambda fn, *args: torch.compile(fn, fullgraph=True, backend="aot_eager")(*args)  # type: ignore[no-untyped-call]

    def test_grad(self, run: Callable[..., Any]) -> None:
        derive_it: Any = torch.func.grad(lambda c: scale(X, c).sum())  # type: ignore[misc]
        grads = run(derive_it, cfg())
        torch.testing.assert_close(grads.weight, X * 2)
        torch.testing.assert_close(grads.inner.scale, X * 3)
        assert grads.kind == "rms"

    def test_vjp(self) -> None:
        output, pull = torch.func.vjp(scale, X, cfg())  # type: ignore[misc]
        torch.testing.assert_close(output, X * 6)
        by_x, by_cfg = pull(torch.ones(3))
        torch.testing.assert_close(by_x, torch.full((3,), 6.0))
        torch.testing.assert_close(by_cfg.weight, X * 2)

    def test_jacrev(self, run: Callable[..., Any]) -> None:
        jacobian = run(torch.func.jacrev(lambda c: scale(X, c)), cfg())
        torch.testing.assert_close(jacobian.weight, torch.diag(X * 2))

    @pytest.mark.parametrize("in_dims", [0, (0, None), (None, 0)], ids=str)
    def test_vmap(self, run: Callable[..., Any], in_dims: Any) -> None:
        dims = (in_dims, in_dims) if isinstance(in_dims, int) else in_dims
        x = torch.randn(4, 3) if dims[0] == 0 else X
        record = cfg(4, 3) if dims[1] == 0 else cfg()
        output = run(torch.vmap(scale, in_dims=in_dims), x, record)
        torch.testing.assert_close(output, (x * 6).expand(4, 3))

    def test_vmap_of_grad_over_a_slotted_and_a_generic_record(self) -> None:
        grads = torch.vmap(torch.func.grad(lambda x, c: slotted(x, c).sum()), in_dims=(0, None))(
            torch.ones(4, 3), Slotted(X)
        )
        assert grads.shape == (4, 3)
        torch.testing.assert_close(torch.vmap(boxed)(torch.ones(4, 3), Box(torch.ones(4, 3))), torch.ones(4, 3))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    record = Cfg(Inner(torch.ones(3, requires_grad=True)), torch.ones(3, requires_grad=True))
    x = X.clone().requires_grad_()
    checkpoint(lambda x, c: scale(x, c).sin(), x, record, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(record.weight.grad, X * X.cos())
    torch.testing.assert_close(x.grad, X.cos())
