# SPDX-License-Identifier: Apache-2.0
"""A rewrite changes only what it matched: every other value, dtype and stride is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_passes import calls, decomposed, rewritten
from magi_passes import (
    ChannelMomentsPass,
    ConvPaddingPass,
    MagiInductorPass,
    PassPipeline,
    TemporalConvPass,
    collect_records,
)
from torch import Tensor
from torch.nn.functional import conv3d, pad


aten = torch.ops.aten
REWRITES: tuple[MagiInductorPass, ...] = (
    ConvPaddingPass(),
    ChannelMomentsPass(always=True),
    TemporalConvPass(always=True, min_skipped=0.0),
    TemporalConvPass(always=True, min_skipped=2.0),
)
DTYPES = (torch.int64, torch.bool, torch.int32, torch.uint8, torch.float64, torch.float16, torch.complex64)


def _numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers that no detour through float32 would leave as they are."""
    if dtype is torch.int64:
        return torch.randint(2**40, 2**40 + 9, shape)
    if dtype is torch.float64:
        return torch.randint(2**40, 2**40 + 9, shape).double() / 3
    return torch.randint(0, 9, shape).to(dtype)


def _integers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape).double()


# Other operations in the graph: each takes a table of some dtype, the image and a result of a convolution.
BESIDE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cat of selects": lambda table, x, y: torch.cat([table[0], table[1]]),
    "cat of planes, as for a weight": lambda table, x, y: torch.cat([table[:, :, t] for t in range(3)], 1),
    "cat of one plane twice": lambda table, x, y: torch.cat([table[:, :, 1], table[:, :, 1]], 1),
    "stack of slices": lambda table, x, y: torch.stack([table[:, :1], table[:, 1:2]], 1),
    "zero padding": lambda table, x, y: pad(table, (1, 1, 1, 1, 2, 0)),
    "padding with ones": lambda table, x, y: pad(table, (1, 1), value=1),
    "padding that a convolution and another node read": lambda table, x, y: pad(x, (1, 1, 1, 1, 2, 0)) * 2,
    "slice": lambda table, x, y: table[..., ::2],
    "sum": lambda table, x, y: table.sum(1),
    "doubled": lambda table, x, y: table + table,
    "image and result together": lambda table, x, y: torch.cat([x.flatten(), y.flatten()]),
    "result with a table": lambda table, x, y: y.flatten()[0] + table,
    "sum with a factor": lambda table, x, y: torch.add(y, y.amax(), alpha=2),
    "sum of results": lambda table, x, y: (y + y.flip(2)) * (y + 1),
    "result read by its strides": lambda table, x, y: torch.as_strided(y, (2, 3), (1, 2)),
    "what follows read by its strides": lambda table, x, y: torch.as_strided(y.relu() * 2, (2, 3), (2, 1)),
    "part read by its strides": lambda table, x, y: torch.as_strided(y[:, 1:], (2, 2), (3, 1)),
    "result as another dtype": lambda table, x, y: y.view(torch.uint8),
    "padding that is an image and a weight": lambda table, x, y: conv3d(_corner(x, 1), _corner(x, 1)),
    "padding that is a weight": lambda table, x, y: conv3d(x, _corner(x, 0)),
    "images between two convolutions": lambda table, x, y: torch.conv2d(y[:, :, 0], x[:, :, 0, :3, :3]),
    "cat of three selects": lambda table, x, y: torch.cat([table[0], table[0], table[1]]),
    "sums of a result with itself": lambda table, x, y: (y + y).flip(2) + (y + y),
    "frames side by side": lambda table, x, y: torch.cat([y[:, :, 0], y[:, :, -1]], 1),
    "strides of the result": lambda table, x, y: torch.empty_like(y).fill_(3),
}
_GROUPED = (2, 2, 2, 8)
# Shaped like a group norm, without being one.
ALMOST_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "other numbers by group": lambda x: ((x.view(*_GROUPED) - _by_group(x)) * (_by_group(x) + 1)).view(x.shape),
    "difference with a factor": lambda x: (torch.sub(x.view(*_GROUPED), _mean(x), alpha=4) * (_mean(x) + 2)).view(
        x.shape
    ),
    "numbers of another image": lambda x: (((x * 2).view(*_GROUPED) - _mean(x)) * (_mean(x) + 1)).view(x.shape),
    "difference squared": lambda x: ((x.view(*_GROUPED) - _mean(x)) * (x.view(*_GROUPED) - _mean(x))).view(x.shape),
    "number of the next group": lambda x: ((x.view(*_GROUPED) - _mean(x)) * _mean(x).flip(1)).view(x.shape),
    "numbers by group for all images": lambda x: ((x.view(*_GROUPED) - _mean(x)) * _by_group(x)[:, :1]).view(x.shape),
}


def _corner(x: Tensor, after: int) -> Tensor:
    return pad(x[:1, :, :2, :2, :2], (1, after) * 3)


def _by_group(x: Tensor) -> Tensor:
    return x.view(*_GROUPED)[:, :, :1, :1]


def _mean(x: Tensor) -> Tensor:
    return torch.var_mean(x.view(*_GROUPED), [2, 3], correction=0, keepdim=True)[1]


def _rewritten(fn: Any, args: tuple[Tensor, ...], passes: tuple[MagiInductorPass, ...]) -> torch.fx.GraphModule:
    gm = decomposed(fn, *args)
    for node in calls(gm, aten.view.default):  # Inductor has reshapes for views
        node.target = aten.reshape.default
    return rewritten(gm, *passes)


def _assert_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], names: list[str]) -> None:
    for name, ours, theirs in zip(names, found, expected, strict=True):
        assert ours.dtype == theirs.dtype, name
        assert ours.shape == theirs.shape, name
        assert torch.equal(ours, theirs), name


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    names=st.lists(st.sampled_from(sorted(BESIDE)), min_size=1, max_size=5),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=2, max_size=2),
    batch=st.integers(1, 2),
    explicit=st.booleans(),
    passes=st.lists(st.sampled_from(REWRITES), min_size=1, max_size=3, unique=True),
)
def test_other_ops_next_to_a_convolution_are_kept(
    names: list[str], dtypes: list[torch.dtype], batch: int, explicit: bool, passes: list[MagiInductorPass]
) -> None:
    def model(x: Tensor, w: Tensor, v: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
        y = conv3d(pad(x, (1, 1, 1, 1, 2, 0)) if explicit else x, w)
        z = conv3d(y, v, padding=1)
        return (y, z, *(BESIDE[name](table, x, y) for name in names for table in tables))

    x, w, v = _integers(batch, 4, 3, 6, 6), _integers(4, 4, 3, 3, 3), _integers(4, 4, 1, 3, 3)
    args = (x, w, v, *(_numbers(dtype, 2, 2, 3, 4, 4) for dtype in dtypes))
    labels = ["y", "z", *(f"{name} of {dtype}" for name in names for dtype in dtypes)]
    _assert_equal(_rewritten(model, args, tuple(passes))(*args), model(*args), labels)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_convolutions_of_integers_stay_integers(dtype: torch.dtype) -> None:
    def model(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        y = conv3d(x, w, padding=(1, 0, 0))
        return y, conv3d(y, v, padding=(1, 0, 0))

    args = _numbers(dtype, 1, 2, 3, 6, 6), _numbers(dtype, 2, 2, 3, 3, 3) % 7, _numbers(dtype, 2, 2, 3, 3, 3) % 7
    _assert_equal(_rewritten(model, args, REWRITES[3:])(*args), model(*args), ["y", "z"])


@pytest.mark.parametrize("name", sorted(ALMOST_NORMS))
def test_what_only_looks_like_a_group_norm_stays(name: str) -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        return ALMOST_NORMS[name](x), _mean(x)

    x = _integers(2, 4, 2, 4)
    for found, expected in zip(_rewritten(model, (x,), REWRITES[1:2])(x), model(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moments_that_are_taken_in_half_precision_are_not_taken_in_two_steps(dtype: torch.dtype) -> None:
    """Rounding the means of channels around 100 to half precision would be most of what lies between them."""

    def model(x: Tensor) -> tuple[Tensor, ...]:
        return torch.var_mean(x.view(*_GROUPED), [2, 3], correction=0, keepdim=True)

    x = (torch.randn(2, 4, 2, 4) * 0.1 + 100).to(dtype)
    _assert_equal(_rewritten(model, (x,), REWRITES[1:2])(x), model(x), ["variance", "mean"])


# The compiled results, for operations that depend on strides; stock Inductor compiles all of them.
def _tables(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    ids, flags = (w[0, :, 0, 0] * 1e6).long() + 2**40, w[1, :, 0] > 0
    return conv3d(x, w), torch.cat([ids[0], ids[1]]), torch.cat([flags[0], flags[1]])


def _memory(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = conv3d(x, w)
    return torch.as_strided(y, (2, 3), (1, 2)), torch.as_strided(y.relu(), (2, 3), (2, 1)), y.view(torch.int64)


def _branches(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = torch.cond(x.sum() > 0, lambda x, w: conv3d(x, w, padding=1), lambda x, w: x.sin() + w.sum(), (x, w))
    return (torch.cond(y.sum() > 0, lambda y: y.cos(), lambda y: y.flatten().flip(0).view(y.shape), (y,)),)


def _rounds(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = conv3d(x, w, padding=1)
    more = lambda i, y: (i + 1, conv3d(y, w, padding=1))  # noqa: E731
    return torch.while_loop(lambda i, y: i < 2, more, (torch.tensor(0), y))  # type: ignore[no-any-return]


def _views_of_one(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = conv3d(x, w)
    return y.flatten(1), y.transpose(0, 1), y[0], y[:, 1]


@pytest.mark.parametrize(
    ("model", "trained"),
    [
        (_memory, False),
        (_views_of_one, True),
        pytest.param(_tables, False, marks=pytest.mark.slow),
        pytest.param(_branches, False, marks=pytest.mark.slow),
        pytest.param(_rounds, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_with_and_without(model: Any, trained: bool, dynamic: bool, inductor: Any) -> None:
    x, w = (_integers(*shape).float().requires_grad_(trained) for shape in [(1, 4, 5, 6, 4), (4, 4, 3, 3, 3)])
    if dynamic:
        torch._dynamo.maybe_mark_dynamic(x, 3)
    compiled: Any = torch.compile(model)
    expected = compiled(x, w)
    torch._dynamo.reset()
    with collect_records() as records:
        pipeline = PassPipeline([ConvPaddingPass(), TemporalConvPass(always=True)])
        compiled = torch.compile(model, options=pipeline.inductor_options())
        found = compiled(x, w)
    assert any(record.ran for record in records)
    _assert_equal(found, expected, [str(place) for place in range(len(expected))])
    assert [out.stride() for out in found] == [out.stride() for out in expected]
    if trained:
        torch.autograd.backward([out.sum() for out in found])
