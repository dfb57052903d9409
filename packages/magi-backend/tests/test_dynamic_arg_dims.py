# SPDX-License-Identifier: Apache-2.0
"""The names in ``dynamic_arg_dims``: parts of records, lists and mappings, and names that mark nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from magi_backend import magi_compile
from magi_backend._records.log import Collector, collecting
from magi_backend.errors import TargetError
from torch import Tensor


@dataclass(frozen=True)
class Inner:
    scale: Tensor
    eps: float = 1e-6


@dataclass(frozen=True)
class Cfg:
    x: Tensor
    inner: Inner | None = None
    rest: tuple[Tensor, ...] = ()


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


X, Y, Z = torch.ones(3, 4), torch.ones(5, 4), torch.ones(7, 4)


ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("path", "make", "read"),
    [
        ("v.x", Cfg, lambda v: v.x),
        ("v", Cfg, lambda v: v.x),
        ("v.inner.scale", lambda x: Cfg(ONE, Inner(x)), lambda v: v.inner.scale + v.x.sum()),
        ("v.inner", lambda x: Cfg(ONE, Inner(x)), lambda v: v.inner.scale),
        ("v.rest", lambda x: Cfg(ONE, rest=(x, x + 1)), lambda v: v.rest[0] + v.rest[1]),
        ("v.rest[1]", lambda x: Cfg(ONE, rest=(ONE, x)), lambda v: v.rest[1]),
        ("v", lambda x: [x, x + 1], lambda v: v[0] + v[1]),
        ("v[-1]", lambda x: (ONE, x), lambda v: v[1]),
        ("v['k']", lambda x: {"k": x, "other": ONE}, lambda v: v["k"]),
        ("v.k", lambda x: {"k": x}, lambda v: v["k"]),
        ("v", lambda x: {"k": [x]}, lambda v: v["k"][0]),
        ("v.right", lambda x: Pair(ONE, x), lambda v: v.right),
        ("v[0].x", lambda x: [Cfg(x)], lambda v: v[0].x),
    ],
    ids=map(str, range(13)),
)
def test_names_reach_into_records_lists_and_mappings(path: str, make: Any, read: Any) -> None:
    torch._dynamo.reset()
    fn: Any = magi_compile(lambda v: read(v) + 1, dynamic_arg_dims={path: 0})

    with torch._dynamo.config.patch(automatic_dynamic_shapes=False), collecting(Collector()) as collector:
        for x in (X, Y, Z):
            fn(make(x))
    assert len(collector) == 1
    assert not vars(X)


def test_collected_arguments_are_named_as_well() -> None:
    @magi_compile(dynamic_arg_dims={"xs[0]": 0, "named.y": 1})
    def fn(*xs: Tensor, **named: Tensor) -> Tensor:
        return xs[0].sum() + named["y"].sum()

    with torch._dynamo.config.patch(automatic_dynamic_shapes=False), collecting(Collector()) as collector:
        for size in (3, 5, 7):
            fn(torch.ones(size, 2), y=torch.ones(2, size))
    assert len(collector) == 1


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        (
            "c.inner.scal",
            r"fn: dynamic_arg_dims names 'c.inner.scal', and Inner has no field 'scal'\. Did you mean 'scale'",
        ),
        ("p.up", r"Pair has no field 'up'\. Its fields are left, right\."),
        ("c[", r"fn: dynamic_arg_dims names 'c\[', which is not the name of a parameter"),
        ("c + 1", r"which is not the name of a parameter, or of a part of one such as 'cfg.weight', 'xs\[0\]'"),
        (3, r"fn: dynamic_arg_dims names 3, which is not the name of a parameter"),
    ],
)
def test_a_part_that_is_not_there_is_named_at_decoration(path: Any, sentence: str) -> None:
    def fn(c: Cfg, p: Pair) -> Tensor:
        return c.x + p.left

    with pytest.raises(TargetError, match=sentence):
        magi_compile(fn, dynamic_arg_dims={path: 0})


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (
            "v[2]",
            [X, Y],
            r"names 'v\[2\]', which is not there in this call\..* The tensors of this call are v\[0\], v\[1\]\.",
        ),
        (
            "v.inner.eps",
            Cfg(X, Inner(Y)),
            r"names 'v.inner.eps', which was called with 1e-06 \(a float\)\. Only a Tensor has dimensions.* v.x, v.inn",
        ),
        ("v", 3, r"names 'v', which was called with 3 \(a int\)\..* This call has no tensors\."),
        ("v.x", X, r"names 'v.x', which is not there in this call"),
    ],
)
def test_a_name_that_marks_nothing_is_an_error_at_the_call(path: str, value: Any, sentence: str) -> None:
    fn: Any = magi_compile(lambda v: 0, dynamic_arg_dims={path: 0})

    with pytest.raises(TargetError, match=sentence):
        fn(value)


@pytest.mark.parametrize(
    ("path", "value"), [("v", None), ("v.inner.scale", Cfg(X)), ("v", []), ("v.rest", Cfg(X)), ("v", {})], ids=str
)
def test_an_optional_part_may_be_absent(path: str, value: Any) -> None:
    fn: Any = magi_compile(lambda v: 5, dynamic_arg_dims={path: 0})
    assert fn(value) == 5


def test_a_missing_dimension_of_a_part_is_named() -> None:
    fn: Any = magi_compile(lambda v: 0, dynamic_arg_dims={"v": 2})
    with pytest.raises(TargetError, match=r"dimension 2 of 'v\[1\].x', which was called with shape \(3, 4\)"):
        fn([torch.ones(1, 1, 1), Cfg(X)])


def only_sixteen(x: Tensor) -> Tensor:
    return x + 1 if x.shape[0] == 16 else x - 1


def graphs(fn: Any, sizes: tuple[int, ...]) -> int:
    """How many are compiled in calls with tensors of these *sizes*, which return what the function returns."""
    torch._dynamo.reset()
    with collecting(Collector()) as collector:
        for size in sizes:
            x = torch.randn(size, 4)
            torch.testing.assert_close(fn(x), fn.__wrapped__(x))
            assert not vars(x)
    return len(collector)


def test_a_line_that_needs_one_size_of_a_named_dimension_is_named() -> None:
    torch._dynamo.reset()
    line = only_sixteen.__code__.co_firstlineno + 1
    needs = rf"needs dimension 0 of 'x' to be 16, at .*test_dynamic_arg_dims.py:{line} \(`return x \+ 1 if x.shape"
    with pytest.raises(TargetError, match=needs) as caught:
        magi_compile(only_sixteen, dynamic_arg_dims={"x": 0})(torch.ones(16, 4))
    assert "write {dimension: 'maybe'}" in str(caught.value)


def test_a_path_of_a_part_is_in_the_error() -> None:
    torch._dynamo.reset()
    fn: Any = magi_compile(lambda v: v["k"][0].view(4, -1), dynamic_arg_dims={"v": {1: "dynamic"}})
    with pytest.raises(TargetError, match=r"needs dimension 1 of 'v\['k'\]\[0\]' to be 4"):
        fn({"k": [torch.ones(4, 4).as_strided((1, 4), (4, 1))]})


def test_code_for_one_size_is_allowed_by_maybe_and_where_nothing_is_named() -> None:
    assert graphs(magi_compile(only_sixteen, dynamic_arg_dims={"x": {0: "maybe"}}), (16, 5, 7)) == 2
    assert graphs(magi_compile(only_sixteen), (16, 5, 7)) == 2


def test_one_graph_serves_all_sizes_of_an_unbacked_dimension() -> None:
    def attend(x: Tensor) -> Tensor:
        return (x @ x.t()).softmax(-1) @ x

    sizes = (16, 1, 2, 7, 300) if torch.__version__.startswith("2.10.") else (16, 0, 1, 2, 7, 300)
    assert graphs(magi_compile(attend, dynamic_arg_dims={"x": {0: "unbacked"}}), sizes) == 1
    assert graphs(magi_compile(attend, dynamic_arg_dims={"x": 0}), (16, 0, 1, 2, 7, 300)) == 3
    hot = {"hot_sizes": 1, "hot_after": 2}
    compiled = magi_compile(attend, dynamic_arg_dims={"x": {0: "unbacked"}}, config_patch=hot)
    assert graphs(compiled, (4, 4, 4, 1, 1, 4, min(sizes))) == 1


def test_marks_of_the_user_come_back_after_the_call() -> None:
    x = torch.ones(4, 4)
    torch._dynamo.decorators.mark_unbacked(x, 1, specialize_on=[lambda size: size == 8])
    before = {name: repr(value) for name, value in vars(x).items()}
    magi_compile(lambda x: x + 1, dynamic_arg_dims={"x": {0: "unbacked"}})(x)
    assert {name: repr(value) for name, value in vars(x).items()} == before
