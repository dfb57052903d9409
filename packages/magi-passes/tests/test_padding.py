# SPDX-License-Identifier: Apache-2.0
"""Explicit padding moves into the convolutions that read it, as far as it is theirs alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from magi_passes import ConvPaddingPass, PassContext
from torch.nn.functional import pad


aten = torch.ops.aten
X, W = torch.randint(-3, 4, (1, 4, 8, 8)).double(), torch.randint(-3, 4, (4, 4, 3, 3)).double()


def _after(trace: Any, fn: Any) -> tuple[torch.fx.GraphModule, list[list[int]], list[list[int]]]:
    gm = trace(fn, (X, W), (2, 3))
    ConvPaddingPass()(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert torch.equal(gm(X, W), fn(X, W))
    pads = gm.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    convolutions = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    return gm, [list(node.args[1]) for node in pads], [list(node.args[4]) for node in convolutions]


@pytest.mark.parametrize(
    ("explicit", "left", "taken"),
    [
        ((1, 1, 1, 1), [], [1, 1]),
        ((2, 1, 0, 1), [[1, 0, 0, 1]], [0, 1]),
        ((2, 2, 2, 2), [], [2, 2]),
        ((3, 3, 3, 3), [[1, 1, 1, 1]], [2, 2]),
        ((1, 1), [], [0, 1]),
    ],
)
def test_the_symmetric_part_moves(
    explicit: tuple[int, ...], left: list[list[int]], taken: list[int], trace: Any
) -> None:
    _, pads, paddings = _after(trace, lambda x, w: torch.conv2d(pad(x, explicit), w))
    assert pads == left
    assert paddings == [taken]


def test_it_adds_to_the_padding_that_is_there(trace: Any) -> None:
    _, pads, paddings = _after(trace, lambda x, w: torch.conv2d(pad(x, (1, 1, 1, 1)), w, padding=1))
    assert (pads, paddings) == ([], [[2, 2]])


def test_several_convolutions_share_it(trace: Any) -> None:
    def both(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = pad(x, (1, 1, 1, 1))
        return torch.conv2d(x, w) + torch.conv2d(x, w * 2)

    _, pads, paddings = _after(trace, both)
    assert (pads, paddings) == ([], [[1, 1], [1, 1]])


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: torch.conv2d(pad(x, (1, 1, 1, 1)), w) + pad(x, (1, 1, 1, 1)).sum(),
        lambda x, w: torch.conv2d(pad(x, (1, 1, 1, 1), value=1.0), w),
        lambda x, w: torch.conv2d(pad(x, (-1, -1, -1, -1)), w),
        lambda x, w: torch.conv2d(pad(x, (0, 2, 0, 2)), w),
        lambda x, w: torch.conv2d(x, pad(w, (1, 1, 1, 1))),
        lambda x, w: torch.conv_transpose2d(pad(x, (1, 1, 1, 1)), w),
        lambda x, w: torch.conv2d(pad(x, (1, 1, 1, 1), mode="reflect"), w),
    ],
    ids=["other reader", "value", "crop", "one side", "weight", "transposed", "reflect"],
)
def test_what_is_not_theirs_stays(fn: Any, trace: Any) -> None:
    def shared(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return fn(x, w)  # type: ignore[no-any-return]

    gm = trace(shared, (X, W), (2, 3))
    if len(gm.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)) == 2:
        # As common subexpression elimination leaves it: one padding with two readers.
        first, second = gm.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
        second.replace_all_uses_with(first)
        gm.graph.erase_node(second)
    before = str(gm.graph)
    assert not ConvPaddingPass().is_applicable(gm.graph, PassContext())
    ConvPaddingPass()(gm.graph)
    assert str(gm.graph) == before
