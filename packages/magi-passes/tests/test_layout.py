# SPDX-License-Identifier: Apache-2.0
"""When channels-last is turned on for dynamic convolutions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from magi_passes import ConvLayoutPass, PassContext, conv_share
from magi_passes._graph.nodes import ConvShare


def _conv(channels: int = 128, out: int = 128, groups: int = 1) -> Any:
    tensors = torch.ones(1, channels, 16, 18), torch.ones(out, channels // groups, 3, 3)
    return (lambda x, w: torch.conv2d(x, w, groups=groups)), tensors


@pytest.mark.parametrize(
    ("conv", "context", "applies", "reason"),
    [
        ({}, {}, True, "expected to take 0.82 of the time"),
        ({"channels": 256, "out": 64}, {}, True, "0.7"),
        ({"channels": 32, "out": 32}, {}, True, "0.78"),
        ({"groups": 2}, {}, False, "expected to take 1.36 of the time"),
        ({"groups": 128}, {}, True, "0.8"),
        ({}, {"is_inference": False}, True, "training"),
        ({"groups": 2}, {"is_inference": False}, False, "training with grouped"),
        ({"channels": 32, "out": 32}, {"is_inference": False}, False, "training with small"),
        ({}, {"user_keys": frozenset({"force_layout_optimization"})}, False, "you set force_layout_optimization"),
        ({}, {"config": {"layout_optimization": False}}, False, "layout_optimization is off"),
    ],
)
def test_dynamic_on_cuda(
    conv: dict[str, int], context: dict[str, Any], applies: bool, reason: str, trace: Any, pretend_cuda: Any
) -> None:
    fn, tensors = _conv(**conv)
    verdict = ConvLayoutPass().is_applicable(pretend_cuda(trace(fn, tensors, (2, 3))).graph, PassContext(**context))
    assert verdict.applies is applies
    assert reason in verdict.text


def test_static_graphs_and_the_cpu_are_inductors_own(trace: Any, pretend_cuda: Any) -> None:
    fn, tensors = _conv()
    static, on_cpu = pretend_cuda(trace(fn, tensors)), trace(fn, tensors, (2, 3))
    assert ConvLayoutPass().is_applicable(static.graph, PassContext()).text == "static: Inductor decides itself"
    assert ConvLayoutPass().is_applicable(on_cpu.graph, PassContext()).text == "no forward convolution on CUDA"


def test_the_share_of_convolutions(trace: Any) -> None:
    def both(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.conv2d(x, w, padding=1).flatten(1)
        return y @ y.T

    share = conv_share(trace(both, (torch.ones(4, 2, 8, 8), torch.ones(2, 2, 3, 3)), (2, 3)).graph)
    convolution, product = 2 * 4 * 2 * 64 * 2 * 9, 2 * 4 * 4 * 128
    assert share.flops == pytest.approx(convolution / (convolution + product))
    assert 0 < share.bytes < 1


def test_nothing_to_share(trace: Any) -> None:
    assert conv_share(trace(lambda x: x.relu(), (torch.ones(4, 4),)).graph) == ConvShare(0.0, 0.0)
    assert conv_share(trace(lambda x: x @ x, (torch.ones(4, 4),)).graph).flops == 0.0
