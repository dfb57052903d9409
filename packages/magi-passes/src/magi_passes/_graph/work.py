# SPDX-License-Identifier: Apache-2.0
"""How much work a graph is, at the sizes it is compiled for."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from .convolution import Convolution
from .flops import flops, tensors
from .predicates import all_nodes, body_of, is_convolution
from .sizes import hinted


if TYPE_CHECKING:
    from torch.fx import Graph, Node


def convolution_flops(conv: Convolution) -> float:
    """Twice the number of multiplications of *conv*, including those with padding."""
    out = conv.node.meta["val"]
    return 2.0 * prod(map(hinted, out.shape)) * prod(map(hinted, conv.weight.meta["val"].shape[1:]))


@dataclass(frozen=True)
class ConvShare:
    """How much of a graph's work its convolutions are.

    Attributes:
        flops: Floating-point operations in convolutions over those in convolutions, matrix products and attention,
            0 to 1. Backward operators and the bodies of higher-order operators are included.
        bytes: Bytes that convolutions read and write over those of all calls that return tensors, 0 to 1. Fusion
            saves bytes around pointwise calls, so this is a lower bound.
    """

    flops: float
    bytes: float


def conv_share(graph: Graph) -> ConvShare:
    """The share of convolutions in the arithmetic and in the memory traffic of *graph*.

    `is_conv_heavy` counts nodes, and calls a transformer of 9,000 nodes with 31 small convolutions heavy. This function
    weighs each node by its work.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> x, w, m = torch.ones(1, 8, 32, 32), torch.ones(8, 8, 3, 3), torch.ones(32, 32)
        >>> conv_share(make_fx(lambda x, w: torch.conv2d(x, w))(x, w).graph).flops
        1.0
        >>> conv_share(make_fx(lambda x, m: x @ m)(x, m).graph)
        ConvShare(flops=0.0, bytes=0.0)
    """
    arithmetic, traffic = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    for node in all_nodes(graph):
        # What a higher-order operator reads and writes is counted in its bodies; getitem moves no data.
        if node.op == "call_function" and node.target is not operator.getitem:
            kind = is_convolution(node)
            arithmetic[kind] += flops(node)
            if (written := _bytes(node)) and not any(map(body_of, node.all_input_nodes)):
                traffic[kind] += written + sum(map(_bytes, node.all_input_nodes))
    return ConvShare(_share(arithmetic), _share(traffic))


def _share(amounts: dict[bool, float]) -> float:
    return amounts[True] / (sum(amounts.values()) or 1.0)


def _bytes(node: Node) -> int:
    return sum(prod(map(hinted, value.shape)) * value.dtype.itemsize for value in tensors(node))
