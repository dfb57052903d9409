# SPDX-License-Identifier: Apache-2.0
"""Group norms whose statistics are taken by channel are the same group norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from magi_passes import ChannelMomentsPass, PassContext
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import group_norm


def _decomposed(fn: Any, *args: torch.Tensor) -> torch.fx.GraphModule:
    """The graph as Inductor's hooks see it: group norms already taken apart."""
    return make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode="fake")(*args)


def _reductions(gm: torch.fx.GraphModule) -> list[list[int]]:
    nodes = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.var_mean.correction)
    return [list(node.args[1]) for node in nodes]


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(2, 8, 5, 7), (1, 8, 3, 5, 7)])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_the_same_numbers(shape: tuple[int, ...], groups: int, offset: float) -> None:
    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return group_norm(x, groups, weight, bias)

    x = torch.randn(shape, dtype=torch.float64) + offset
    weight, bias = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    gm = _decomposed(norm, x, weight, bias)
    assert _reductions(gm) == [[2, 3]]
    ChannelMomentsPass(always=True)(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert _reductions(gm) == [list(range(2, len(shape))), [2]]
    flat = (2, groups, 8 // groups, x[0, 0].numel())
    assert not [node for node in gm.graph.nodes if getattr(node.meta.get("val"), "shape", None) == flat]
    torch.testing.assert_close(gm(x, weight, bias), norm(x, weight, bias), rtol=1e-8, atol=1e-8)


def test_half_precision_is_reduced_in_float32() -> None:
    x = torch.randn(1, 8, 6, 6).bfloat16() + 100
    gm = _decomposed(lambda x: group_norm(x, 2), x)
    ChannelMomentsPass(always=True)(gm.graph)
    gm.recompile()
    torch.testing.assert_close(gm(x), group_norm(x, 2))


def test_other_statistics_stay() -> None:
    def others(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, [6, 6]) + torch.var_mean(x, (2, 3), keepdim=True)[0]

    gm = _decomposed(others, torch.randn(1, 8, 6, 6))
    before = str(gm.graph)
    assert not ChannelMomentsPass(always=True).is_applicable(gm.graph, PassContext())
    ChannelMomentsPass(always=True)(gm.graph)
    assert str(gm.graph) == before


def test_static_and_cpu_graphs_stay_unless_asked() -> None:
    gm = _decomposed(lambda x: group_norm(x, 2), torch.randn(1, 8, 6, 6))
    assert not ChannelMomentsPass().is_applicable(gm.graph, PassContext())
    assert ChannelMomentsPass(always=True).is_applicable(gm.graph, PassContext()).text == "1 group norms"
