# SPDX-License-Identifier: Apache-2.0
"""A body and a default fake refuse a flat value that matches no value of the user in the same way."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from magi_opschema import magi_register_custom_op
from magi_opschema.errors import ArgumentValueError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


class Mode(enum.Enum):
    RMS = "rms"
    LAYER = "layer"


class Number(enum.Enum):
    ONE = 1
    TWO = 2


class Bits(enum.Flag):
    A = 1
    B = 2


@dataclass(frozen=True)
class Inner:
    mode: Mode = Mode.RMS


MODES = "expected one of Mode.RMS, Mode.LAYER, or the value of one."
CASES: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...], str]] = {
    "an enum of texts": (Mode, ("bogus",), ("rms",), f"'value' is 'bogus' (str), {MODES}"),
    "an enum of numbers": (Number, ("THREE",), ("ONE",), "'value' is 'THREE' (str), expected one of Number.ONE"),
    "a flag": (Bits, (64,), (3,), "'value' is 64 (int), expected a Bits."),
    "a mixed Literal": (Literal[1, "a"], (7,), (1,), "'value' is 7 (int), expected one of 1, 'a'."),
    "a plain Literal": (Literal["a", "b"], ("c",), ("a",), "'value' is 'c' (str), expected one of 'a', 'b'."),
    "an enum or None": (Mode | None, ("bogus",), (None,), "'value' is 'bogus' (str), expected one of Mode.RMS"),
    "a list of enums": (list[Mode], (["rms", "zz"],), (["rms"],), "'value' is 'zz' (str), expected a list with each"),
    "a list of dtypes": (
        list[torch.dtype],
        (["torch.zz"],),
        (["torch.int8"],),
        "'value' is 'torch.zz' (str), expected",
    ),
    "a field": (Inner, ("bogus",), ("rms",), f"'value.mode' is 'bogus' (str), {MODES}"),
    "a field of one or None": (
        Inner | None,
        (True, "bogus"),
        (False, "-"),
        f"'value.mode' is 'bogus' (str), {MODES}",
    ),
}


@pytest.mark.parametrize("where", ["eager", "fake", "compiled"])
@pytest.mark.parametrize("case", CASES)
def test_a_flat_value_that_cannot_be_read(ns: str, case: str, where: str) -> None:
    annotation, bad, good, sentence = CASES[case]

    def body(x: Tensor, value: Any) -> Tensor:
        return x.clone()

    body.__annotations__["value"] = annotation
    torch_op = magi_register_custom_op(f"{ns}::op")(body).torch_op

    def run(values: tuple[Any, ...]) -> Any:
        if where == "compiled":
            return torch.compile(lambda x: torch_op(x, *values), fullgraph=True, backend="aot_eager")(torch.ones(2))
        if where == "fake":
            with FakeTensorMode():
                return torch_op(torch.empty(2), *values)
        return torch_op(torch.ones(2), *values)

    assert run(good).shape == (2,)
    expected: type[Exception] = Exception if where == "compiled" else ArgumentValueError
    with pytest.raises(expected, match=re.escape(f"{ns}::op: {sentence}")):
        run(bad)


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
