# SPDX-License-Identifier: Apache-2.0
"""Where the names in annotations are looked up."""

from __future__ import annotations

import enum
import sys
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from _named import Mode, X, make_function
from magi_opschema import errors, lower_signature, magi_register_custom_op, op_def
from torch import Tensor


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
