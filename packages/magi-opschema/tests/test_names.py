# SPDX-License-Identifier: Apache-2.0
"""No name or value of a user changes what generated code does; where annotations find names; defaults as they are."""

from __future__ import annotations

import enum
import keyword
import sys
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Literal, TypedDict

import pytest
import torch
from _signatures import Mode, Moded, Sizes, X, make_function, same
from magi_opschema import errors, lower_signature, magi_register_custom_op, op_def
from torch import Tensor


RESERVED = [
    "_m_", "_m_torch_op", "_m_output", "_m_dispatch", "_m_are_transforms_active",
    "_m_fn", "_m_check", "_m_new", "_m_type", "_m_default_cfg",
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
    seen: list[Any] = []
    direct = magi_register_custom_op(f"{ns}::direct")(make_function({name: Tensor, "other": int}, seen))
    assert torch.equal(direct(X, 5), X * 2)
    assert seen.pop()[1] == 5
    cases: list[tuple[Any, Any]] = [(Moded, Moded(2.0)), (list[Mode], [Mode.LAYER]), (Sizes, {"height": 1, "width": 2}),
                                    (Moded | None, Moded()), (list[Tensor | None] | None, None)]  # fmt: skip
    for i, (annotation, value) in enumerate(cases):
        fn = make_function({"x_": Tensor, name: annotation}, seen)
        op = magi_register_custom_op(f"{ns}::op{i}")(fn)
        assert torch.equal(op(X, value), X * 2)
        assert seen.pop()[1] == value
        assert torch.equal(op(x_=X, **{fn.__code__.co_varnames[1]: value}), X * 2)
        assert seen.pop()[1] == value


@pytest.mark.parametrize("name", [*RESERVED, *BUILTINS, "body_kernel", "_m_body"])
def test_function_name(ns: str, name: str) -> None:
    seen: list[Any] = []
    op = magi_register_custom_op(f"{ns}::op")(make_function({"x": Tensor, "cfg": Moded}, seen, name))
    assert torch.equal(op(X, Moded(2.0)), X * 2)
    assert torch.equal(op_def(op).lowered_fn(X, 2.0, "rms"), X * 2)
    assert [values[1] for values in seen] == [Moded(2.0)] * 2


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("name", PARAMETERS)
def test_name_of_a_class_and_of_its_fields(ns: str, name: str, slots: bool) -> None:
    of_fields = "value" if name in {"ﬁ", "µ"} or name.startswith("__") else name
    kinds = {"": int, "_list": list[Mode], "_record": Moded | None, "_tensors": list[Tensor | None]}
    cls: Any = make_dataclass(name, [(of_fields + end, kind) for end, kind in kinds.items()], frozen=True, slots=slots)
    out: Any = make_dataclass(name, [("y", Tensor), ("z", tuple[Tensor, Tensor])], frozen=True)
    value = cls(2, [Mode.RMS], Moded(3.0), [None, X])

    def body(x: Tensor, cfg: Any) -> Any:
        assert same(cfg, value)
        return out(x * 2, (x * 3, x * 4))

    body.__annotations__ |= {"cfg": cls, "return": out}
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["x", "x", "x"])(body)
    assert same(op(X, value), out(X * 2, (X * 3, X * 4)))


@pytest.mark.parametrize("key", KEYS)
def test_key_of_a_dict(ns: str, key: str) -> None:
    seen: list[Any] = []
    other = "other" if key != "other" else "another"
    keyed: Any = TypedDict("Keyed", {key: int, other: Moded})  # type: ignore[misc]
    value = {key: 7, other: Moded(2.0)}
    op = magi_register_custom_op(f"{ns}::op")(make_function({"x": Tensor, "key": keyed}, seen))
    assert torch.equal(op(X, value), X * 2)
    assert seen.pop()[1] == value
    with pytest.raises(TypeError, match="expected a dict with exactly the keys"):
        op(X, {"wrong": 7, other: Moded()})


def test_parameters_named_like_packed_arguments(ns: str) -> None:
    seen: list[Any] = []
    cls: Any = make_dataclass("Many", [(f"f{i}", float) for i in range(40)], frozen=True)
    lists: Any = make_dataclass("Lists", [(f"f{i}", list[int]) for i in range(30)], frozen=True)
    names = {"packed_float": Moded, "packed_SymInt_list": bool, "packed_SymInt_list_length": str}
    fn = make_function({"x": Tensor, **names, "cfg": cls, "lists": lists}, seen)
    op = magi_register_custom_op(f"{ns}::op")(fn)
    values = (Moded(2.0), True, "text", cls(*range(40)), lists(*[[i] for i in range(30)]))
    assert torch.equal(op(X, *values), X * 2)
    assert seen.pop()[1:] == values


def test_output_names_do_not_touch_the_arguments_that_are_checked(ns: str) -> None:
    """The first call runs the fake on the flat arguments, after the body's output was taken apart."""

    below: Any = make_dataclass("Below", [("y", Tensor), ("z", Tensor)], frozen=True)
    out: Any = make_dataclass("Out", [("inner", below)], frozen=True)
    faked: list[int] = []

    def body(x: Tensor, output__inner: int) -> Any:
        return out(below(x * 2, x * 3))

    def fake(x: Tensor, output__inner: int) -> Any:
        faked.append(output__inner)
        return body(x, output__inner)

    body.__annotations__["return"] = out
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=fake)(body)
    assert torch.equal(op(X, 7).inner.z, X * 3)
    assert faked == [7]


class Hostile:
    """Lies whenever it is asked anything."""

    scale = 1.0
    mode = Mode.RMS

    def __repr__(self) -> str:
        raise RuntimeError("asked for repr")

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("rms")

    def __bool__(self) -> bool:
        raise RuntimeError("asked for bool")

    def __iter__(self) -> Any:
        return iter((Mode.RMS,))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, key: object) -> int:
        return 1

    def __contains__(self, key: object) -> bool:
        return True


@pytest.mark.parametrize(
    "annotation",
    [Moded, Moded | None, Mode, Mode | None, list[Mode], tuple[Mode, ...], Literal["a", 1], Sizes, tuple[int, int],
     list[Tensor | None], list[complex], list[torch.dtype]],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("claimed", [None, Moded, Mode, int], ids=str)
def test_a_hostile_value_is_refused(ns: str, annotation: Any, claimed: type | None) -> None:
    cls = Hostile if claimed is None else type("Liar", (Hostile,), {"__class__": claimed})
    seen: list[Any] = []
    op = magi_register_custom_op(f"{ns}::op")(make_function({"x": Tensor, "value": annotation}, seen))
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        op(X, cls())
    assert "asked for" not in str(caught.value)
    assert not seen


@pytest.mark.parametrize(("annotation", "claimed"), [(tuple[int, int], tuple), (Sizes, dict), (list[Mode], list)])
def test_the_body_gets_a_real_container_from_a_value_that_claims_to_be_one(
    ns: str, annotation: Any, claimed: type
) -> None:
    seen: list[Any] = []
    op = magi_register_custom_op(f"{ns}::op")(make_function({"x": Tensor, "value": annotation}, seen))
    op(X, type("Liar", (Hostile,), {"__class__": claimed})())
    assert type(seen[0][1]) is claimed


def test_comparing_hashing_and_printing_of_a_record_are_not_called(ns: str) -> None:
    """Fields are read; comparing, hashing and printing the record are not part of a call."""

    @dataclass(frozen=True, eq=False, repr=False)
    class Quiet:
        scale: float = 1.0

        __repr__ = Hostile.__repr__
        __eq__ = Hostile.__eq__
        __bool__ = Hostile.__bool__

        def __hash__(self) -> int:
            raise RuntimeError("asked for hash")

    seen: list[Any] = []
    body = make_function({"x": Tensor, "cfg": Quiet}, seen)
    body.__defaults__ = (Quiet(3.0),)
    op = magi_register_custom_op(f"{ns}::op")(body)
    op(X)
    op(X, Quiet(2.0))
    assert [values[1].scale for values in seen] == [3.0, 2.0]
    assert "Quiet(scale=3.0)" in str(op_def(op))


def test_the_fake_gets_the_list_that_the_body_got(ns: str) -> None:
    faked: list[Any] = []

    def fake(x: Tensor, masks: Any) -> Tensor:
        faked.append([mask is None for mask in masks])
        return torch.empty_like(x)

    body = make_function({"x": Tensor, "masks": list[Tensor | None] | None}, [])
    magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=fake)(body)(X, [None, X, None])
    assert faked == [[True, False, True]]


LONG = "é\"'\\\n\t\x00{x}%s" * 1000


def test_a_long_text_default_is_not_in_the_generated_code(ns: str) -> None:
    seen: list[Any] = []

    def body(x: Tensor, cfg: Moded, text: str = LONG) -> Tensor:
        seen.append(text)
        return x * 2

    op: Any = magi_register_custom_op(f"{ns}::op")(body)
    compiled: Any = torch.compile(op, fullgraph=True, backend="eager")
    for call in (op, compiled):
        call(X, Moded())
    assert seen == [LONG, LONG]
    assert "{x}%s" not in op.__source__
    assert len(str(op_def(op))) < 2000
    assert repr(op_def(op)).startswith(f"<op {ns}::op: body(x: Tensor, cfg: Moded, text: str = ")
    assert len(repr(op_def(op))) < 300
    assert op_def(op)._repr_html_().startswith("<pre>signature  body(x: Tensor, cfg: Moded")
    assert "-&gt; Tensor" in op_def(op)._repr_html_()


@dataclass(frozen=True)
class HasList:
    sizes: list[int] = field(default_factory=lambda: [1, 2])


def test_a_default_list_is_not_shared_between_calls(ns: str) -> None:
    default = HasList()
    seen: list[list[int]] = []

    def direct(x: Tensor, sizes: list[int] = [1, 2]) -> Tensor:  # noqa: B006
        seen.append(list(sizes))
        sizes.append(3)
        return x * 2

    def flattened(x: Tensor, cfg: HasList = default) -> Tensor:
        seen.append(list(cfg.sizes))
        cfg.sizes.append(3)
        return x * 2

    for fn, path in ((direct, "direct"), (flattened, "flattened")):
        op: Any = magi_register_custom_op(f"{ns}::{path}")(fn)
        assert op_def(op).path == path
        op(X)
        op(X)
        op(x=X)
    assert seen == [[1, 2]] * 6
    assert direct.__defaults__ == ([1, 2],)
    assert default.sizes == [1, 2]


def test_a_passed_list_is_not_changed(ns: str) -> None:
    def body(x: Tensor, cfg: HasList) -> Tensor:
        cfg.sizes.append(3)
        return x * 2

    passed = HasList()
    magi_register_custom_op(f"{ns}::op")(body)(X, passed)
    assert passed.sizes == [1, 2]


def test_own_init_of_a_class_that_was_compiled_from_a_text(ns: str) -> None:
    """As in a `python -c` program, where a hand-written `__init__` has the file name of a generated one."""
    text = """
        from dataclasses import dataclass
        @dataclass(frozen=True)
        class Own:
            scale: float
            def __init__(self, scale):
                object.__setattr__(self, "scale", scale)
                object.__setattr__(self, "twice", scale * 2)
    """
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(compile("if True:" + text, "<string>", "exec", dont_inherit=True), namespace)
    seen: list[Any] = []
    op = magi_register_custom_op(f"{ns}::op")(make_function({"x": Tensor, "cfg": namespace["Own"]}, seen))
    op(X, namespace["Own"](3.0))
    assert seen[0][1].twice == 6.0


def test_annotations_of_another_module_are_evaluated_there(ns: str) -> None:
    """The op's own module has another `Mode` and another `float`."""
    other = types.ModuleType(f"{ns}_other")
    text = """
        from __future__ import annotations
        import enum
        from dataclasses import dataclass
        class Mode(enum.Enum):
            FAST = "fast"
        @dataclass(frozen=True)
        class Theirs:
            mode: Mode
            float: float = 1.0
    """
    sys.modules[other.__name__] = other
    try:
        exec(textwrap.dedent(text), other.__dict__)

        def body(x: Tensor, cfg: other.Theirs, mode: Mode) -> Tensor:  # type: ignore[name-defined]
            assert cfg.mode is other.Mode.FAST
            return x * 2

        float = str  # noqa: A001, F841
        lowering = lower_signature(body)
        assert [leaf.schema_type for leaf in lowering.leaves] == ["Tensor", "str", "float", "str"]
        op = magi_register_custom_op(f"{ns}::op")(body)
        assert torch.equal(op(X, other.Theirs(other.Mode.FAST), Mode.RMS), X * 2)
    finally:
        del sys.modules[other.__name__]


def through_another_module(name: str, fn: Callable[..., Any]) -> Any:
    """Register *fn* as a package does that has a decorator of its own."""
    namespace: dict[str, Any] = {"__name__": "another_package", "magi_register_custom_op": magi_register_custom_op}
    exec("def register(name, fn): return magi_register_custom_op(name)(fn)", namespace)
    return namespace["register"](name, fn)


def through_a_helper(name: str, fn: Callable[..., Any]) -> Any:
    return magi_register_custom_op(name)(fn)


@pytest.mark.parametrize("register", [through_another_module, through_a_helper])
def test_a_local_class_is_found_around_the_function(ns: str, register: Callable[..., Any]) -> None:
    """However far from it the decorator is called."""

    @dataclass(frozen=True)
    class Local:
        factor: float

    class Ops:
        Alias = Local

        def within(x: Tensor, cfg: Alias) -> Tensor:  # type: ignore[misc,valid-type]
            return x * cfg.factor  # type: ignore[attr-defined,no-any-return]

        within = staticmethod(register(f"{ns}::within", within))

    def outer() -> Any:
        def op(x: Tensor, cfg: Local) -> Tensor:
            return x * cfg.factor

        return register(f"{ns}::op", op)

    for op in (outer(), Ops.within):
        assert op(X, Local(3.0)).tolist() == (X * 3).tolist()
        assert op_def(op).lowering.tree["cfg"].cls is Local  # type: ignore[union-attr]


def test_a_local_class_is_found_from_a_decorator_made_elsewhere(ns: str) -> None:
    def make() -> Any:
        return magi_register_custom_op(f"{ns}::op")

    decorate = make()

    @dataclass(frozen=True)
    class Local:
        factor: float

    @decorate
    def op(x: Tensor, cfg: Local) -> Tensor:
        return x * cfg.factor

    assert op(X, Local(3.0)).tolist() == (X * 3).tolist()


def by_mode(x: Tensor, mode: Mode) -> Tensor:
    return x * 2


def test_names_at_the_decorator_are_not_those_of_the_function(ns: str) -> None:
    class Mode(enum.Enum):
        OTHER = "other"

    op: Callable[..., Any] = magi_register_custom_op(f"{ns}::op")(by_mode)
    assert op(X, "rms").tolist() == (X * 2).tolist()
    with pytest.raises(errors.ArgumentValueError, match=r"one of Mode.RMS, Mode.LAYER"):
        op(X, Mode.OTHER)
