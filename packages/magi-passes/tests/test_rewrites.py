# SPDX-License-Identifier: Apache-2.0
"""Padding and group norms are rewritten where that is exact; every other value, dtype and stride is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_passes import calls, decomposed, is_left_alone, pretend_cuda, rewritten, trace
from magi_passes import (
    ChannelMomentsPass,
    ConvPaddingPass,
    MagiInductorPass,
    PassContext,
    PassPipeline,
    TemporalConvPass,
    ZeroPadGuardPass,
    _torch_compat,
    collect_records,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import conv3d, group_norm, pad


aten = torch.ops.aten
X, W = torch.randint(-3, 4, (1, 4, 8, 8)).double(), torch.randint(-3, 4, (4, 4, 3, 3)).double()


def _padded(*explicit: int, **convolution: Any) -> Any:
    return lambda x, w: torch.conv2d(pad(x, explicit), w, **convolution)


def _read_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = pad(x, (1, 1, 1, 1))
    return torch.conv2d(x, w) + torch.conv2d(x, w * 2)


@pytest.mark.parametrize(
    ("fn", "left", "taken"),
    [
        (_padded(1, 1, 1, 1), [], [[1, 1]]),
        (_padded(2, 1, 0, 1), [[1, 0, 0, 1]], [[0, 1]]),
        (_padded(2, 2, 2, 2), [], [[2, 2]]),
        (_padded(3, 3, 3, 3), [[1, 1, 1, 1]], [[2, 2]]),
        (_padded(1, 1), [], [[0, 1]]),
        (_padded(1, 1, 1, 1, padding=1), [], [[2, 2]]),
        (_read_twice, [], [[1, 1], [1, 1]]),
    ],
)
def test_the_symmetric_part_moves(fn: Any, left: list[list[int]], taken: list[list[int]]) -> None:
    gm = rewritten(trace(fn, (X, W), (2, 3)), ConvPaddingPass())
    assert torch.equal(gm(X, W), fn(X, W))
    assert [list(node.args[1]) for node in calls(gm, aten.constant_pad_nd.default)] == left
    assert [list(node.args[4]) for node in calls(gm, aten.convolution.default)] == taken


def _with_a_sum(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = pad(x, (1, 1, 1, 1))
    return torch.conv2d(x, w) + x.sum()


@pytest.mark.parametrize(
    "fn",
    [
        _with_a_sum,
        lambda x, w: torch.conv2d(pad(x, (1, 1, 1, 1), value=1.0), w),
        lambda x, w: torch.conv2d(pad(x, (-1, -1, -1, -1)), w),
        lambda x, w: torch.conv2d(pad(x, (0, 2, 0, 2)), w),
        lambda x, w: torch.conv2d(x, pad(w, (1, 1, 1, 1))),
        lambda x, w: torch.conv_transpose2d(pad(x, (1, 1, 1, 1)), w),
        lambda x, w: torch.conv2d(pad(x, (1, 1, 1, 1), mode="reflect"), w),
    ],
    ids=["other reader", "value", "crop", "one side", "weight", "transposed", "reflect"],
)
def test_what_is_not_theirs_stays(fn: Any) -> None:
    assert is_left_alone(trace(fn, (X, W), (2, 3)), ConvPaddingPass())


CONV1, CONV2, CONV3 = nn.Conv1d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv3d(8, 8, 3)
for convolution in (CONV1, CONV2, CONV3):
    convolution.requires_grad_(False)


def causal_by_hand(x: Tensor, cache: Tensor) -> Tensor:
    """As in WAN's decoder: the cache covers some of the two frames before."""
    padded = torch.constant_pad_nd(torch.cat([cache, x], 2), [1, 1, 1, 1, 2 - cache.shape[2], 0])
    return torch.conv3d(padded, CONV3.weight)


def causal_1d(x: Tensor, cache: Tensor) -> Tensor:
    out: Tensor = CONV1(pad(torch.cat([cache, x], 2), pad=(2 - cache.shape[2], 0)))
    return out


def frames(count: int, cached: int, dims: int = 3) -> tuple[Tensor, Tensor]:
    space = (6, 7)[: dims - 1]
    return torch.randn(1, 8, count, *space), torch.randn(1, 8, cached, *space)


def guarded(fn: Callable[..., Any]) -> tuple[Callable[..., Any], list[str]]:
    """*fn*, run eagerly behind the guards of the pass, and what the pass said of each graph."""
    reasons: list[str] = []
    part = ZeroPadGuardPass()

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        verdict = part.is_applicable(gm.graph, PassContext())
        reasons.append(verdict.text)
        if verdict:
            part(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    return torch.compile(fn, dynamic=True, backend=backend), reasons


FOUND, NONE = (f"{count} symbolic paddings of convolutions are zero" for count in (1, 0))


TWO: list[tuple[Tensor, ...]] = [frames(count, 2) for count in (4, 5)]
CACHED = [(4, 2), (5, 2), (3, 2), (4, 0), (5, 1), (4, 2), (3, 1), (3, 0)]
WINDOWS = [(16, 24), (12, 32), (9, 17), (10, 23), (24, 16), (11, 30)]
# What is compiled, the inputs of its calls, and what the pass says of each graph.
GUARDED: dict[str, tuple[Callable[..., Any], list[tuple[Tensor, ...]], list[str]]] = {
    # Zero cached frames and one are sizes that torch itself always sets apart.
    "by hand": (causal_by_hand, [frames(*each) for each in CACHED], [FOUND, NONE, NONE]),
    "one dimension": (causal_1d, [frames(*each, 1) for each in CACHED], [FOUND, NONE, NONE]),
    "up to a multiple": (
        lambda x: CONV2(pad(x, (0, -x.shape[3] % 4, 0, -x.shape[2] % 4))),
        [(torch.randn(1, 8, *size),) for size in WINDOWS],
        ["2 symbolic paddings of convolutions are zero", NONE],
    ),
    "no convolution reads it": (lambda x, c: pad(x, (0, 2 - c.shape[2])) * 2, TWO, [NONE]),
    "the amounts are numbers": (lambda x, c: CONV3(pad(x, (1, 1, 1, 1, 2, 0))) + c.sum(), TWO, [NONE]),
    "the amount is not zero": (lambda x, c: CONV3(pad(x, (1, 1, 1, 1, 3 - c.shape[2], 0))), TWO, [NONE]),
}


@pytest.mark.parametrize("name", GUARDED)
def test_graphs_with_and_without_the_padding(name: str) -> None:
    fn, inputs, expected = GUARDED[name]
    run, reasons = guarded(fn)
    for tensors in inputs:
        torch.testing.assert_close(run(*tensors), fn(*tensors))
    assert reasons == expected


def test_an_amount_that_depends_on_data_is_left_alone() -> None:
    def fn(x: Tensor, n: Tensor) -> Tensor:
        amount = int((n + n).item())
        torch._check(amount >= 0)
        torch._check(amount <= 2)
        out: Tensor = CONV2(pad(x, (amount, amount)))
        return out

    run, reasons = guarded(fn)
    x = torch.randn(1, 8, 6, 7)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for n in (0, 1):
            torch.testing.assert_close(run(x, torch.tensor(n)), fn(x, torch.tensor(n)))
    assert reasons == [NONE]


def test_a_symbol_along_time_does_not_keep_the_rest_of_a_padding() -> None:
    weight = torch.randn(8, 8, 3, 3, 3)

    def fn(x: Tensor, cache: Tensor, weight: Tensor) -> Tensor:
        return torch.conv3d(pad(torch.cat([cache, x], 2), (1, 1, 1, 1, 5 - x.shape[2], 0)), weight)

    gm = rewritten(trace(fn, (*frames(4, 2), weight), (2, 3, 4)), ConvPaddingPass())
    (left,) = calls(gm, aten.constant_pad_nd.default)
    (conv,) = calls(gm, aten.convolution.default)
    assert list(left.args[1])[:4] == [0, 0, 0, 0]
    assert isinstance(left.args[1][4], torch.fx.Node)
    assert list(conv.args[4]) == [0, 1, 1]
    for count in (4, 3, 5):
        x, cache = frames(count, 2)
        torch.testing.assert_close(gm(x, cache, weight), fn(x, cache, weight))


@pytest.mark.parametrize("grad", [False, True])
def test_through_inductor_cold_and_warm(inductor: Any, grad: bool) -> None:
    """The graph in the cache holds for zero amounts only; another amount must not get it."""
    graphs = []
    for passes in ([], [ZeroPadGuardPass()], [ZeroPadGuardPass()]):
        torch._dynamo.reset()
        counters.clear()
        run = torch.compile(causal_1d, dynamic=True, options=PassPipeline(passes).inductor_options() or None)
        with collect_records() as records:
            for count, cached in ((4, 2), (4, 1), (5, 2), (5, 1)):
                x, cache = (t.requires_grad_(grad) for t in frames(count, cached, 1))
                out, expected = run(x, cache), causal_1d(x, cache)
                torch.testing.assert_close(out, expected)
                if grad:
                    found, wanted = (torch.autograd.grad(y.square().sum(), (x, cache)) for y in (out, expected))
                    torch.testing.assert_close(found, wanted)
        graphs.append(counters["stats"]["unique_graphs"])
        assert all(record.ran is (record.reason == FOUND) for record in records)
    assert len(set(graphs)) == 1, "one cached frame is a size that torch sets apart, with the guard and without"


def _by_channel(fn: Any, *args: torch.Tensor, sizes: Literal["fake", "symbolic"] = "fake") -> torch.fx.GraphModule:
    return rewritten(decomposed(fn, *args, sizes=sizes), ChannelMomentsPass(always=True))


def _reductions(gm: torch.fx.GraphModule) -> list[list[int]]:
    return [list(node.args[1]) for node in calls(gm, aten.var_mean.correction)]


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("shape", "row"),
    [((2, 8, 5, 7), [3]), ((2, 8, 9, 2), [2, 3]), ((1, 8, 3, 5, 7), [4]), ((1, 8, 3, 3, 2), [3, 4])],
)
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], row: list[int], groups: int, offset: float
) -> None:
    monkeypatch.setattr("magi_passes._rewrites.moments.SHORT_ROW", 4)

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return group_norm(x, groups, weight, bias)

    x = torch.randn(shape, dtype=torch.float64) + offset
    weight, bias = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    assert _reductions(decomposed(norm, x, weight, bias)) == [[2, 3]]
    gm = _by_channel(norm, x, weight, bias)
    rest = list(range(2, len(shape) + 1))
    assert _reductions(gm) == [rest]
    assert [node.args[1] for node in calls(gm, aten.mean.dim)] == [row, row, rest]
    flat = (2, groups, 8 // groups, x[0, 0].numel())
    assert not [node for node in gm.graph.nodes if getattr(node.meta.get("val"), "shape", None) == flat]
    torch.testing.assert_close(gm(x, weight, bias), norm(x, weight, bias), rtol=1e-8, atol=1e-8)


def test_a_batch_of_symbolic_size() -> None:
    def norm(pixels: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(1.0, 9.0, dtype=pixels.dtype)
        return group_norm(pixels[:, None] * numbers[:, None, None], 4, numbers, numbers)

    gm = _by_channel(norm, torch.randn(2, 5, 7, dtype=torch.float64), sizes="symbolic")
    assert _reductions(gm) == [[2, 3, 4]]
    other = torch.randn(3, 4, 9, dtype=torch.float64)
    torch.testing.assert_close(gm(other), norm(other))


@pytest.mark.parametrize(
    ("image", "is_stored"),
    [
        (lambda x, y: x.exp() + y, True),
        (lambda x, y: torch.relu(x.exp() * y.sum(dim=(2, 3), keepdim=True)), False),
        (lambda x, _: x + x.exp(), False),
    ],
    ids=["two images", "one for each channel", "one image"],
)
def test_a_sum_of_images_is_stored(image: Any, is_stored: bool) -> None:
    """Kernels that take the first pixel from a sum that they compute load both images twice: more than they may."""
    x, y = torch.randn(2, 8, 5, 7), torch.randn(2, 8, 5, 7)
    gm = _by_channel(lambda x, y: group_norm(image(x, y), 4), x, y)
    assert len(list(calls(gm, _torch_compat.compiling.layout_ops().stored))) == is_stored
    torch.testing.assert_close(gm(x, y), group_norm(image(x, y), 4))


def test_an_image_of_many_gates_is_read_once() -> None:
    """Each gate reads the one before twice; there are two to the power of 64 ways from the last one to the first."""

    def gated(x: torch.Tensor) -> torch.Tensor:
        for _ in range(64):
            x = x.cos() * x
        return group_norm(x, 4)

    gm = _by_channel(gated, torch.randn(2, 8, 5, 7))
    assert not list(calls(gm, _torch_compat.compiling.layout_ops().stored))


@pytest.mark.parametrize("offset", [1e3, -1e5])
@pytest.mark.parametrize("outlier", [0.0, 100.0])
def test_a_mean_far_from_zero_costs_no_digits_of_the_variance(offset: float, outlier: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 8, 40, 50) + offset
    x[..., 0, 0] += outlier
    x[:, :4] = offset  # two groups of one number
    gm = _by_channel(lambda x: group_norm(x, 4), x)
    torch.testing.assert_close(gm(x).double(), group_norm(x.double(), 4), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory", ["channels first", "channels last"])
def test_weight_and_bias_become_one_product_and_one_sum(
    has_weight: bool, has_bias: bool, dtype: torch.dtype, memory: str
) -> None:
    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return group_norm(x, 4, weight if has_weight else None, bias if has_bias else None)

    given = torch.randn(2, 8, 6, 5).to(dtype), torch.randn(8).to(dtype), torch.randn(8).to(dtype)
    if memory == "channels last":
        given = given[0].contiguous(memory_format=torch.channels_last), *given[1:]
    gm = _by_channel(norm, *given)
    of_moments, *normalising = [node for node in gm.graph.nodes if _is_elementwise_on(node, given[0].shape)][1:]
    assert of_moments.args[0] is of_moments.args[1]
    assert [node.target for node in normalising] == [torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor]
    stored = [node.args[1] for node in normalising]
    assert {node.target for node in stored} == {_torch_compat.compiling.layout_ops().channels_last}
    assert {tuple(node.meta["val"].shape) for node in stored} == {(2, 8, 1, 1)}
    torch.testing.assert_close(gm(*given), norm(*given))


def _is_elementwise_on(node: torch.fx.Node, shape: torch.Size) -> bool:
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    is_conversion = node.target is torch.ops.prims.convert_element_type.default
    return is_pointwise and not is_conversion and node.meta["val"].shape == shape


def _with_another_reader(x: torch.Tensor, weight: torch.Tensor) -> Any:
    """Where the normalised image has another reader, the weight is not folded into it."""
    normalised = group_norm(x, 4)
    return normalised * weight[None, :, None, None], normalised


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (_with_another_reader, (8,)),
        # Only numbers for each channel are folded.
        *((lambda x, other: group_norm(x, 4) * other + other, shape) for shape in ((1, 8, 6, 1), (8, 6, 5))),
        *((lambda x, other: group_norm(x, 4) * other + other, shape) for shape in ((2, 8, 6, 5), (8, 1, 5), (1,))),
        # Half precision is reduced in float32.
        (lambda x, _: group_norm((x + 100).bfloat16(), 4), (1,)),
    ],
)
def test_what_follows_a_norm_gets_the_same_numbers(norm: Any, shape: tuple[int, ...]) -> None:
    x, other = torch.randn(2, 8, 6, 5), torch.randn(shape)
    torch.testing.assert_close(_by_channel(norm, x, other)(x, other), norm(x, other))


def test_other_statistics_stay() -> None:
    def others(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, [6, 6]) + torch.var_mean(x, (2, 3), keepdim=True)[0]

    assert is_left_alone(decomposed(others, torch.randn(1, 8, 6, 6)), ChannelMomentsPass(always=True))


def test_graphs_on_the_cpu_are_kept_by_default() -> None:
    gm = decomposed(lambda x: group_norm(x, 2), torch.randn(1, 8, 6, 6))
    assert not ChannelMomentsPass().is_applicable(gm.graph, PassContext())
    assert ChannelMomentsPass(always=True).is_applicable(gm.graph, PassContext()).text == "1 group norms"


@pytest.mark.parametrize(("pixels", "is_rewritten"), [(1024, True), (1023, False)])
def test_small_norms_of_constant_size_stay(pixels: int, is_rewritten: bool) -> None:
    gm = pretend_cuda(decomposed(lambda x: group_norm(x, 2), torch.empty(1, 8, 1024, pixels)), torch.float32)
    assert bool(ChannelMomentsPass().is_applicable(gm.graph, PassContext())) is is_rewritten


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
