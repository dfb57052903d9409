# SPDX-License-Identifier: Apache-2.0
"""How much work a graph is, at the sizes it is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from . import _torch_compat
from ._convolution import Convolution, aten, read_convolution


if TYPE_CHECKING:
    from torch.fx import Graph, Node


_MATRIX_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def hinted(extent: Any) -> int:
    """*extent* as an int; a symbol counts with the size of the example inputs, an unbacked one as 1."""
    return extent if isinstance(extent, int) else _torch_compat.size_hint(extent)


def convolution_flops(conv: Convolution) -> float:
    """Twice the multiplications of *conv*, those with padding included."""
    out = conv.node.meta["val"]
    return 2.0 * prod(map(hinted, out.shape)) * prod(map(hinted, conv.weight.meta["val"].shape[1:]))


@dataclass(frozen=True)
class ConvShare:
    """How much of a graph's work its convolutions are.

    Attributes:
        flops: Floating-point operations in convolutions over those in convolutions and matrix products, 0 to 1.
        bytes: Bytes that convolutions read and write over those of all calls that return tensors, 0 to 1. Fusion
            saves bytes around pointwise calls, so this is a lower bound.
    """

    flops: float
    bytes: float


def conv_share(graph: Graph) -> ConvShare:
    """The share of convolutions in the arithmetic and in the memory traffic of *graph*.

    `is_conv_heavy` counts nodes, and calls a transformer of 9,000 nodes with 31 small convolutions heavy. This weighs.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> x, w, m = torch.ones(1, 8, 32, 32), torch.ones(8, 8, 3, 3), torch.ones(32, 32)
        >>> conv_share(make_fx(lambda x, w: torch.conv2d(x, w))(x, w).graph).flops
        1.0
        >>> conv_share(make_fx(lambda x, m: x @ m)(x, m).graph)
        ConvShare(flops=0.0, bytes=0.0)
    """
    arithmetic, traffic = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        conv = read_convolution(node)
        traffic[conv is not None] += _bytes(node) + sum(map(_bytes, node.all_input_nodes))
        if conv is not None:
            arithmetic[True] += convolution_flops(conv)
        elif node.target in _MATRIX_PRODUCTS:
            operands: Any = node.args
            inner = operands[-2].meta["val"].shape[-1]
            arithmetic[False] += 2.0 * prod(map(hinted, node.meta["val"].shape)) * hinted(inner)
    return ConvShare(_share(arithmetic), _share(traffic))


def _share(amounts: dict[bool, float]) -> float:
    return amounts[True] / (sum(amounts.values()) or 1.0)


def _bytes(node: Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    return prod(map(hinted, value.shape)) * value.dtype.itemsize
