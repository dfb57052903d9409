# SPDX-License-Identifier: Apache-2.0
"""Calls that do not fit the signature: the error begins with the name of the op, wherever it is called."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import pytest
import torch
from _bad_inputs import Box, X
from magi_opschema import magi_register_custom_op
from magi_opschema.errors import ArgumentError, OpSchemaError
from torch import Tensor


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


def misfit_op(ns: str, form: str) -> Any:
    annotation = {"direct": float, "lowered": Annotated[float, "m"], "flattened": Box[float]}[form]

    def body(x: Tensor, value: Any, k: int = 1) -> Tensor:
        raise AssertionError("the body runs")

    body.__annotations__["value"] = annotation
    return magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["x"])(body)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", MISFITS)
@pytest.mark.parametrize("form", ["direct", "lowered", "flattened"])
def test_a_call_that_does_not_fit_the_signature(ns: str, form: str, case: str, grad: bool) -> None:
    op = misfit_op(ns, form)
    make, sentence = MISFITS[case]
    args, kwargs = make(X.clone().requires_grad_(grad))
    rich = {name.replace("VALUE", "value"): value for name, value in kwargs.items()}
    shown = {"direct": "float", "lowered": "float", "flattened": "Box[float]"}[form]
    line = f"The signature is body(x: Tensor, value: {shown}, k: int = 1) -> Tensor. (test_misfit_calls.py:"
    with pytest.raises(ArgumentError, match=re.escape(f"{ns}::op: {sentence.format(value='value')}")) as caught:
        op(*args, **rich)
    assert line in str(caught.value)
    value = "value__value" if form == "flattened" else "value"
    flat = {name.replace("VALUE", value): given for name, given in kwargs.items()}
    if case == "a wrong letter" and form == "flattened":
        flat, sentence = {"value_value": 1.0}, sentence.replace("valeu", "value_value")
    for call in (op.torch_op, getattr(torch.ops, ns).op):
        with pytest.raises(ArgumentError, match=re.escape(f"{ns}::op: {sentence.format(value=value)}")):
            call(*args, **flat)


def test_a_schema_is_shown_where_a_flat_call_does_not_fit(ns: str) -> None:
    schema = "The schema is body(Tensor x, float value__value, SymInt k=1) -> Tensor. (test_misfit_calls.py:"
    with pytest.raises(ArgumentError, match=re.escape(schema)):
        misfit_op(ns, "flattened").torch_op(X)


@pytest.mark.parametrize("case", MISFITS)
def test_a_call_in_compiled_code_that_does_not_fit(ns: str, case: str) -> None:
    op = misfit_op(ns, "flattened")
    make, sentence = MISFITS[case]
    sentence = sentence.format(value="value").partition(" Did you mean")[0]

    def run(x: Tensor) -> Any:
        args, kwargs = make(x)
        return op(*args, **{name.replace("VALUE", "value"): value for name, value in kwargs.items()})

    with pytest.raises(Exception, match=re.escape(f"{ns}::op: {sentence}")):
        torch.compile(run, fullgraph=True, backend="eager")(X)


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
        ((X,), {"eps": 1.0, "mod": "rms"}, "the call names 'mod', which is not a parameter. Did you mean 'mode'?"),
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


def test_an_argument_error_of_the_body_stays_the_bodys(ns: str) -> None:
    def helper(a: int) -> None:
        del a

    @magi_register_custom_op(f"{ns}::op")
    def op(x: Tensor) -> Tensor:
        helper()  # type: ignore[call-arg]
        return x.clone()

    for call in (op, op.torch_op, getattr(torch.ops, ns).op):
        with pytest.raises(TypeError, match="helper\\(\\) missing 1 required positional argument") as caught:
            call(X)
        assert not isinstance(caught.value, OpSchemaError)
