# SPDX-License-Identifier: Apache-2.0
"""Group norms whose statistics are taken by channel are the same group norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from magi_passes import ChannelMomentsPass, PassContext, _torch_compat
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
    gm = _decomposed(norm, *given)
    ChannelMomentsPass(always=True)(gm.graph)
    gm.graph.lint()
    gm.recompile()
    calls = [node for node in gm.graph.nodes if _is_elementwise_on(node, given[0].shape)]
    assert [node.target for node in calls] == [torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor]
    stored = [node.args[1] for node in calls]
    assert {node.target for node in stored} == {_torch_compat.compiling.channels_last_op()}
    assert {tuple(node.meta["val"].shape) for node in stored} == {(2, 8, 1, 1)}
    torch.testing.assert_close(gm(*given), norm(*given))


def _is_elementwise_on(node: torch.fx.Node, shape: torch.Size) -> bool:
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    is_conversion = node.target is torch.ops.prims.convert_element_type.default
    return is_pointwise and not is_conversion and node.meta["val"].shape == shape


def test_what_something_else_reads_stays() -> None:
    """Where the normalised image has another reader, the weight is not folded into it."""

    def norm(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normalised = group_norm(x, 4)
        return normalised * weight[None, :, None, None], normalised

    x, weight = torch.randn(2, 8, 6, 5), torch.randn(8)
    gm = _decomposed(norm, x, weight)
    ChannelMomentsPass(always=True)(gm.graph)
    gm.recompile()
    for ours, theirs in zip(gm(x, weight), norm(x, weight), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(1, 8, 6, 1), (8, 6, 5), (2, 8, 6, 5), (8, 1, 5), (1,)])
def test_only_numbers_for_each_channel_are_folded(shape: tuple[int, ...]) -> None:
    def norm(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return group_norm(x, 4) * other + other

    x, other = torch.randn(2, 8, 6, 5), torch.randn(shape)
    gm = _decomposed(norm, x, other)
    ChannelMomentsPass(always=True)(gm.graph)
    gm.recompile()
    torch.testing.assert_close(gm(x, other), norm(x, other))


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


def test_graphs_on_the_cpu_are_kept_by_default() -> None:
    gm = _decomposed(lambda x: group_norm(x, 2), torch.randn(1, 8, 6, 6))
    assert not ChannelMomentsPass().is_applicable(gm.graph, PassContext())
    assert ChannelMomentsPass(always=True).is_applicable(gm.graph, PassContext()).text == "1 group norms"


@pytest.mark.parametrize(("pixels", "is_rewritten"), [(1024, True), (1023, False)])
def test_small_norms_of_constant_size_stay(pixels: int, is_rewritten: bool, pretend_cuda: Any) -> None:
    gm = pretend_cuda(_decomposed(lambda x: group_norm(x, 2), torch.empty(1, 8, 1024, pixels)), torch.float32)
    assert bool(ChannelMomentsPass().is_applicable(gm.graph, PassContext())) is is_rewritten
