# SPDX-License-Identifier: Apache-2.0
"""Values that the dispatcher takes and the signature does not: None for a Tensor, and what `torch.ops` lets through."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from typing import Annotated, Any, Literal

import pytest
import torch
from _bad_inputs import X, with_annotation
from magi_opschema import magi_register_custom_op, op_def
from magi_opschema.errors import ArgumentError, ArgumentValueError, OpSchemaError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


@dataclass(frozen=True)
class Inner:
    weight: Tensor
    eps: float = 1.0
    sizes: tuple[int, ...] = ()
    gaps: tuple[Tensor | None, ...] = ()


@dataclass(frozen=True)
class Cfg:
    inner: Inner | None = None


PATHS: dict[str, Any] = {"direct": float, "lowered": Annotated[float, "m"], "flattened": tuple[float, float]}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["functional", "with a backward", "mutating"])
def test_none_for_a_tensor(ns: str, path: str, kind: str) -> None:
    def body(x: Tensor, out: Tensor, value: Any) -> Tensor:
        raise AssertionError("the body runs")

    body.__annotations__["value"] = PATHS[path]
    options: dict[str, dict[str, Any]] = {
        "functional": {},
        "with a backward": {"backward_fn": lambda ctx, grad: (grad, grad, None)},
        "mutating": {"mutates_args": ("out",)},
    }
    op = magi_register_custom_op(f"{ns}::op", **options[kind])(body)
    assert op_def(op).path == path
    value = (1.0, 2.0) if path == "flattened" else 1.0
    flat = value if isinstance(value, tuple) else (value,)
    torch_op = op_def(op).torch_op
    x = X.clone().requires_grad_(kind == "with a backward")
    calls: list[tuple[str, Callable[[], object]]] = [
        ("x", lambda: op(None, X, value)),  # type: ignore[arg-type]
        ("out", lambda: op(x, None, value)),  # type: ignore[arg-type]
        ("out", lambda: op(x, out=None, value=value)),  # type: ignore[arg-type]
        ("x", lambda: torch_op(None, X, *flat)),
        ("out", lambda: torch_op(x, None, *flat)),
    ]
    for name, call in calls:
        with pytest.raises(ArgumentError, match=re.escape(f"{ns}::op: '{name}' is None (NoneType), expected a Tensor")):
            call()
        with torch.inference_mode(), pytest.raises(ArgumentError, match=f"'{name}' is None"):
            call()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fake", ["by name", "a function"])
def test_none_for_a_tensor_while_tracing(ns: str, path: str, fake: str) -> None:
    infer: Any = ["x"] if fake == "by name" else lambda x, y, value: torch.empty_like(x)

    def body(x: Tensor, y: Tensor, value: Any) -> Tensor:
        raise AssertionError("the body runs")

    body.__annotations__["value"] = PATHS[path]
    op: Any = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=infer)(body)
    value = (1.0, 2.0) if path == "flattened" else 1.0
    sentence = re.escape(f"{ns}::op: 'y' is None (NoneType), expected a Tensor.")
    with FakeTensorMode(), pytest.raises(ArgumentError, match=sentence):
        op(torch.empty(2), None, value)
    with pytest.raises(ArgumentError, match=sentence):
        op(torch.empty(2, device="meta"), None, value)
    with pytest.raises(Exception, match=sentence):
        torch.compile(lambda x: op(x, None, value), fullgraph=True, backend="aot_eager")(X)


NONES: list[tuple[object, str, str]] = [
    (Inner(None), "inner.weight", "a Tensor"),  # type: ignore[arg-type]
    (Inner(X, eps=None), "inner.eps", "a float"),  # type: ignore[arg-type]
    (Inner(X, sizes=None), "inner.sizes", "a list with each item an int of 64 bits"),  # type: ignore[arg-type]
    (Inner(X, gaps=None), "inner.gaps", "tuple[Tensor | None, ...]"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("form", ["alone", "in a record", "packed"])
@pytest.mark.parametrize(("value", "path", "expected"), NONES, ids=[path for _, path, _ in NONES])
def test_none_below_a_record_that_may_be_none(ns: str, value: Any, path: str, expected: str, form: str) -> None:
    """There every leaf of the schema may be None."""

    def body(x: Tensor, inner: Any) -> Tensor:
        assert inner is None or getattr(inner, "inner", None) is None
        return x * 2

    many = make_dataclass("Many", [*((f"f{i}", float) for i in range(70)), ("inner", Inner | None)], frozen=True)
    body.__annotations__["inner"] = {"alone": Inner | None, "in a record": Cfg, "packed": many}[form]
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["x"])(body)

    def wrapped(inner: Any) -> Any:
        if form == "alone":
            return inner
        return Cfg(inner) if form == "in a record" else many(*[0.0] * 70, inner)

    where = path if form == "alone" else f"inner.{path}"
    for x in (X, X.clone().requires_grad_()):
        with pytest.raises(
            OpSchemaError, match=re.escape(f"{ns}::op: '{where}' is None (NoneType), expected {expected}")
        ):
            op(x, wrapped(value))
    assert torch.equal(op(X, wrapped(None)), X * 2)


class Mode(enum.Enum):
    RMS = "rms"
    LAYER = "layer"


class Level(enum.Enum):
    LOW = 1
    HIGH = 2.5


class Bits(enum.Flag):
    A = 1
    B = 2


@dataclass(frozen=True)
class Moded:
    mode: Mode = Mode.RMS


MODES = "expected one of Mode.RMS, Mode.LAYER, or the value of one"
# annotation, good flat values, bad ones, what is said of the last of these
FLAT: list[tuple[Any, tuple[Any, ...], list[tuple[Any, ...]], str]] = [
    (Mode, ("rms",), [("RMS",), ("",), ("zz",)], f"'value' is 'zz' (str), {MODES}."),
    (Mode | None, (None,), [("zz",)], f"'value' is 'zz' (str), {MODES}, or None."),
    (Level, ("LOW",), [("low",), ("1",)], "'value' is '1' (str), expected one of Level.LOW, Level.HIGH, or the value"),
    (list[Mode], (["rms"],), [(["rms", "zz"],)], f"'value' is 'zz' (str), expected a list with each item {MODES[9:]}."),
    (Bits, (3,), [(-9,), (64,), (4,)], "'value' is 4 (int), expected a Bits."),
    (Literal["a", 1], (1,), [(2,), (-1,)], "'value' is -1 (int), expected one of 'a', 1."),
    (Literal["a", "b"], ("a",), [("c",)], "'value' is 'c' (str), expected one of 'a', 'b'."),
    (list[torch.dtype], (["torch.int8"],), [(["int8"],), (["torch.zz"],)],
     "'value' is 'torch.zz' (str), expected a list with each item a torch.dtype."),
    (list[torch.device], (["cpu"],), [(["zpu"],)], "'value' is 'zpu' (str), expected a list with each item a torch.de"),
    (Moded, ("rms",), [("bogus",)], f"'value.mode' is 'bogus' (str), {MODES}."),
    (Moded | None, (False, "-"), [(True, "bogus")], f"'value.mode' is 'bogus' (str), {MODES}."),
]  # fmt: skip


@pytest.mark.parametrize("where", ["eager", "fake", "compiled"])
@pytest.mark.parametrize("pair", [(), (1, 2)], ids=["alone", "flattened"])
@pytest.mark.parametrize(("annotation", "good", "bad", "sentence"), FLAT, ids=lambda value: str(value)[:30])
def test_a_wrong_flat_value_through_torch_ops(
    ns: str, annotation: Any, good: tuple[Any, ...], bad: list[Any], sentence: str, pair: tuple[int, ...], where: str
) -> None:
    """A body and a default fake refuse a flat value that matches no value of the user in the same way."""
    if pair:

        def body(x: Tensor, pair: tuple[int, int], value: Any) -> Tensor:
            return x.clone()

        body.__annotations__["value"] = annotation
    else:
        body = with_annotation(annotation)
    torch_op = op_def(magi_register_custom_op(f"{ns}::op")(body)).torch_op

    def run(values: tuple[Any, ...]) -> Any:
        if where == "compiled":
            return torch.compile(lambda x: torch_op(x, *pair, *values), fullgraph=True, backend="aot_eager")(X)
        if where == "fake":
            with FakeTensorMode():
                return torch_op(torch.empty(3), *pair, *values)
        return torch_op(X, *pair, *values)

    assert run(good).shape == (3,)
    expected: type[Exception] = Exception if where == "compiled" else ArgumentValueError
    for values in bad:
        with pytest.raises(expected, match=re.escape(f"{ns}::op: 'value")) as caught:
            run(values)
    assert sentence in str(caught.value)


def test_a_symbolic_index_is_not_read_while_tracing(ns: str) -> None:
    @magi_register_custom_op(f"{ns}::op")
    def op(x: Tensor, value: Literal[3, "a"]) -> Tensor:
        return x.clone()

    def run(x: Tensor) -> Any:
        return op.torch_op(x, x.shape[0] - 2)

    compiled: Any = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    assert compiled(torch.ones(2)).shape == (2,)
    assert compiled(torch.ones(3)).shape == (3,)
    with pytest.raises(ArgumentValueError, match=re.escape("'value' is 5 (int), expected one of 3, 'a'.")):
        compiled(torch.ones(7))


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Scrambled(list[int]):
    def __repr__(self) -> str:
        return 5  # type: ignore[return-value]


SHOWN = "<a Unshowable whose __repr__ fails>"
BAD: Any = Unshowable()


def test_an_object_whose_repr_raises_as_a_name() -> None:
    with pytest.raises(OpSchemaError, match=re.escape(f"the op name {SHOWN} (Unshowable) is not a string")):
        magi_register_custom_op(BAD)
    with pytest.raises(OpSchemaError, match=re.escape(f"'{SHOWN}' is not an op that magi-opschema registered")):
        op_def(BAD)


@pytest.mark.parametrize("annotation", [float, Mode, Inner, list[int], tuple[int, int], Tensor, Literal["a"]], ids=str)
def test_an_object_whose_repr_raises_as_an_argument(ns: str, annotation: Any) -> None:
    def body(x: Tensor, value: Any) -> Tensor:
        raise AssertionError("the body runs")

    body.__annotations__["value"] = annotation
    op: Any = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["x"])(body)
    with pytest.raises(OpSchemaError, match=re.escape(f"{ns}::op: 'value' is {SHOWN} (Unshowable), expected")):
        op(X, Unshowable())
    with pytest.raises(OpSchemaError, match=re.escape(f"{ns}::op: 'value' is ")):
        op(X, Scrambled([Unshowable()]))  # type: ignore[list-item]


def test_a_field_whose_repr_raises(ns: str) -> None:
    """A default is shown too, in what `print(op_def(op))` says."""
    Odd = make_dataclass("Odd", [("x", float)], frozen=True, namespace={"__repr__": lambda self: 1 / 0})

    default = Odd(1.0)

    def body(x: Tensor, odd: Any = default) -> Tensor:
        return x * 2

    body.__annotations__["odd"] = Odd
    op = magi_register_custom_op(f"{ns}::op")(body)
    assert "odd: Odd = Odd(x=1.0)" in str(op_def(op))
    with pytest.raises(ArgumentError, match=re.escape("'x' is <a Odd whose __repr__ fails> (Odd), expected a Tensor.")):
        op(Odd(2.0), Odd(2.0))
