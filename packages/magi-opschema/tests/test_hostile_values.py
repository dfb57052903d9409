# SPDX-License-Identifier: Apache-2.0
"""Values that lie about what they are do not change what generated code does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from _named import Inner, Mode, Sizes, X, make_function
from magi_opschema import magi_register_custom_op, op_def
from torch import Tensor


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


class HostileText(str):
    """A text that equals every other."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("rms")


@pytest.mark.parametrize(
    "annotation",
    [Inner, Inner | None, Mode, Mode | None, list[Mode], tuple[Mode, ...], Literal["a", 1], Sizes, tuple[int, int],
     list[Tensor | None], list[complex], list[torch.dtype]],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("claimed", [None, Inner, Mode, int], ids=str)
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


def test_a_text_that_equals_all_others_is_not_a_member(ns: str) -> None:
    seen: list[Any] = []
    op = magi_register_custom_op(f"{ns}::op")(make_function({"x": Tensor, "value": Mode}, seen))
    with pytest.raises(ValueError, match="expected one of"):
        op(X, HostileText("evil"))
    assert not seen


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
