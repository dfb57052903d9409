# SPDX-License-Identifier: Apache-2.0
"""What the first real call verifies, and when it is verified again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import pytest
import torch
from _signatures import Doubling
from magi_opschema import errors, magi_register_custom_op
from torch import Tensor


@dataclass(frozen=True)
class Config:
    kind: str = "right"


FAKES = {
    "shape": lambda x, cfg: x.new_empty(1),
    "dtype": lambda x, cfg: torch.empty_like(x, dtype=torch.float64),
    "device": lambda x, cfg: torch.empty_like(x, device="meta"),
    "strides": lambda x, cfg: x.new_empty(x.shape[::-1]).t(),
}


FORMS: dict[str, Callable[..., Any]] = {
    "eager": lambda op: op,
    "aot_eager": lambda op: torch.compile(op, fullgraph=True, backend="aot_eager"),
    "inductor": lambda op: torch.compile(op, fullgraph=True),
}


@pytest.mark.parametrize(
    ("what", "form"), [*((what, "eager") for what in FAKES), ("shape", "aot_eager"), ("shape", "inductor")]
)
def test_fake_that_says_something_else_is_found_at_every_call_until_one_passes(ns: str, what: str, form: str) -> None:
    @magi_register_custom_op(f"{ns}::copy", infer_output_meta_fn=FAKES[what])
    def copy(x: Tensor, cfg: Config = Config()) -> Tensor:
        return x.clone()

    call = FORMS[form](copy)
    for _ in range(2):
        with pytest.raises(
            errors.FakeMismatchError, match=rf"{ns}::copy: 'output' has {what} .* the fake says .*test_checks"
        ):
            call(torch.randn(2, 3))


def test_a_check_that_passed_is_not_repeated(ns: str) -> None:
    @magi_register_custom_op(f"{ns}::first")
    def first(x: Tensor, cfg: Config = Config()) -> Tensor:
        return x[:1].clone()

    with pytest.raises(errors.FakeMismatchError):
        first(torch.ones(3))
    first(torch.ones(1))
    first(torch.ones(3))


@pytest.mark.parametrize("form", ["aot_eager", "inductor"])
def test_a_fake_that_is_right_for_one_dtype_alone_is_found_where_another_was_compiled(ns: str, form: str) -> None:
    @magi_register_custom_op(f"{ns}::upcast", infer_output_meta_fn=["x"])
    def upcast(x: Tensor, rounded: bool = False) -> Tensor:
        return (x.float() * 3).to(x.dtype if rounded else torch.float32)

    call = FORMS[form](upcast)
    full, half = torch.ones(3), torch.ones(3, dtype=torch.bfloat16)
    call(full)
    call(half, rounded=True)
    for _ in range(2):
        upcast(full)  # passed before, and does not count for the other kind
        with pytest.raises(errors.FakeMismatchError, match="has dtype torch.float32, and the fake says torch.bfloat16"):
            call(half)


def test_a_kind_of_call_that_was_traced_alone_costs_the_others_no_check(ns: str) -> None:
    calls = []

    def fake(x: Tensor, cfg: Config = Config()) -> Tensor:
        calls.append(x.dtype)
        return torch.empty_like(x)

    @magi_register_custom_op(f"{ns}::copied", infer_output_meta_fn=fake)
    def copied(x: Tensor, cfg: Config = Config()) -> Tensor:
        return x.clone()

    copied(torch.ones(3))
    with torch._subclasses.FakeTensorMode():
        copied(torch.ones(3, dtype=torch.bfloat16))
    copied(torch.ones(3))
    copied(torch.ones(3))
    assert calls == [torch.float32, torch.bfloat16]


def test_every_call_is_checked_if_the_decorator_says_so(ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGI_OPSCHEMA_CHECK", "1")

    @magi_register_custom_op(f"{ns}::first")
    def first(x: Tensor) -> Tensor:
        return x[:1].clone()

    monkeypatch.delenv("MAGI_OPSCHEMA_CHECK")
    first(torch.ones(1))
    with pytest.raises(errors.FakeMismatchError):
        first(torch.ones(3))


def test_fake_that_fails_is_an_error_with_its_cause(ns: str) -> None:
    def fake(x: Tensor) -> Tensor:
        return torch.empty(x.undefined)  # type: ignore[attr-defined]

    @magi_register_custom_op(f"{ns}::copy", infer_output_meta_fn=fake)
    def copy(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(errors.FakeMismatchError, match="the fake failed on the arguments of a real call"):
        copy(torch.ones(1))


def test_size_that_depends_on_data(ns: str) -> None:
    def fake(x: Tensor) -> Tensor:
        return x.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)

    @magi_register_custom_op(f"{ns}::nonzero", infer_output_meta_fn=fake)
    def nonzero(x: Tensor) -> Tensor:
        return x.nonzero().flatten()

    assert nonzero(torch.tensor([0.0, 1.0, 2.0])).tolist() == [1, 2]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["the input", "a view", "twice"])
def test_aliasing(ns: str, kind: str, form: str) -> None:
    @magi_register_custom_op(f"{ns}::alias", infer_output_meta_fn=["x", "x"])
    def alias(x: Tensor) -> tuple[Tensor, Tensor]:
        copy = x.clone()
        return {"the input": (copy, x), "a view": (copy, x[:]), "twice": (copy, copy)}[kind]

    with pytest.raises(errors.AliasingError, match=rf"{ns}::alias: 'output\.1' shares its memory with"):
        FORMS[form](alias)(torch.ones(3))


class Plain(NamedTuple):
    x: float
    y: float = 1.0


class DoublingTuple(Plain):
    def __new__(cls, x: float, y: float = 1.0) -> Self:
        return super().__new__(cls, x * 2, y)


class ShiftedTuple(Plain):
    @property
    def x(self) -> float:
        return self[0] + 1


class ReadAnew(Plain):
    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return found + 1 if name == "x" else found


class Making(type):
    def __call__(cls, x: float, y: float = 1.0) -> Any:
        return super().__call__(x + 1, y)


@dataclass(frozen=True)
class Made(metaclass=Making):
    x: float
    y: float = 1.0


class Labelled(Plain):
    """Its own `__new__` and `__init__` change nothing."""

    label: str

    def __new__(cls, *values: float, **named: float) -> Self:
        return super().__new__(cls, *values, **named)

    def __init__(self, x: float, y: float = 1.0) -> None:
        self.label = f"{x}, {y}"


# Each holds 2.0 where it is made of 1.0, and what it holds once it is made of that.
CHANGED = {Doubling: 4.0, DoublingTuple: 4.0, ShiftedTuple: 3.0, ReadAnew: 3.0, Made: 3.0}


@pytest.mark.parametrize("where", ["passed", "returned"])
@pytest.mark.parametrize("cls", CHANGED)
def test_every_class_that_changes_its_fields_is_found(ns: str, cls: Any, where: str) -> None:
    def body(x: Tensor, *, cfg: Any) -> Any:
        return x * 2 if where == "passed" else cls(1.0)

    body.__annotations__ |= {"cfg": cls, "return": Tensor} if where == "passed" else {"cfg": float, "return": cls}
    fake = (lambda x, *, cfg: x) if where == "passed" else (lambda x, *, cfg: cls(1.0))
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=fake)(body)
    sentence = (
        rf"{ns}::op: '(cfg|output)\.x' was 2.0 and is {CHANGED[cls]} after the op rebuilt its record .*test_checks"
    )
    with pytest.raises(errors.RoundTripError, match=sentence):
        op(torch.ones(2), cfg=cls(1.0) if where == "passed" else 1.0)
    if (where, cls) == ("passed", Doubling):  # of nothing and of NaN the double is the same
        assert op(torch.ones(2), cfg=Doubling(0.0)).tolist() == [2.0, 2.0]


def test_a_named_tuple_with_methods_of_its_own_that_keep_the_fields(ns: str) -> None:
    seen: list[Labelled] = []

    @magi_register_custom_op(f"{ns}::op")
    def op(x: Tensor, cfg: Labelled) -> Tensor:
        seen.append(cfg)
        return x * cfg.x

    op(torch.ones(2), Labelled(3.0, 4.0))
    assert (type(seen[0]), seen[0], seen[0].label) == (Labelled, (3.0, 4.0), "3.0, 4.0")
