# SPDX-License-Identifier: Apache-2.0
"""Values and calls that are refused, in eager and in compiled code; the error begins with the name of the op.

Among them are values that the dispatcher takes: None for a Tensor, and what `torch.ops` lets through.
"""

from __future__ import annotations

import contextlib
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from typing import Annotated, Any, Literal, NamedTuple

import pytest
import torch
from _signatures import SHOWN, Access, Box, Inner, Level, Mode, Sizes, Unshowable, X, located, shown, with_annotation
from magi_opschema import magi_register_custom_op, op_def
from magi_opschema.errors import ArgumentError, ArgumentValueError, OpSchemaError, ReturnValueError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.types import Number


Op = Callable[..., Any]


class SubInner(Inner):
    pass


Holding = make_dataclass("Holding", [("inner", Inner)], frozen=True)
NOT_INNER = "expected a Inner, not a subclass or a look-alike, because the op rebuilds it from its fields."
NOT_MODE = "expected one of Mode.RMS, Mode.LAYER, or the value of one."
NOT_SIZES = "expected a dict with exactly the keys 'height', 'width'."


# annotation, bad value, error class, sentence
CALLS: list[tuple[object, Any, type[OpSchemaError], str]] = [
    (Inner, None, ArgumentError, f"'value' is None (NoneType), {NOT_INNER}"),
    (Inner, SubInner(), ArgumentError, f"(SubInner), {NOT_INNER}"),
    (Holding, Holding(3), ArgumentError, f"'value.inner' is 3 (int), {NOT_INNER}"),
    (Inner | None, "x", ArgumentError, f"'value' is 'x' (str), {NOT_INNER[:-1]}"),
    (Box[Mode], Box(3), ArgumentValueError, f"'value.value' is 3 (int), {NOT_MODE}"),
    (Mode, "batch", ArgumentValueError, f"'value' is 'batch' (str), {NOT_MODE}"),
    (Mode, torch.ones(2), ArgumentValueError, f"(Tensor), {NOT_MODE}"),
    (Mode | None, 3, ArgumentValueError, f"'value' is 3 (int), {NOT_MODE[:-1]}, or None."),
    (Level, True, ArgumentValueError, "'value' is True (bool), expected one of Level.LOW, Level.HIGH"),
    (Literal["a", 1], True, ArgumentValueError, "'value' is True (bool), expected one of 'a', 1."),
    (Literal[1, 2], 3, ArgumentValueError, "'value' is 3 (int), expected one of 1, 2."),
    (Literal["rms", "layer"], "batch", ArgumentValueError, "'value' is 'batch' (str), expected one of 'rms', 'layer'."),
    (list[Literal["a", "b"]], ["a", "c"], ArgumentValueError,
     "'value' is ['a', 'c'] (list), expected a list with each item one of 'a', 'b'."),
    (tuple[Mode, ...], "rms", ArgumentValueError,
     f"'value' is 'rms' (str), expected a tuple with each item {NOT_MODE[9:]}"),
    (list[torch.dtype], ["torch.int8"], ArgumentValueError, "expected a list with each item a torch.dtype."),
    (list[torch.device], [3], ArgumentValueError, "expected a list with each item a torch.device."),
    (list[complex], ["1j"], ArgumentValueError, "'value' is ['1j'] (list), expected a list of numbers."),
    (list[complex], 1j, ArgumentValueError, "'value' is 1j (complex), expected a list of numbers."),
    (tuple[int, float], (1,), ArgumentError, "'value' is (1,) (tuple), expected a tuple of 2, tuple[int, float]."),
    (tuple[int, float], [1, 2.0], ArgumentError, "'value' is [1, 2.0] (list), expected a tuple of 2"),
    (Sizes, {"height": 1, "width": 2, "depth": 3}, ArgumentError, f"(dict), {NOT_SIZES}"),
    (Sizes, {"height": 1, "depth": 2}, ArgumentError, NOT_SIZES),
    (Sizes, [("height", 1), ("width", 2)], ArgumentError, f"(list), {NOT_SIZES}"),
    (list[Tensor | None], torch.ones(2, 2), ArgumentError, "(Tensor), expected list[Tensor | None]."),
    (list[Tensor | None], [None, 3], ArgumentError, "'value' is [None, 3] (list), expected list[Tensor | None]."),
]  # fmt: skip


def never_run(annotation: object) -> Callable[..., Any]:
    """The body of an op whose calls are refused."""

    def body(x: Tensor, value: Any, k: int = 1) -> Tensor:
        raise AssertionError("the body runs")

    body.__annotations__["value"] = annotation
    return body


@pytest.mark.parametrize(("annotation", "value", "error", "sentence"), CALLS, ids=shown)
def test_value_is_refused_at_the_call(
    ns: str, annotation: object, value: Any, error: type[OpSchemaError], sentence: str
) -> None:
    body = never_run(annotation)
    op = magi_register_custom_op(f"{ns}::op")(body)
    calls: list[Op] = [lambda: op(X, value), lambda: op(x=X, value=value)]
    for call in calls:
        with pytest.raises(error, match=re.escape(sentence)) as caught:
            call()
        assert str(caught.value).startswith(f"{ns}::op: '")
        assert str(caught.value).endswith(located(body))


@dataclass(frozen=True)
class TwoTensors:
    y: Tensor
    z: Tensor


# return annotation, what the body returns, sentence
OUTPUTS: list[tuple[object, Any, str]] = [
    (None, X, "'output' is tensor([0., 1., 2.]) (Tensor), expected None."),
    (Tensor, None, "'output' is None (NoneType), expected a Tensor."),
    (Tensor, (X + 1, X + 2), "expected a Tensor."),
    (int, "three", "'output' is 'three' (str), expected an int of 64 bits."),
    (list[Tensor], [X + 1, 3], "(list), expected a list with each item a Tensor."),
    (tuple[Tensor, float], (X + 1, "x"), "'output.1' is 'x' (str), expected a float."),
    (TwoTensors, (X + 1, X + 2), "expected a TwoTensors, not a subclass or a look-alike"),
    (tuple[Tensor, tuple[Tensor, Tensor]], (X + 1, (X + 2,)),
     "'output.1' is (tensor([2., 3., 4.]),) (tuple), expected a tuple of 2"),
]  # fmt: skip


@pytest.mark.parametrize(("annotation", "value", "sentence"), OUTPUTS, ids=shown)
def test_output_is_refused(ns: str, annotation: object, value: Any, sentence: str) -> None:
    def body(x: Tensor) -> Any:
        return value

    body.__annotations__["return"] = annotation
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=lambda x: value)(body)
    with pytest.raises(ReturnValueError, match=re.escape(sentence)) as caught:
        op(X)
    assert str(caught.value).endswith(located(body))


# annotation, bad value, what the sentence says of it; the dispatcher alone looks at these
PLAIN: list[tuple[object, Any, str]] = [
    (Tensor, 3, "'value' is 3 (int), expected a Tensor."),
    (Tensor | None, "x", "'value' is 'x' (str), expected a Tensor, or None."),
    (list[Tensor], X, "'value' is tensor([0., 1., 2.]) (Tensor), expected a list with each item a Tensor."),
    (list[Tensor], [X, None], "'value' is [tensor([0., 1., 2.]), None] (list), expected a list with each item"),
    (int, "q", "'value' is 'q' (str), expected an int of 64 bits."),
    (int, 1.5, "'value' is 1.5 (float), expected an int of 64 bits."),
    (int, 2**70, "'value' is 1180591620717411303424 (int), expected an int of 64 bits."),
    (int, None, "'value' is None (NoneType), expected an int of 64 bits."),
    (float, "big", "'value' is 'big' (str), expected a float."),
    (bool, "yes", "'value' is 'yes' (str), expected a bool."),
    (str, 3, "'value' is 3 (int), expected a str."),
    (complex, "i", "'value' is 'i' (str), expected a complex."),
    (Number, "1", "'value' is '1' (str), expected a number."),
    (torch.dtype, "float32", "'value' is 'float32' (str), expected a torch.dtype."),
    (torch.device, 1.5, "'value' is 1.5 (float), expected a torch.device."),
    (torch.layout, "strided", "'value' is 'strided' (str), expected a torch.layout."),
    (list[int], 3, "'value' is 3 (int), expected a list with each item an int of 64 bits."),
    (list[int], [1.5], "'value' is [1.5] (list), expected a list with each item an int of 64 bits."),
    (list[float] | None, ["x"], "'value' is ['x'] (list), expected a list with each item a float, or None."),
    (tuple[int, ...], ["x"], "'value' is ['x'] (list), expected a list with each item an int of 64 bits."),
    (Literal[1, 2], "x", "'value' is 'x' (str), expected one of 1, 2."),
]


@pytest.mark.parametrize("form", ["alone", "in a record", "packed"])
@pytest.mark.parametrize(("annotation", "value", "sentence"), PLAIN, ids=shown)
def test_a_leaf_of_another_class(ns: str, annotation: object, value: Any, sentence: str, form: str) -> None:
    if form == "packed" and annotation == list[Tensor]:
        pytest.skip("lists of Tensors share no argument")
    many = [(f"f{i}", annotation) for i in range(65 if form == "packed" else 1)]
    record = make_dataclass("Holds", [*many, ("value", annotation)], frozen=True)
    body = never_run(annotation if form == "alone" else record)
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["x"])(body)
    good = {Tensor: X, int: 1, float: 1.0, bool: True, str: "", complex: 1j, Number: 1, torch.dtype: torch.int8,
            torch.device: torch.device("cpu"), torch.layout: torch.strided, Literal[1, 2]: 1}  # fmt: skip
    others = good.get(annotation, () if typing.get_origin(annotation) in {list, tuple} else None)
    passed = value if form == "alone" else record(*[others for _ in many], value)
    path = sentence if form == "alone" else sentence.replace("'value'", "'value.value'", 1)
    for x in (X, X.clone().requires_grad_()):
        for args, kwargs in (((x, passed), {}), ((), {"value": passed, "x": x})):
            with pytest.raises((ArgumentError, ArgumentValueError), match=re.escape(path)) as caught:
                op(*args, **kwargs)
            assert str(caught.value).startswith(f"{ns}::op: ")
            assert str(caught.value).endswith(located(body))


BY_PATH: dict[str, Any] = {"direct": float, "lowered": Annotated[float, "m"], "flattened": Box[float]}


@pytest.mark.parametrize("is_argument", [False, True])
@pytest.mark.parametrize("value", [make_dataclass("Box", ["value"], frozen=True)(1), X, None, "text", Box])
def test_a_look_alike_in_compiled_code(ns: str, value: Any, is_argument: bool) -> None:
    """Dynamo traces the refusal too, and has no repr of most objects."""
    op: Any = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["x"])(with_annotation(Box[int]))
    has_repr = value is None or isinstance(value, str)
    shown = f"{value!r} ({type(value).__name__})" if has_repr else f"of class {type(value).__name__}"
    sentence = rf"{ns}::op: 'value' is {re.escape(shown)}, expected a Box, .*\(_signatures.py:\d+\)"
    compiled: Any = torch.compile(op if is_argument else lambda x, _: op(x, value), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=sentence):
        compiled(X, value)


@pytest.mark.parametrize("grad", [False, True])
def test_a_wrong_class_where_the_op_writes(ns: str, grad: bool) -> None:
    cls = make_dataclass("Written", [("out", Tensor), ("outs", list[Tensor])], frozen=True)

    body = never_run(cls)
    body.__annotations__["return"] = None
    op = magi_register_custom_op(f"{ns}::op", mutates_args=["value"])(body)
    cases: list[tuple[Any, Any, str]] = [
        ("x", [], "'value.out' is 'x' (str), expected a Tensor."),
        (X, 3, "'value.outs' is 3 (int), expected a list with each item a Tensor."),
        (X, [X, None], "'value.outs' is [tensor([0., 1., 2.]), None] (list), expected a list with each item a Tensor."),
        (X, X, "'value.outs' is tensor([0., 1., 2.]) (Tensor), expected a list with each item a Tensor."),
    ]
    for out, outs, sentence in cases:
        with torch.set_grad_enabled(grad), pytest.raises(ArgumentError, match=re.escape(sentence)):
            op(X, cls(out, outs))


def test_an_error_of_the_body_is_left_alone(ns: str) -> None:
    texts = ["planted", f"{ns}::op() Expected", "Unknown keyword argument 'a' for operator 'b'.", "helper() missing 1"]

    def body(x: Tensor, value: Box[int]) -> Tensor:
        raise (TypeError if "missing" in texts[value.value] else RuntimeError)(texts[value.value])

    op = magi_register_custom_op(f"{ns}::op")(body)
    for i, text in enumerate(texts):
        for x in (X, X.clone().requires_grad_()):
            calls: list[tuple[Any, Any]] = [(op, Box(i)), (op.torch_op, i), (getattr(torch.ops, ns).op, i)]
            for call, value in calls:
                with pytest.raises((RuntimeError, TypeError), match=re.escape(text)) as caught:
                    call(x, value)
                assert not isinstance(caught.value, OpSchemaError)


# annotation, bad value, sentence
TRACED: list[tuple[object, Any, str]] = [
    (Literal[1, 2], 3, "'value' is 3 (int), expected one of 1, 2."),
    (Literal[1, 2] | None, 3, "'value' is 3 (int), expected one of 1, 2, or None."),
    (Literal[True], False, "'value' is False (bool), expected one of True."),
    (list[Literal[3, 4]], [3, 5], "'value' is [3, 5] (list), expected a list with each item one of 3, 4."),
    (Literal["a", "b"], "c", "'value' is 'c' (str), expected one of 'a', 'b'."),
    (Tensor, None, "'value' is None (NoneType), expected a Tensor."),
    (Annotated[Tensor, "m"], None, "'value' is None (NoneType), expected a Tensor."),
    (tuple[Tensor, int], (None, 1), "'value.0' is None (NoneType), expected a Tensor."),
    (float, "big", "'value' is 'big' (str), expected a float. (_signatures"),
    (Annotated[float, "m"], "big", "'value' is 'big' (str), expected a float. (_signatures"),
    (Box[float], Box("big"), "'value.value' is 'big' (str), expected a float. (_signatures"),
]


@pytest.mark.parametrize("fake", ["by name", "a function"])
@pytest.mark.parametrize(("annotation", "value", "sentence"), TRACED, ids=shown)
def test_a_wrong_value_is_found_while_tracing(
    ns: str, annotation: object, value: Any, sentence: str, fake: str
) -> None:
    infer: Any = ["x"] if fake == "by name" else lambda x, value: torch.empty_like(x)
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=infer)(with_annotation(annotation))
    sentence = re.escape(f"{ns}::op: {sentence}")
    with FakeTensorMode(), pytest.raises((ArgumentError, ArgumentValueError), match=sentence):
        op(torch.empty(2), value)
    with pytest.raises((ArgumentError, ArgumentValueError), match=sentence):
        op(torch.empty(2, device="meta"), value)
    with pytest.raises(Exception, match=sentence):
        torch.compile(lambda x: op(x, value), fullgraph=True, backend="aot_eager")(X)


@pytest.mark.parametrize(("annotation", "listed"), [(Literal[2, 3], "2, 3"), (Literal["a", 2, 3], "'a', 2, 3")])
def test_a_symbolic_literal_is_checked_when_it_has_a_value(ns: str, annotation: Any, listed: str) -> None:
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["x"])(with_annotation(annotation))
    compiled = torch.compile(lambda x: op.torch_op(x, x.shape[0]), fullgraph=True, backend="aot_eager", dynamic=True)
    assert compiled(torch.ones(2)).shape == (2,)
    with pytest.raises(ArgumentValueError, match=re.escape(f"'value' is 4 (int), expected one of {listed}.")):
        compiled(torch.ones(4))


MISFITS: dict[str, tuple[Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]], str]] = {
    "nothing": (lambda x: ((), {}), "the call lacks 'x', '{value}'."),
    "one missing": (lambda x: ((x,), {}), "the call lacks '{value}'."),
    "one missing, by name": (lambda x: ((), {"k": 2, "VALUE": 1.0}), "the call lacks 'x'."),
    "too many": (lambda x: ((x, 1.0, 2, 3, 4), {}), "the call gives 5 arguments by position, expected at most 3."),
    "an unknown name": (lambda x: ((x, 1.0), {"zz": 3}), "the call names 'zz', which is not a parameter. The"),
    "a wrong letter": (
        lambda x: ((x,), {"valeu": 1.0}),
        "the call names 'valeu', which is not a parameter. Did you mean '{value}'? The",
    ),
    "twice": (lambda x: ((x, 1.0), {"x": x}), "the call gives 'x' twice, by position and by name."),
    "twice, the default": (lambda x: ((x, 1.0, 1), {"k": 2}), "the call gives 'k' twice, by position and by name."),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", MISFITS)
@pytest.mark.parametrize("form", BY_PATH)
def test_a_call_that_does_not_fit_the_signature(ns: str, form: str, case: str, grad: bool) -> None:
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["x"])(never_run(BY_PATH[form]))
    make, sentence = MISFITS[case]
    args, kwargs = make(X.clone().requires_grad_(grad))
    rich = {name.replace("VALUE", "value"): value for name, value in kwargs.items()}
    shown = {"direct": "float", "lowered": "float", "flattened": "Box[float]"}[form]
    line = f"The signature is body(x: Tensor, value: {shown}, k: int = 1) -> Tensor. (test_value_errors.py:"
    with pytest.raises(ArgumentError, match=re.escape(f"{ns}::op: {sentence.format(value='value')}")) as caught:
        op(*args, **rich)
    assert line in str(caught.value)
    if form == "flattened" and not grad:
        seen = re.escape(f"{ns}::op: {sentence.format(value='value').partition(' Did you mean')[0]}")
        with pytest.raises(Exception, match=seen):
            torch.compile(lambda: op(*args, **rich), fullgraph=True, backend="eager")()
    value = "value__value" if form == "flattened" else "value"
    flat = {name.replace("VALUE", value): given for name, given in kwargs.items()}
    if case == "a wrong letter" and form == "flattened":
        flat, sentence = {"value_value": 1.0}, sentence.replace("valeu", "value_value")
    for call in (op.torch_op, getattr(torch.ops, ns).op):
        with pytest.raises(ArgumentError, match=re.escape(f"{ns}::op: {sentence.format(value=value)}")) as caught:
            call(*args, **flat)
        schema = "The schema is body(Tensor x, float value__value, SymInt k=1) -> Tensor. (test_value_errors.py:"
        assert (schema if form == "flattened" else line) in str(caught.value)


def test_a_call_of_a_method_that_does_not_fit(ns: str) -> None:
    class Layer(NamedTuple):
        weight: Tensor

    def scale(self: Layer, x: Tensor, *, eps: float, mode: str = "rms") -> Tensor:
        return x * self.weight

    Layer.scale = magi_register_custom_op(f"{ns}::scale")(scale)  # type: ignore[attr-defined]
    layer: Any = Layer(X)
    assert torch.equal(layer.scale(X, eps=1.0), X * X)
    assert torch.equal(layer.scale(x=X, mode="layer", eps=1.0), X * X)
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((X,), {}, "the call lacks 'eps'."),
        ((X, 1.0), {}, "the call gives 3 arguments by position, expected at most 2."),
        ((X,), {"eps": 1.0, "self": layer}, "the call gives 'self' twice, by position and by name."),
    ]
    for args, kwargs, sentence in cases:
        with pytest.raises(ArgumentError, match=re.escape(f"{ns}::scale: {sentence}")):
            layer.scale(*args, **kwargs)


def test_every_way_to_give_an_argument(ns: str) -> None:
    @magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=lambda x, a, b, *, c, d: x.new_empty(4))
    def op(x: Tensor, a: int, b: int = 2, *, c: int, d: int = 4) -> Tensor:
        return x.new_tensor([a, b, c, d])

    given = {"b": 2, "a": 1}
    calls: list[Callable[[], Tensor]] = [
        lambda: op(X, 1, c=3),
        lambda: op(X, 1, 2, c=3, d=4),
        lambda: op(X, b=2, a=1, c=3),
        lambda: op(d=4, c=3, b=2, a=1, x=X),
        lambda: op(X, **given, c=3),
    ]
    for call in calls:
        assert call().tolist() == [1, 2, 3, 4]
        assert torch.compile(call, fullgraph=True, backend="eager")().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("path", BY_PATH)
@pytest.mark.parametrize("kind", ["functional", "with a backward", "mutating"])
def test_none_for_a_tensor(ns: str, path: str, kind: str) -> None:
    def body(x: Tensor, out: Tensor, value: Any) -> Tensor:
        raise AssertionError("the body runs")

    body.__annotations__["value"] = BY_PATH[path]
    options: dict[str, dict[str, Any]] = {
        "functional": {},
        "with a backward": {"backward_fn": lambda ctx, grad: (grad, grad, None)},
        "mutating": {"mutates_args": ("out",)},
    }
    op: Any = magi_register_custom_op(f"{ns}::op", **options[kind])(body)
    value = Box(1.0) if path == "flattened" else 1.0
    x = X.clone().requires_grad_(kind == "with a backward")
    calls: list[tuple[str, Callable[[], object]]] = [
        ("x", lambda: op(None, X, value)),
        ("out", lambda: op(x, None, value)),
        ("out", lambda: op(x, out=None, value=value)),
        ("x", lambda: op.torch_op(None, X, 1.0)),
        ("out", lambda: op.torch_op(x, None, 1.0)),
    ]
    for name, call in calls:
        sentence = re.escape(f"{ns}::op: '{name}' is None (NoneType), expected a Tensor")
        for mode in (contextlib.nullcontext, torch.inference_mode):
            with mode(), pytest.raises(ArgumentError, match=sentence):
                call()


@dataclass(frozen=True)
class Gaps:
    weight: Tensor
    eps: float = 1.0
    sizes: tuple[int, ...] = ()
    gaps: tuple[Tensor | None, ...] = ()


@dataclass(frozen=True)
class HoldsGaps:
    inner: Gaps | None = None


NONES: list[tuple[object, str, str]] = [
    (Gaps(None), "inner.weight", "a Tensor"),  # type: ignore[arg-type]
    (Gaps(X, eps=None), "inner.eps", "a float"),  # type: ignore[arg-type]
    (Gaps(X, sizes=None), "inner.sizes", "a list with each item an int of 64 bits"),  # type: ignore[arg-type]
    (Gaps(X, gaps=None), "inner.gaps", "tuple[Tensor | None, ...]"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("form", ["alone", "in a record", "packed"])
@pytest.mark.parametrize(("value", "path", "expected"), NONES, ids=[path for _, path, _ in NONES])
def test_none_below_a_record_that_may_be_none(ns: str, value: Any, path: str, expected: str, form: str) -> None:
    """There every leaf of the schema may be None."""

    def body(x: Tensor, inner: Any) -> Tensor:
        assert inner is None or getattr(inner, "inner", None) is None
        return x * 2

    many = make_dataclass("Many", [*((f"f{i}", float) for i in range(70)), ("inner", Gaps | None)], frozen=True)
    body.__annotations__["inner"] = {"alone": Gaps | None, "in a record": HoldsGaps, "packed": many}[form]
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["x"])(body)

    def wrapped(inner: Any) -> Any:
        if form == "alone":
            return inner
        return HoldsGaps(inner) if form == "in a record" else many(*[0.0] * 70, inner)

    where = path if form == "alone" else f"inner.{path}"
    for x in (X, X.clone().requires_grad_()):
        with pytest.raises(
            OpSchemaError, match=re.escape(f"{ns}::op: '{where}' is None (NoneType), expected {expected}")
        ):
            op(x, wrapped(value))
    assert torch.equal(op(X, wrapped(None)), X * 2)


@dataclass(frozen=True)
class Moded:
    mode: Mode = Mode.RMS


# annotation, good flat values, bad ones, what is said of the last of these
FLAT: list[tuple[Any, tuple[Any, ...], list[tuple[Any, ...]], str]] = [
    (Mode, ("rms",), [("RMS",), ("",), ("zz",)], f"'value' is 'zz' (str), {NOT_MODE}"),
    (Mode | None, (None,), [("zz",)], f"'value' is 'zz' (str), {NOT_MODE[:-1]}, or None."),
    (Level, ("LOW",), [("low",), ("1",)], "'value' is '1' (str), expected one of Level.LOW, Level.HIGH, or the value"),
    (list[Mode], (["rms"],), [(["zz"],)], f"'value' is 'zz' (str), expected a list with each item {NOT_MODE[9:]}"),
    (Access, (3,), [(-9,), (64,), (4,)], "'value' is 4 (int), expected a Access, or the bits of one."),
    (Literal["a", 1], (1,), [(2,), (-1,)], "'value' is -1 (int), expected one of 'a', 1."),
    (Literal["a", "b"], ("a",), [("c",)], "'value' is 'c' (str), expected one of 'a', 'b'."),
    (list[torch.dtype], (["torch.int8"],), [(["int8"],), (["torch.zz"],)],
     "'value' is 'torch.zz' (str), expected a list with each item a torch.dtype."),
    (list[torch.device], (["cpu"],), [(["zpu"],)], "'value' is 'zpu' (str), expected a list with each item a torch.de"),
    (Moded, ("rms",), [("bogus",)], f"'value.mode' is 'bogus' (str), {NOT_MODE}"),
    (Moded | None, (False, "-"), [(True, "bogus")], f"'value.mode' is 'bogus' (str), {NOT_MODE}"),
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


class Scrambled(list[int]):
    def __repr__(self) -> str:
        return 5  # type: ignore[return-value]


@pytest.mark.parametrize("annotation", [float, Mode, list[int], Tensor], ids=str)
def test_an_object_whose_repr_raises_as_an_argument(ns: str, annotation: Any) -> None:
    op: Any = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["x"])(never_run(annotation))
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
