# SPDX-License-Identifier: Apache-2.0
"""Defaults and lists reach the body as they are, and stay as they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from _named import Inner, Mode, X, compiled
from magi_opschema import magi_register_custom_op, op_def
from torch import Tensor


def test_the_fake_gets_the_list_that_the_body_got(ns: str) -> None:
    faked: list[Any] = []

    def body(x: Tensor, masks: list[Tensor | None] | None) -> Tensor:
        return x * 2

    def fake(x: Tensor, masks: list[Tensor | None] | None) -> Tensor:
        faked.append([mask is None for mask in masks or ()])
        return torch.empty_like(x)

    magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=fake)(body)(X, [None, X, None])
    assert faked == [[True, False, True]]


LONG = "é\"'\\\n\t\x00{x}%s" * 1000


def test_a_long_text_default_is_not_in_the_generated_code(ns: str) -> None:
    seen: list[Any] = []

    def body(x: Tensor, cfg: Inner, text: str = LONG) -> Tensor:
        seen.append(text)
        return x * 2

    op: Any = magi_register_custom_op(f"{ns}::op")(body)
    op(X, Inner())
    compiled(op)(x=X, cfg=Inner())
    assert seen == [LONG, LONG]
    assert "{x}%s" not in op.__source__
    assert len(str(op_def(op))) < 2000


def test_defaults_reach_the_body_as_they_are(ns: str) -> None:
    class Point(NamedTuple):
        x: float
        y: float

    generator = torch.Generator()
    seen: list[Any] = []

    def body(
        x: Tensor,
        mode: Mode = Mode.LAYER,
        dtype: torch.dtype = torch.int8,
        generator: torch.Generator | None = generator,
        pick: Literal["a", 1, True] = True,
        point: Point = Point(float("inf"), -0.0),  # noqa: B008
        inner: Inner = Inner(5e-324),  # noqa: B008
        names: list[str] = ["a"],  # noqa: B006
        none: Inner | None = None,
    ) -> Tensor:
        seen.append((mode, dtype, generator, pick, point, inner, names, none))
        return x * 2

    magi_register_custom_op(f"{ns}::op")(body)(X)
    mode, dtype, passed, pick, point, inner, names, none = seen[0]
    assert mode is Mode.LAYER
    assert dtype is torch.int8
    assert passed.initial_seed() == generator.initial_seed()
    assert pick is True
    assert type(point) is Point
    assert repr(point) == repr(Point(float("inf"), -0.0))
    assert inner == Inner(5e-324)
    assert names == ["a"]
    assert none is None


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
