# SPDX-License-Identifier: Apache-2.0
"""How much work a graph is: the multiplications and additions of its nodes, at the sizes it is compiled for.

The table of torch (`torch.utils.flop_counter`) compares sizes and raises if they differ, as symbols that depend on data
do. It also lacks the operators of mkldnn and matrix-vector products.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from .nodes import Convolution, all_nodes, body_of, hinted, is_convolution


if TYPE_CHECKING:
    from torch.fx import Graph, Node


# The position of the first factor, whose last dimension is summed over.
_PRODUCTS = {
    **dict.fromkeys(
        ("aten::mm", "aten::bmm", "aten::mv", "aten::dot", "aten::vdot", "aten::linear", "aten::matmul"), 0
    ),
    **dict.fromkeys(("aten::_int_mm", "aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_grouped_mm"), 0),
    **dict.fromkeys(("aten::_weight_int8pack_mm", "aten::_weight_int4pack_mm", "aten::_weight_int4pack_mm_for_cpu"), 0),
    **dict.fromkeys(("mkldnn::_linear_pointwise", "mkl::_mkl_linear", "onednn::qlinear_pointwise"), 0),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::addmv", "aten::_addmm_activation"), 1),
}
# Attention with the sequence before the last dimension, or before the heads.
_ATTENTION = re.compile(r"(?:^|::)(?:_?scaled_dot_product_\w*attention|flex_attention)")
_ATTENTION_BEFORE_HEADS = re.compile(r"::_(?:flash|efficient)_attention_(?:forward|backward)$")
_IMAGES, _WEIGHTS = ("input", "self", "X", "qx"), ("weight", "W", "qw")


def flops(node: Node) -> float:
    """Twice the number of multiplications of a convolution, a matrix product or an attention; 0 for other nodes.

    Operators that read their weights from an opaque object (``quantized::conv2d``), custom operators and Triton kernels
    count as 0, because their work is not known.
    """
    operands = _operands(node)
    name = _name(node)
    if name in _PRODUCTS:
        inner = _shape(node.args[_PRODUCTS[name]])
        return 2.0 * sum(map(prod, results(node)[:1])) * (inner[-1] if inner else 0)
    if _ATTENTION.search(name) or _ATTENTION_BEFORE_HEADS.search(name):
        return _attention_flops(name, operands)
    return _convolution_flops(node, name, operands) if is_convolution(node) else 0.0


def results(node: Node) -> list[tuple[int, ...]]:
    """The shapes of the tensors that *node* returns, in order."""
    return [_hinted_shape(value) for value in tensors(node)]


def tensors(node: Node) -> list[torch.Tensor]:
    """The tensors that *node* returns: one, several or none."""
    value = node.meta.get("val")
    several = value if isinstance(value, (tuple, list)) else (value,)
    return [item for item in several if isinstance(item, torch.Tensor)]


def _attention_flops(name: str, operands: dict[str, Any]) -> float:
    query, key = (_shape(operands.get(which)) for which in ("query", "key"))
    if len(query) < 3 or len(key) < 3:
        return 0.0
    sequence = key[-3] if _ATTENTION_BEFORE_HEADS.search(name) else key[-2]
    # Two products of queries with a sequence in the forward graph, five in the backward graph.
    return (10.0 if "backward" in name else 4.0) * prod(query) * sequence


def _convolution_flops(node: Node, name: str, operands: dict[str, Any]) -> float:
    weight = next((shape for which in _WEIGHTS if (shape := _shape(operands.get(which)))), ())
    image = next((shape for which in _IMAGES if (shape := _shape(operands.get(which)))), ())
    transposed = bool(operands.get("transposed", "transpose" in name))
    is_backward = "backward" in name
    gradient = _shape(operands.get("grad_output", operands.get("gO")))
    outcome = gradient if is_backward else next(iter(results(node)), ())
    # Each pixel of the smaller image is multiplied with the kernel once for each channel on the other side.
    places = image if transposed else outcome
    once = 2.0 * prod(places) * prod(weight[1:]) if places and weight else 0.0
    if not is_backward:
        return once
    # The gradients of the image and of the weight take as many multiplications each; that of the bias takes none.
    mask = operands.get("output_mask", (True, True, False))
    return once * sum(map(bool, tuple(mask)[:2]))


def _name(node: Node) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):  # noqa: SLF001
        return str(target._schema.name)  # noqa: SLF001
    return str(getattr(target, "__name__", ""))


def _operands(node: Node) -> dict[str, Any]:
    """The arguments of *node* by the names in its schema."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):  # noqa: SLF001
        names = [argument.name for argument in target._schema.arguments]  # noqa: SLF001
    else:
        names = ["query", "key", "value"]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _shape(operand: Any) -> tuple[int, ...]:
    if not isinstance(operand, torch.fx.Node):
        return ()
    value = operand.meta.get("val")
    if value is None and operand.op == "get_attr":
        # A weight that freezing made is a tensor in the module.
        value = getattr(operand.graph.owning_module, str(operand.target), None)
    return _hinted_shape(value) if isinstance(value, torch.Tensor) else ()


def _hinted_shape(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(map(hinted, value.shape))


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
