# SPDX-License-Identifier: Apache-2.0
"""Nodes and graphs: questions about them, convolutions read into plain numbers, nodes written back, and their work.

Nodes are written with the fake values that Inductor and later passes read. The work is the multiplications and
additions at the sizes that a graph is compiled for. The table of torch (`torch.utils.flop_counter`) compares sizes and
raises if they differ, as symbols that depend on data do. It also lacks the operators of mkldnn and matrix-vector
products.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import has_free_symbols, statically_known_true

from magi_passes import _torch_compat


aten = torch.ops.aten


def hinted(extent: Any) -> int:
    """*extent* as an int: for a symbol, its value for the example inputs; for an unbacked symbol, 1."""
    if isinstance(extent, int):
        return extent
    return int(extent.node.hint) if extent.node.has_hint() else 1


def captured_value(node: Node) -> Any:
    """What *node* of a captured graph stands for, by Dynamo's name for it or by that of torch.export."""
    return node.meta.get("example_value", node.meta.get("val"))


def flaw_of(graph: Graph) -> str | None:
    """What is wrong with the structure of *graph*, in words; None if nothing is.

    Nodes may be in any order, because Inductor sorts them after its hooks; only a cycle of nodes cannot be sorted. It
    takes a third of the time of `Graph.lint`, which requires sorted nodes.
    """
    outputs = [node for node in graph.nodes if node.op == "output"]
    if len(outputs) != 1:
        return f"it has {len(outputs)} output nodes instead of one"
    seen: set[Node] = set()
    is_sorted = True
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            if operand not in seen:
                is_sorted = False
                if _torch_compat.compiling.is_erased(operand):
                    return f"{node.name} reads {operand.name}, which was erased"
                if operand.graph is not graph:
                    return f"{node.name} reads {operand.name}, which is a node of another graph"
        if node.op == "get_attr" and graph.owning_module is not None and _attribute_of(node, _NONE) is _NONE:
            return f"{node.name} reads the attribute {node.target!r}, which the module of the graph does not have"
        seen.add(node)
    if not is_sorted:
        try:
            TopologicalSorter({node: node.all_input_nodes for node in graph.nodes}).prepare()
        except CycleError as error:
            return f"{error.args[1][0].name} depends on its own result"
    return None


_NONE = object()


def _attribute_of(node: Node, default: object = None) -> Any:
    """What the target of *node* names in the module of its graph; *default* if there is no such attribute."""
    try:
        return operator.attrgetter(str(node.target))(node.graph.owning_module)
    except AttributeError:
        return default


# Operators that convolve, by the last part of their name: convolution, conv2d, _convolution_pointwise, qconv_pointwise,
# conv_transpose3d, convolution_backward, cudnn_convolution_add_relu; not convert_element_type.
_CONVOLUTION = re.compile(r"(?:^|_)q?conv(?:olution|[123]d|_|$)")
_ONLY_PREPARES_WEIGHTS = re.compile(r"reorder|prepack|unpack")
_COLLECTIVES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor")
_NAMESPACES = ("aten", "prims", "mkldnn", "onednn", "quantized")


def is_dynamic(graph: Graph) -> bool:
    """Whether a placeholder of *graph* carries a free symbol.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> traced = make_fx(lambda x: x.relu(), tracing_mode="symbolic")(torch.ones(4, 6))
        >>> is_dynamic(traced.graph)
        True
        >>> is_dynamic(make_fx(lambda x: x.relu(), tracing_mode="fake")(torch.ones(4, 6)).graph)
        False
    """
    return any(
        node.op == "placeholder" and has_free_symbols(node.meta["val"])
        for node in graph.nodes
        if isinstance(node.meta.get("val"), (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
    )


def is_convolution(node: Node) -> bool:
    """Whether *node* calls a convolution: forward, transposed or backward, of ATen, mkldnn or quantized operators."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):  # noqa: SLF001
        return False
    namespace, _, name = target._schema.name.partition("::")  # noqa: SLF001
    return (
        namespace in _NAMESPACES
        and _CONVOLUTION.search(name) is not None
        and _ONLY_PREPARES_WEIGHTS.search(name) is None
    )


def is_conv_heavy(graph: Graph, nodes_per_conv: int = 300) -> bool:
    """Whether *graph*, with the bodies in it, has fewer than *nodes_per_conv* nodes for each convolution.

    Inductor uses the same measure (`decide_layout_opt` in torch/_inductor/graph.py). It shows whether there are
    convolutions; `conv_share` says how much of the work they are.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> image, weight = torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3)
        >>> graph = make_fx(lambda x, w: torch.conv2d(x, w).relu())(image, weight).graph
        >>> is_conv_heavy(graph), is_conv_heavy(graph, nodes_per_conv=5)
        (True, False)
    """
    nodes = list(all_nodes(graph))
    return len(nodes) < nodes_per_conv * sum(map(is_convolution, nodes))


def has_collectives(graph: Graph) -> bool:
    """Whether *graph* communicates with other processes, all of which must make the same calls."""
    targets = (node.target for node in all_nodes(graph))
    return any(
        isinstance(target, torch._ops.OpOverload) and target.namespace in _COLLECTIVES  # noqa: SLF001
        for target in targets
    )


def all_nodes(graph: Graph) -> Iterator[Node]:
    """The nodes of *graph*, and of the bodies of its higher-order ops to any depth."""
    for node in graph.nodes:
        yield node
        body = body_of(node)
        if body is not None:
            yield from all_nodes(body.graph)


def body_of(node: Node) -> torch.fx.GraphModule | None:
    """The module that *node* refers to, the body of a higher-order operator or a submodule; None for any other node."""
    body = _attribute_of(node) if node.op in ("get_attr", "call_module") else None
    return body if isinstance(body, torch.fx.GraphModule) else None


@dataclass(frozen=True)
class Convolution:
    """One `aten.convolution.default` that is not transposed, with one number per spatial dimension.

    Attributes:
        node: The call.
        x: Its input, of shape (batch, channels, *space).
        weight: Its weight, of shape (out channels, channels / groups, *kernel).
        bias: Its bias or None.
        stride: One int per spatial dimension, like *padding* and *dilation*.
    """

    node: Node
    x: Node
    weight: Node
    bias: Node | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def kernel(self) -> tuple[int, ...]:
        """The extents of the kernel."""
        return tuple(self.weight.meta["val"].shape[2:])

    @property
    def reach(self) -> tuple[int, ...]:
        """How far each kernel extends beyond its first tap: ``(k - 1) * dilation``."""
        return tuple((k - 1) * d for k, d in zip(self.kernel, self.dilation, strict=True))


def read_convolution(node: Node) -> Convolution | None:
    """*node* as a `Convolution`; None for any other call, and for a transposed, unbatched or not constant one."""
    if node.target is not aten.convolution.default or node.kwargs:
        return None
    arguments: Any = node.args
    x, weight, bias, stride, padding, dilation, transposed, _, groups = arguments
    image, kernel = (getattr(operand, "meta", {}).get("val") for operand in (x, weight))
    if transposed is not False or not isinstance(image, torch.Tensor) or not isinstance(kernel, torch.Tensor):
        return None
    space = kernel.dim() - 2
    # ``padding="same"`` and ``"valid"`` trace to lists of length one, which stand for every dimension.
    lists = [tuple(values) * (space if len(values) == 1 else 1) for values in (stride, padding, dilation)]
    constants = (*kernel.shape, groups, *(n for values in lists for n in values))
    fits = image.dim() == kernel.dim() and all(len(values) == space for values in lists)
    if not fits or not all(type(n) is int for n in constants):
        return None
    return Convolution(node, x, weight, bias, lists[0], lists[1], lists[2], groups)


def convolutions_of(graph: Graph) -> list[Convolution]:
    """The convolutions of *graph* that `read_convolution` can read, in order."""
    return [conv for node in graph.nodes if (conv := read_convolution(node)) is not None]


class Writer:
    """Inserts calls before a node, in a captured or a lowered graph, with the fake values that later passes read.

    Example: ``Writer(node)(aten.relu.default, x)`` is the node of ``x.relu()``.
    """

    def __init__(self, before: Node) -> None:
        self._before = before

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Insert ``target(*args, **kwargs)``, of plain keyword values, and return its node."""
        graph = self._before.graph
        with graph.inserting_before(self._before):
            node = graph.call_function(target, args, kwargs)
        values = torch.fx.node.map_arg(args, captured_value)
        near = [captured_value(x) for x in self._before.all_input_nodes]
        key = "example_value" if "example_value" in self._before.meta else "val"
        node.meta[key] = fake_value(target, values, kwargs, near)
        for key in ("stack_trace", "nn_module_stack", "original_aten", "from_node"):
            if key in self._before.meta:
                node.meta[key] = self._before.meta[key]
        return node

    def after(self, x: Node) -> Writer:
        """A writer that inserts right after *x*, or after the last placeholder when *x* is one."""
        place = x.next
        while place.op == "placeholder":
            place = place.next
        return Writer(place)

    def size(self, x: Node, dim: int) -> Any:
        """The extent of *x* along *dim*: an int, or the node of a symbol."""
        extent = x.meta["val"].shape[dim]
        return extent if isinstance(extent, int) else self(aten.sym_size.int, x, dim)


def fake_value(target: Callable[..., Any], args: Any, kwargs: Any, near: Sequence[Any] = ()) -> Any:
    """``target(*args, **kwargs)`` in the mode of the fake tensors among *args*, or else of those *near*."""
    leaves = torch.utils._pytree.tree_leaves((args, near))  # noqa: SLF001
    mode = next((leaf.fake_mode for leaf in leaves if getattr(leaf, "fake_mode", None) is not None), None)
    if mode is None:
        return target(*args, **kwargs)
    with mode, _torch_compat.compiling.symbolic_dispatch():
        return target(*args, **kwargs)


def replace_by(node: Node, new: Node) -> None:
    """Replace *node* by *new* in all its users, and erase *node* with the nodes that only it used."""
    node.replace_all_uses_with(new)
    new.meta.update({key: value for key, value in node.meta.items() if key not in new.meta})
    todo = [node]
    while todo:
        dead = todo.pop()
        if not dead.users and dead.op == "call_function" and not dead.is_impure():
            inputs = dead.all_input_nodes
            dead.graph.erase_node(dead)
            todo += inputs


CONVERT = torch.ops.prims.convert_element_type.default
_HALVES = (torch.bfloat16, torch.float16)


def is_half_on_cuda(x: torch.Tensor) -> bool:
    """Whether products of *x* have tensor cores, and can be kept in float32: ROCm has no ``out_dtype``."""
    return x.dtype in _HALVES and x.device.type == "cuda" and torch.version.hip is None


def product_in_float32(write: Writer, left: Node, right: Node) -> Node:
    """The product of two matrices, or of batches of matrices; in float32 if they are in half precision."""
    product, x = aten.mm if left.meta["val"].dim() == 2 else aten.bmm, left.meta["val"]
    if is_half_on_cuda(x):
        return write(product.dtype, left, right, torch.float32)
    if x.dtype in _HALVES:
        left, right = (write(CONVERT, each, torch.float32) for each in (left, right))
    return write(product.default, left, right)


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
_OF_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_IMAGES, _WEIGHTS = ("input", "self", "X", "qx"), ("weight", "W", "qw")


def flops(node: Node) -> float:
    """Twice the number of multiplications of a convolution, a matrix product or an attention; 0 for other nodes.

    Operators that read their weights from an opaque object (``quantized::conv2d``), custom operators and Triton kernels
    count as 0, because their work is not known.
    """
    target: Any = node.target
    is_operator = isinstance(target, torch._ops.OpOverload)  # noqa: SLF001
    name = str(target._schema.name if is_operator else getattr(target, "__name__", ""))  # noqa: SLF001
    operands = operands_of(node)
    if name in _PRODUCTS:
        inner = _shape(node.args[_PRODUCTS[name]])
        return 2.0 * sum(prod(hinted_shape(value)) for value in _results(node)[:1]) * (inner[-1] if inner else 0)
    if _ATTENTION.search(name) or _ATTENTION_BEFORE_HEADS.search(name):
        return _attention_flops(name, operands)
    return _convolution_flops(node, name, operands) if is_convolution(node) else 0.0


def _results(node: Node) -> list[torch.Tensor]:
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
    outcome = gradient if is_backward else next(map(hinted_shape, _results(node)), ())
    # Each pixel of the smaller image is multiplied with the kernel once for each channel on the other side.
    places = image if transposed else outcome
    once = 2.0 * prod(places) * prod(weight[1:]) if places and weight else 0.0
    if not is_backward:
        return once
    # The gradients of the image and of the weight take as many multiplications each; that of the bias takes none.
    mask = operands.get("output_mask", (True, True, False))
    return once * sum(map(bool, tuple(mask)[:2]))


def operands_of(node: Node) -> dict[str, Any]:
    """The arguments of *node* by the names in the schema of its operator, or as those of a function for attention."""
    target: Any = node.target
    is_operator = isinstance(target, torch._ops.OpOverload)  # noqa: SLF001
    names = [argument.name for argument in target._schema.arguments] if is_operator else _OF_ATTENTION  # noqa: SLF001
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _shape(operand: Any) -> tuple[int, ...]:
    if not isinstance(operand, torch.fx.Node):
        return ()
    value = operand.meta.get("val")
    if value is None and operand.op == "get_attr":
        # A weight that freezing made is a tensor in the module.
        value = _attribute_of(operand)
    return hinted_shape(value) if isinstance(value, torch.Tensor) else ()


def hinted_shape(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(map(hinted, value.shape))


def is_same_shape(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether the shapes are equal for all sizes."""
    return len(ours) == len(theirs) and all(statically_known_true(a == b) for a, b in zip(ours, theirs, strict=True))


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
    return sum(prod(hinted_shape(value)) * value.dtype.itemsize for value in _results(node))
