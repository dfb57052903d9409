# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,empty-body"
"""A function that does not take what the operator passes is refused, because it would often run and compute wrongly."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, NewType

import pytest
import torch
from graph_questions import Ops
from magi_tritonwrap import make_see_through
from magi_tritonwrap.errors import NotAnOpError
from torch import Tensor


pytestmark = pytest.mark.usefixtures("stub")


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


class Text(enum.StrEnum):
    FAST = "fast"


class Number(enum.IntEnum):
    ONE = 1


class Bits(enum.IntFlag):
    A = 1


@dataclass(frozen=True)
class Scale:
    factor: float = 2.0


class Pair(NamedTuple):
    x: Tensor


class Object:
    def __call__(self, x: Tensor, m: Mode) -> Tensor: ...


Count = NewType("Count", int)


def mode(x: Tensor, m: Mode) -> Tensor: ...
def mode_or_none(x: Tensor, m: Mode | None) -> Tensor: ...
def text(x: Tensor, m: Text) -> Tensor: ...
def number(x: Tensor, m: Number) -> Tensor: ...
def bits(x: Tensor, m: Bits) -> Tensor: ...
def by_index(x: Tensor, m: Literal["a", 1]) -> Tensor: ...
def one_or_true(x: Tensor, m: Literal[1, True]) -> Tensor: ...
def record(x: Tensor, m: Scale) -> Tensor: ...
def pair(x: Pair, m: int) -> Tensor: ...
def many(x: Tensor, m: tuple[int, ...]) -> Tensor: ...
def modes(x: Tensor, m: list[Mode]) -> Tensor: ...
def complexes(x: Tensor, m: Sequence[complex]) -> Tensor: ...
def dtypes(x: Tensor, m: list[torch.dtype]) -> Tensor: ...
def whole(x: Tensor, m: int) -> Tensor: ...
def annotated(x: Tensor, m: Annotated[Mode, "how"]) -> Tensor: ...
def one_more(x: Tensor, m: int, n: int) -> Tensor: ...
def one_less(x: Tensor) -> Tensor: ...
def another_default(x: Tensor, m: int = 3) -> Tensor: ...
def default_of_unknown(x: Tensor, m: Unknown = Mode.FAST) -> Tensor: ...  # type: ignore[name-defined]  # noqa: F821


WRONG: list[tuple[Callable[..., Any], str, str]] = [
    (mode, "str m", r"passes `str m`, and its parameter 'm' is annotated .*Mode\. Pass a body that takes what the sch"),
    (mode_or_none, "str? m", r"passes `Optional\[str\] m`, and its parameter 'm' is annotated"),
    (text, "str m", r"'m' is annotated .*Text"),
    (number, "SymInt m", r"passes `int m`, and its parameter 'm' is annotated .*Number"),
    (bits, "SymInt m", r"'m' is annotated .*Bits"),
    (by_index, "SymInt m", r"'m' is annotated Literal\['a', 1\]"),
    (one_or_true, "SymInt m", r"'m' is annotated Literal\[1, True\]"),
    (record, "float m__factor", r"passes `float m__factor`, and its parameter 'm' is annotated .*Scale"),
    (pair, "SymInt m", r"passes `Tensor x`, and its parameter 'x' is annotated .*Pair"),
    (many, "SymInt[] m", r"passes `List\[int\] m`, and its parameter 'm' is annotated tuple\[int, \.\.\.\]"),
    (modes, "str[] m", r"'m' is annotated list\[.*Mode\]"),
    (complexes, "float[] m", r"'m' is annotated collections\.abc\.Sequence\[complex\]"),
    (dtypes, "str[] m", r"'m' is annotated list\[torch\.dtype\]"),
    (whole, "float m", r"passes `float m`, and its parameter 'm' is annotated int"),
    (annotated, "str m", r"'m' is annotated .*Annotated\[.*Mode, 'how'\]"),
    (one_more, "SymInt m", r"passes `Tensor x`, `int m`, and missing a required argument: 'n'"),
    (one_less, "SymInt m", r"passes `Tensor x`, `int m`, and too many positional arguments"),
    (another_default, "SymInt m=2", r"the default of 'm' is 2 in the schema, and 3 in the body"),
    (
        default_of_unknown,
        'str m="fast"',
        r"the default of 'm' is 'fast' in the schema, and <Mode\.FAST: 'fast'> in",
    ),
    (Object(), "str m", r"'m' is annotated .*Mode"),
    (functools.partial(one_more, n=1), "str m", r"passes `str m`, and its parameter 'm' is annotated int"),
]


@pytest.mark.parametrize(("fn", "parameter", "why"), WRONG, ids=[str(at) for at in range(len(WRONG))])
def test_a_function_that_takes_something_else(fn: Callable[..., Any], parameter: str, why: str, ops: Ops) -> None:
    op = ops.define("op", one_less, f"(Tensor x, {parameter}) -> Tensor")
    with pytest.raises(NotAnOpError, match=rf"^make_see_through\({ops.namespace}::op\): '.*' cannot be .*{why}"):
        make_see_through(op, fn)


def test_an_enum_of_the_function_around(ops: Ops) -> None:
    class Local(enum.Enum):
        A = "a"

    def body(x: Tensor, m: Local) -> Tensor: ...

    op = ops.define("op", body, "(Tensor x, str m) -> Tensor")
    with pytest.raises(NotAnOpError, match=r"'m' is annotated .*Local\. Pass .*; op_def\(op\)\.lowered_fn is that of"):
        make_see_through(op, body)


def plain(x: Tensor, m: Literal["fast", "exact"] | None = None, *, n: int = 1) -> Tensor: ...
def numbers(x: Tensor, a: float, b: float = 2, c: complex = 1j, d: Count = Count(3)) -> Tensor: ...
def lists(x: list[Tensor], a: Sequence[int] = (1, 2), b: list[float | None] | None = None) -> Tensor: ...
def values(x: torch.nn.Parameter, a: torch.dtype = torch.half, b: torch.device | str = "cpu") -> Tensor: ...
def anything(*args, **kwargs): ...
def unread(x: NotImported, m: Any = 3, *rest: object) -> Tensor: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("fn", "parameters"),
    [
        (plain, "Tensor x, str? m=None, *, SymInt n=1"),
        (numbers, "Tensor x, SymInt a, float b=2.0, complex c=1j, int d=3"),
        (lists, "Tensor[] x, SymInt[] a=[1, 2], float[]? b=None"),
        (values, 'Tensor x, ScalarType a=half, Device b="cpu"'),
        (anything, "Tensor x, str[] m, *, Generator? g=None"),
        (lambda x, xs, m=3: x, "Tensor x, Tensor[] xs, SymInt m=3"),
        (unread, "Tensor x, SymInt m=3, SymInt n=4"),
    ],
)
def test_a_function_that_takes_it(fn: Callable[..., Any], parameters: str, ops: Ops) -> None:
    op = ops.define("op", fn, f"({parameters}) -> Tensor")
    assert make_see_through(op, fn).see_through
