# SPDX-License-Identifier: Apache-2.0
"""Which graphs are dynamic, and which are made of convolutions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from magi_passes import is_conv_heavy, is_convolution, is_dynamic
from torch.fx.experimental.proxy_tensor import make_fx


IMAGE = torch.ones(1, 4, 8, 8)
VOLUME = torch.ones(1, 4, 4, 8, 8)
LINE = torch.ones(1, 4, 8)
aten = torch.ops.aten

CONVOLUTIONS: dict[str, Any] = {
    "conv1d": (torch.conv1d, LINE, torch.ones(4, 4, 3)),
    "conv2d": (torch.conv2d, IMAGE, torch.ones(4, 4, 3, 3)),
    "conv3d": (torch.conv3d, VOLUME, torch.ones(4, 4, 3, 3, 3)),
    "grouped": (lambda x, w: torch.conv2d(x, w, groups=2), IMAGE, torch.ones(4, 2, 3, 3)),
    "depthwise": (lambda x, w: torch.conv2d(x, w, groups=4), IMAGE, torch.ones(4, 1, 3, 3)),
    "transposed 1d": (torch.conv_transpose1d, LINE, torch.ones(4, 4, 3)),
    "transposed 2d": (torch.conv_transpose2d, IMAGE, torch.ones(4, 4, 3, 3)),
    "transposed 3d": (torch.conv_transpose3d, VOLUME, torch.ones(4, 4, 3, 3, 3)),
    "same padding": (lambda x, w: torch.conv2d(x, w, padding="same"), IMAGE, torch.ones(4, 4, 3, 3)),
    "private": (
        lambda x, w: aten._convolution.default(
            x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, False, False, True, True
        ),
        IMAGE,
        torch.ones(4, 4, 3, 3),
    ),
}


@pytest.mark.parametrize("form", CONVOLUTIONS)
def test_every_form_of_convolution_counts(form: str) -> None:
    convolve, x, weight = CONVOLUTIONS[form]
    graph = make_fx(lambda x, w: convolve(x, w).relu(), tracing_mode="fake")(x, weight).graph
    assert sum(map(is_convolution, graph.nodes)) == 1
    assert is_conv_heavy(graph)


@pytest.mark.parametrize(
    "name",
    [
        *("aten::convolution_backward", "aten::conv_tbc", "aten::cudnn_convolution", "aten::cudnn_convolution_relu"),
        *("aten::miopen_convolution", "aten::mkldnn_convolution", "aten::slow_conv3d", "aten::thnn_conv2d"),
        *("aten::_conv_depthwise2d", "aten::conv_depthwise3d", "aten::slow_conv_dilated2d"),
        *("mkldnn::_convolution_pointwise", "mkldnn::_convolution_pointwise_", "onednn::qconv2d_pointwise"),
        *("mkldnn::_convolution_transpose_pointwise", "quantized::conv2d", "quantized::conv3d_relu"),
    ],
)
def test_every_library_s_convolution_counts(name: str) -> None:
    namespace, _, op = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    if packet is None:
        pytest.skip(f"this build of torch has no {name}")
    graph = torch.fx.Graph()
    for overload in packet.overloads():
        assert is_convolution(graph.call_function(getattr(packet, overload)))


@pytest.mark.parametrize(
    "target",
    [torch.ops.prims.convert_element_type.default, aten.add.Tensor, aten.mm.default, aten._to_copy.default, len],
    ids=str,
)
def test_other_ops_do_not_count_as_convolutions(target: Any) -> None:
    assert not is_convolution(torch.fx.Graph().call_function(target))


def test_no_convolution_is_never_heavy() -> None:
    assert not is_conv_heavy(make_fx(lambda x: x.relu())(IMAGE).graph)
    assert not is_conv_heavy(torch.fx.Graph())


@pytest.mark.parametrize(("nodes", "heavy"), [(299, True), (300, False), (301, False)])
def test_the_threshold_is_inductors(nodes: int, heavy: bool) -> None:
    graph = torch.fx.Graph()
    x = graph.call_function(aten.convolution.default)
    for _ in range(nodes - 1):
        x = graph.call_function(aten.relu.default, (x,))
    assert is_conv_heavy(graph) is heavy


def test_bodies_of_higher_order_ops_count() -> None:
    body = torch.fx.Graph()
    body.output(body.call_function(aten.convolution.default))
    root = torch.nn.Module()
    root.body = torch.fx.GraphModule(torch.nn.Module(), body)
    graph = torch.fx.Graph()
    graph.output(graph.get_attr("body"))
    gm = torch.fx.GraphModule(root, graph)
    assert is_conv_heavy(gm.graph)
    assert not is_conv_heavy(gm.graph, nodes_per_conv=4)
    assert is_conv_heavy(gm.graph, nodes_per_conv=5)


def test_a_symbol_anywhere_in_a_placeholder_is_dynamic() -> None:
    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        return x.expand(n, -1)

    traced = make_fx(f, tracing_mode="symbolic")(torch.ones(1, 4), 5)
    assert is_dynamic(traced.graph)
    for node in traced.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["val"], torch.Tensor):
            node.meta["val"] = torch.ones(1, 4)
    assert is_dynamic(traced.graph)
    for node in traced.graph.find_nodes(op="placeholder"):
        node.meta.pop("val")
    assert not is_dynamic(traced.graph)


def test_a_static_graph_is_not_dynamic() -> None:
    assert not is_dynamic(make_fx(lambda x: x + 1, tracing_mode="fake")(IMAGE).graph)
