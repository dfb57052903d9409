# SPDX-License-Identifier: Apache-2.0
"""Symbolic paddings that are zero in fact are guarded on, at the price of one more compilation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from magi_passes import ConvPaddingPass, PassContext, PassPipeline, ZeroPadGuardPass, collect_records
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import pad


if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
CONV1, CONV2, CONV3 = nn.Conv1d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv3d(8, 8, 3)
for convolution in (CONV1, CONV2, CONV3):
    convolution.requires_grad_(False)


def causal(x: Tensor, cache: Tensor) -> Tensor:
    """As in WAN's decoder: the cache covers some of the two frames before."""
    out: Tensor = CONV3(pad(torch.cat([cache, x], 2), (1, 1, 1, 1, 2 - cache.shape[2], 0)))
    return out


def causal_by_hand(x: Tensor, cache: Tensor) -> Tensor:
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


@pytest.mark.parametrize(("fn", "dims"), [(causal, 3), (causal_by_hand, 3), (causal_1d, 1)])
def test_other_amounts_compile_once_more(fn: Any, dims: int) -> None:
    run, reasons = guarded(fn)
    for count, cached in ((4, 2), (5, 2), (3, 2), (4, 0), (5, 1), (4, 2), (3, 1), (3, 0)):
        x, cache = frames(count, cached, dims)
        torch.testing.assert_close(run(x, cache), fn(x, cache))
    # Zero cached frames and one are sizes that torch itself always sets apart.
    assert reasons == [FOUND, NONE, NONE]


def test_amounts_up_to_a_multiple_make_two_graphs() -> None:
    def windows(x: Tensor) -> Tensor:
        out: Tensor = CONV2(pad(x, (0, -x.shape[3] % 4, 0, -x.shape[2] % 4)))
        return out

    run, reasons = guarded(windows)
    for size in ((16, 24), (12, 32), (9, 17), (10, 23), (24, 16), (11, 30)):
        x = torch.randn(1, 8, *size)
        torch.testing.assert_close(run(x), windows(x))
    assert reasons == ["2 symbolic paddings of convolutions are zero", NONE]


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x, c: pad(x, (0, 2 - c.shape[2])) * 2, id="no convolution reads it"),
        pytest.param(lambda x, c: CONV3(pad(x, (1, 1, 1, 1, 2, 0))) + c.sum(), id="the amounts are numbers"),
        pytest.param(lambda x, c: CONV3(pad(x, (1, 1, 1, 1, 3 - c.shape[2], 0))), id="the amount is not zero"),
    ],
)
def test_what_is_left_alone(fn: Any) -> None:
    run, reasons = guarded(fn)
    for count in (4, 5):
        x, cache = frames(count, 2)
        torch.testing.assert_close(run(x, cache), fn(x, cache))
    assert reasons == [NONE]


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


def test_a_symbol_along_time_does_not_keep_the_rest_of_a_padding(trace: Any) -> None:
    weight = torch.randn(8, 8, 3, 3, 3)

    def fn(x: Tensor, cache: Tensor, weight: Tensor) -> Tensor:
        return torch.conv3d(pad(torch.cat([cache, x], 2), (1, 1, 1, 1, 5 - x.shape[2], 0)), weight)

    gm = trace(fn, (*frames(4, 2), weight), (2, 3, 4))
    ConvPaddingPass()(gm.graph)
    gm.graph.lint()
    (left,) = gm.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    (conv,) = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert list(left.args[1])[:4] == [0, 0, 0, 0]
    assert isinstance(left.args[1][4], torch.fx.Node)
    assert list(conv.args[4]) == [0, 1, 1]
    gm.recompile()
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
