# SPDX-License-Identifier: Apache-2.0
"""What a graph is made of: is it dynamic, does it convolve, and how much of its work is in convolutions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from magi_passes import conv_share, is_conv_heavy, is_convolution, is_dynamic
from magi_passes._graph.nodes import ConvShare
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode


IMAGE, WEIGHT = torch.ones(2, 8, 10, 12), torch.ones(8, 8, 3, 3)
LINE, VOLUME = torch.ones(2, 8, 12), torch.ones(1, 8, 3, 6, 6)
SQUARE = torch.ones(32, 32)
TAIL = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
aten = torch.ops.aten


def _backward(mask: list[bool]) -> Any:
    return lambda x, w: aten.convolution_backward.default(x, x, w, [8], *TAIL, mask)


# Each function of an image and a weight is convolutions and nothing else.
CONVOLUTIONS: dict[str, Any] = {
    "conv1d": (torch.conv1d, LINE, torch.ones(8, 8, 3)),
    "conv2d": (torch.conv2d, IMAGE, WEIGHT),
    "conv3d": (torch.conv3d, VOLUME, torch.ones(4, 8, 3, 3, 3)),
    "grouped": (lambda x, w: torch.conv2d(x, w, groups=2), IMAGE, torch.ones(8, 4, 3, 3)),
    "depthwise": (lambda x, w: torch.conv2d(x, w, groups=8), IMAGE, torch.ones(8, 1, 3, 3)),
    "transposed 1d": (torch.conv_transpose1d, LINE, torch.ones(8, 8, 3)),
    "transposed 2d": (torch.conv_transpose2d, IMAGE, WEIGHT),
    "transposed 3d": (torch.conv_transpose3d, VOLUME, torch.ones(8, 4, 3, 3, 3)),
    "same padding": (lambda x, w: torch.conv2d(x, w, padding="same"), IMAGE, WEIGHT),
    "not decomposed": (
        lambda x, w: aten._convolution.default(x, w, None, *TAIL, False, False, True, True),
        IMAGE,
        WEIGHT,
    ),
    "backward": (_backward([True, True, True]), IMAGE, WEIGHT),
    "gradient of the weight only": (_backward([False, True, False]), IMAGE, WEIGHT),
    "gradient of the image only": (_backward([True, False, False]), IMAGE, WEIGHT),
}


@pytest.mark.parametrize("form", CONVOLUTIONS)
def test_a_graph_of_convolutions_is_all_convolutions(form: str) -> None:
    convolve, x, weight = CONVOLUTIONS[form]
    with FlopCounterMode(display=False) as counter:
        convolve(x, weight)
    counted = counter.get_total_flops()
    alone = make_fx(convolve, tracing_mode="fake")(x, weight).graph
    assert sum(map(is_convolution, alone.nodes)) == 1
    assert is_conv_heavy(alone)
    assert conv_share(alone).flops == 1
    assert conv_share(alone).bytes > 0.5
    # torch's own count of the convolution, and a product of two matrices.
    both = make_fx(lambda x, w, a: (convolve(x, w), a @ a), tracing_mode="fake")(x, weight, SQUARE).graph
    assert conv_share(both).flops == pytest.approx(counted / (counted + 2 * 32**3))


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


def test_no_convolution_is_never_heavy_and_no_share() -> None:
    assert conv_share(make_fx(lambda x: x.relu())(IMAGE).graph) == ConvShare(0.0, 0.0)
    assert not is_conv_heavy(make_fx(lambda x: x.relu())(IMAGE).graph)
    assert not is_conv_heavy(torch.fx.Graph())


@pytest.mark.parametrize(("nodes", "heavy"), [(299, True), (300, False), (301, False)])
def test_the_threshold_is_inductors(nodes: int, heavy: bool) -> None:
    graph = torch.fx.Graph()
    x = graph.call_function(aten.convolution.default)
    for _ in range(nodes - 1):
        x = graph.call_function(aten.relu.default, (x,))
    assert is_conv_heavy(graph) is heavy


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
    assert not is_dynamic(make_fx(lambda x: x + 1, tracing_mode="fake")(IMAGE).graph)


def _attention(q: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, q, q)


PRODUCTS: dict[str, tuple[Any, torch.Tensor]] = {
    "mm": (lambda a: a @ a, SQUARE),
    "addmm": (lambda a: torch.addmm(a, a, a), SQUARE),
    "bmm": (lambda a: a @ a, torch.ones(3, 8, 8)),
    "baddbmm": (lambda a: torch.baddbmm(a, a, a), torch.ones(3, 8, 8)),
    "matrix and vector": (lambda a: a @ a[0], SQUARE),
    "dot": (lambda a: torch.dot(a[0], a[1]), SQUARE),
    "integers": (lambda a: torch._int_mm(a, a), torch.ones(32, 32, dtype=torch.int8)),
    "linear": (lambda a: aten.linear.default(a, a), SQUARE),
    "mkldnn": (lambda a: torch.ops.mkldnn._linear_pointwise.default(a, a, None, "none", [], ""), SQUARE),
    "attention": (_attention, torch.ones(1, 2, 16, 8)),
    "attention with grouped heads": (
        lambda q: aten._scaled_dot_product_flash_attention_for_cpu.default(q, q[:, :1], q[:, :1])[0],
        torch.ones(1, 2, 16, 8),
    ),
}


@pytest.mark.parametrize("form", PRODUCTS)
def test_other_arithmetic_is_weighed_against_it(form: str) -> None:
    product, operand = PRODUCTS[form]
    if form == "mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no mkldnn")

    def model(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor) -> Any:
        return torch.conv2d(x, w), product(a)

    assert 0 < conv_share(make_fx(model, tracing_mode="fake")(IMAGE, WEIGHT, operand).graph).flops < 1
    assert conv_share(make_fx(product, tracing_mode="fake")(operand).graph).flops == 0


def test_the_convolutions_of_mkldnn_count() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no mkldnn")
    convolve = torch.ops.mkldnn._convolution_pointwise.default
    graph = make_fx(lambda x, w: convolve(x, w, None, [1, 1], [1, 1], [1, 1], 1, "none", [], ""), tracing_mode="fake")
    assert conv_share(graph(IMAGE, WEIGHT).graph) == conv_share(
        make_fx(lambda x, w: torch.conv2d(x, w, padding=1), tracing_mode="fake")(IMAGE, WEIGHT).graph
    )


@pytest.mark.parametrize(("depth", "fewer_than_all"), [(1, 14), (2, 24)])
def test_the_bodies_of_higher_order_ops_count(depth: int, fewer_than_all: int) -> None:
    def model(x: torch.Tensor, w: torch.Tensor) -> Any:
        convolve = lambda x, w: torch.conv2d(x, w, padding=1)  # noqa: E731
        leave = lambda x, w: x.clone()  # noqa: E731
        inside = convolve if depth == 1 else lambda x, w: torch.cond(x.max() > 0, convolve, leave, (x, w))
        return torch.cond(x.sum() > 0, inside, leave, (x, w))

    graph = make_fx(model, tracing_mode="fake")(IMAGE, WEIGHT).graph
    assert conv_share(graph).flops == 1
    assert conv_share(graph).bytes > 0.2
    assert not is_conv_heavy(graph, nodes_per_conv=fewer_than_all)
    assert is_conv_heavy(graph, nodes_per_conv=2 * fewer_than_all)


def test_sizes_that_depend_on_data_do_not_stop_it() -> None:
    def model(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor) -> Any:
        rows = a[a[:, 0] > 0]
        return torch.conv2d(x, w), rows @ a, rows @ rows.T

    graph = make_fx(model, tracing_mode="symbolic")(IMAGE, WEIGHT, SQUARE).graph
    assert 0 < conv_share(graph).flops < 1
