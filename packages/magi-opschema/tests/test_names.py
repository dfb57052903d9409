# SPDX-License-Identifier: Apache-2.0
"""Nothing that a user names changes what generated code does."""

from __future__ import annotations

import builtins
import keyword
from dataclasses import dataclass, make_dataclass
from typing import Any, TypedDict

import pytest
import torch
from _named import Inner, Mode, Sizes, X, compiled, make_function
from magi_opschema import lower_signature, magi_register_custom_op, op_def
from torch import Tensor


RESERVED = [
    "_m_", "_m_torch_op", "_m_output", "_m_dispatch", "_m_fn", "_m_check", "_m_new", "_m_type", "_m_default_cfg",
    "__m_torch_op", "torch_op", "dispatch", "fn", "check", "output", "flatten", "rebuild_output", "item", "there",
    "key", "part", "pair", "cfg", "args", "kwargs", "ctx", "self", "cls", "mode", "name", "default", "op",
    "Ellipsis", "NoneType",
]  # fmt: skip


BUILTINS = [
    "len", "isinstance", "tuple", "object", "type", "dict", "list", "zip", "iter", "next", "repr", "any", "all", "str",
    "int", "float", "complex", "print", "super", "Exception", "NotImplemented",
    "__import__", "__build_class__",
]  # fmt: skip
DUNDERS = ["__class__", "__dict__", "__doc__", "__module__", "__name__", "__call__", "__slots__x", "__getattr__"]
SCHEMA_WORDS = ["Tensor", "Scalar", "SymInt", "Device", "Layout", "inf", "nan", "number", "t", "a0", "Future", "match"]
UNICODE = ["größe", "ﬁ", "名前", "µ", "ñ_ñ"]
PARAMETERS = [*RESERVED, *BUILTINS, *DUNDERS, *SCHEMA_WORDS, *UNICODE]
ODD_KEYS = ["", "a b", "1", "a.b", "a-b", 'q"\n\\', "{x}", "'", "#", "x" * 300]
KEYS = list(dict.fromkeys([*keyword.kwlist, *keyword.softkwlist, *PARAMETERS, *ODD_KEYS]))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter(ns: str, name: str) -> None:
    """As a Tensor on the direct path, then as a record, a list with checks, and a dict on the flattened one."""
    seen: list[Any] = []
    direct = magi_register_custom_op(f"{ns}::direct")(make_function({name: Tensor, "other": int}, seen))
    assert torch.equal(direct(X, 5), X * 2)
    assert seen.pop()[1] == 5
    cases: list[tuple[Any, Any]] = [(Inner, Inner(2.0)), (list[Mode], [Mode.LAYER]), (Sizes, {"height": 1, "width": 2}),
                                    (Inner | None, Inner()), (list[Tensor | None] | None, None)]  # fmt: skip
    for i, (annotation, value) in enumerate(cases):
        fn = make_function({"x_": Tensor, name: annotation}, seen)
        op = magi_register_custom_op(f"{ns}::op{i}")(fn)
        assert torch.equal(op(X, value), X * 2)
        assert seen.pop()[1] == value
        assert torch.equal(op(x_=X, **{fn.__code__.co_varnames[1]: value}), X * 2)
        assert seen.pop()[1] == value


@pytest.mark.parametrize("name", ["_m_torch_op", "_m_output", "len", "key", "item", "output", "größe", "self"])
def test_parameter_compiled(ns: str, name: str) -> None:
    seen: list[Any] = []
    op = magi_register_custom_op(f"{ns}::op")(make_function({"x_": Tensor, name: Inner, "other": list[Mode]}, seen))
    values = {"x_": X, name: Inner(3.0, Mode.LAYER), "other": [Mode.RMS]}
    assert torch.equal(compiled(op)(**values), X * 2 + 1)
    assert seen[-1][1:] == tuple(values.values())[1:]


@pytest.mark.parametrize("name", [*RESERVED, *BUILTINS, "body_kernel", "_m_body"])
def test_function_name(ns: str, name: str) -> None:
    seen: list[Any] = []
    op = magi_register_custom_op(f"{ns}::op")(make_function({"x": Tensor, "cfg": Inner}, seen, name))
    assert torch.equal(op(X, Inner(2.0)), X * 2)
    assert torch.equal(op_def(op).lowered_fn(X, 2.0, "rms"), X * 2)
    assert [values[1] for values in seen] == [Inner(2.0)] * 2


@pytest.mark.parametrize("name", ["_m_torch_op", "_m_are_transforms_active", "len"])
def test_function_name_compiled(ns: str, name: str) -> None:
    op = magi_register_custom_op(f"{ns}::op")(make_function({"x": Tensor, "cfg": Inner}, [], name))
    assert torch.equal(compiled(op)(x=X, cfg=Inner()), X * 2 + 1)


@pytest.mark.parametrize("name", [*RESERVED, *BUILTINS, *SCHEMA_WORDS, *UNICODE])
def test_class_name(ns: str, name: str) -> None:
    cls: Any = make_dataclass(name, [("a", int), ("b", Inner), ("c", list[Tensor | None])], frozen=True)
    out: Any = make_dataclass(name, [("y", Tensor), ("z", tuple[Tensor, Tensor])], frozen=True)

    def body(x: Tensor, cfg: Any) -> Any:
        assert type(cfg) is cls
        return out(x * cfg.a, (x * cfg.b.scale, x * 4))

    body.__annotations__ |= {"cfg": cls, "return": out}
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["x", "x", "x"])(body)
    got = op(X, cls(2, Inner(3.0), [None, X]))
    assert type(got) is out
    assert torch.equal(got.y, X * 2)
    assert torch.equal(got.z[0], X * 3)


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name not in {"ﬁ", "µ"} and not name.startswith("__")])
def test_field_name(ns: str, name: str) -> None:
    seen: list[Any] = []
    fields = [(name, int), (f"{name}_list", list[Mode]), (f"{name}_record", Inner | None)]
    cls: Any = make_dataclass("Cfg", fields, frozen=True)
    slotted: Any = make_dataclass("Slotted", fields, frozen=True, slots=True)
    for i, kind in enumerate((cls, slotted)):
        value = kind(3, [Mode.RMS], Inner())
        op = magi_register_custom_op(f"{ns}::op{i}")(make_function({"x": Tensor, "cfg": kind}, seen))
        assert torch.equal(op(X, value), X * 2)
        assert seen.pop()[1] == value


@pytest.mark.parametrize("key", KEYS)
def test_key_of_a_dict(ns: str, key: str) -> None:
    seen: list[Any] = []
    other = "other" if key != "other" else "another"
    keyed: Any = TypedDict("Keyed", {key: int, other: Inner})  # type: ignore[misc]
    value = {key: 7, other: Inner(2.0)}
    op = magi_register_custom_op(f"{ns}::op")(make_function({"x": Tensor, "key": keyed}, seen))
    assert torch.equal(op(X, value), X * 2)
    assert seen.pop()[1] == value
    with pytest.raises(TypeError, match="expected a dict with exactly the keys"):
        op(X, {"wrong": 7, other: Inner()})


def test_every_key_at_once_compiled(ns: str) -> None:
    seen: list[Any] = []
    keyed: Any = TypedDict("Keyed", dict.fromkeys(KEYS[:50], int))  # type: ignore[misc]
    value = {key: i for i, key in enumerate(KEYS[:50])}
    op = magi_register_custom_op(f"{ns}::op")(make_function({"x": Tensor, "key": keyed}, seen))
    assert torch.equal(compiled(op)(x=X, key=value), X * 2 + 1)
    assert seen[-1][1] == value


def test_parameters_named_like_packed_arguments(ns: str) -> None:
    seen: list[Any] = []
    cls: Any = make_dataclass("Many", [(f"f{i}", float) for i in range(40)], frozen=True)
    lists: Any = make_dataclass("Lists", [(f"f{i}", list[int]) for i in range(30)], frozen=True)
    names = {"packed_float": Inner, "packed_SymInt_list": bool, "packed_SymInt_list_length": str}
    fn = make_function({"x": Tensor, **names, "cfg": cls, "lists": lists}, seen)
    op = magi_register_custom_op(f"{ns}::op")(fn)
    values = (Inner(2.0), True, "text", cls(*range(40)), lists(*[[i] for i in range(30)]))
    assert torch.equal(op(X, *values), X * 2)
    assert seen.pop()[1:] == values


def test_output_names_do_not_touch_the_arguments_that_are_checked(ns: str) -> None:
    """The first call runs the fake on the flat arguments, after the body's output was taken apart."""

    @dataclass(frozen=True)
    class Below:
        y: Tensor
        z: Tensor

    @dataclass(frozen=True)
    class Out:
        inner: Below

    faked: list[int] = []

    def body(x: Tensor, output__inner: int) -> Out:
        return Out(Below(x * 2, x * 3))

    def fake(x: Tensor, output__inner: int) -> Out:
        faked.append(output__inner)
        return Out(Below(torch.empty_like(x), torch.empty_like(x)))

    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=fake)(body)
    assert torch.equal(op(X, 7).inner.z, X * 3)
    assert faked == [7]


def test_texts_hold_only_names_that_we_control() -> None:
    """Every name in a flat schema is an ASCII identifier, and no builtin is shadowed by a reserved name."""
    for name in PARAMETERS:
        lowering = lower_signature(make_function({"x_": Tensor, name: Inner}, []))
        assert all(argument.name.isascii() and argument.name.isidentifier() for argument in lowering.arguments)
        assert torch._C.parse_schema(f"ns::{lowering.schema}").name == "ns::body"
        assert not any(parameter.name.startswith(lowering.prefix) for parameter in lowering.parameters)
        assert not hasattr(builtins, lowering.prefix)
