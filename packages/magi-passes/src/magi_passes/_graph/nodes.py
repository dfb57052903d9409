# SPDX-License-Identifier: Apache-2.0
"""Nodes and graphs: questions about them, convolutions read into plain numbers, and nodes written back.

Nodes are written with the fake values that Inductor and later passes read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.symbolic_shapes import has_free_symbols

from magi_passes import _torch_compat


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.fx import Graph, Node


aten = torch.ops.aten


def hinted(extent: Any) -> int:
    """*extent* as an int: for a symbol, its value for the example inputs; for an unbacked symbol, 1."""
    return extent if isinstance(extent, int) else _torch_compat.graphs.size_hint(extent)


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
                if _torch_compat.graphs.is_erased(operand):
                    return f"{node.name} reads {operand.name}, which was erased"
                if operand.graph is not graph:
                    return f"{node.name} reads {operand.name}, which is a node of another graph"
        if node.op == "get_attr" and not _has_attribute(graph, str(node.target)):
            return f"{node.name} reads the attribute {node.target!r}, which the module of the graph does not have"
        seen.add(node)
    circle = None if is_sorted else _node_of_a_circle(graph)
    return None if circle is None else f"{circle.name} depends on its own result"


def _has_attribute(graph: Graph, path: str) -> bool:
    owner: object = graph.owning_module
    if owner is None:
        return True
    for name in path.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


def _node_of_a_circle(graph: Graph) -> Node | None:
    """A node of a cycle, which no order of the nodes gives all its operands."""
    waiting = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready = [node for node, count in waiting.items() if count == 0]
    while ready:
        node = ready.pop()
        del waiting[node]
        for user in node.users:
            waiting[user] -= 1
            if waiting[user] == 0:
                ready.append(user)
    return next(iter(waiting), None)


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
    owner = node.graph.owning_module
    if node.op not in ("get_attr", "call_module") or owner is None:
        return None
    body: Any = owner
    for name in str(node.target).split("."):
        body = getattr(body, name, None)
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
    lists = [_per_dimension(values, space) for values in (stride, padding, dilation)]
    constants = (*kernel.shape, groups, *(n for values in lists for n in values))
    if image.dim() != kernel.dim() or () in lists or not all(type(n) is int for n in constants):
        return None
    return Convolution(node, x, weight, bias, lists[0], lists[1], lists[2], groups)


def convolutions_of(graph: Graph) -> list[Convolution]:
    """The convolutions of *graph* that `read_convolution` can read, in order."""
    return [conv for node in graph.nodes if (conv := read_convolution(node)) is not None]


def _per_dimension(values: Iterable[int], space: int) -> tuple[int, ...]:
    """*values*, one for each of *space* dimensions; empty if their number does not fit.

    ``padding="same"`` and ``"valid"`` trace to lists of length one, which stand for every dimension.
    """
    listed = tuple(values)
    if len(listed) == 1:
        return listed * space
    return listed if len(listed) == space else ()


class Writer:
    """Inserts calls before a node, with the fake values that Inductor and later passes read.

    Example: ``Writer(graph, node)(aten.relu.default, x)`` is the node of ``x.relu()``.
    """

    def __init__(self, graph: Graph, before: Node) -> None:
        self._graph, self._before = graph, before

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Insert ``target(*args, **kwargs)``, of plain keyword values, and return its node."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, kwargs)
        node.meta["val"] = fake_value(target, torch.fx.node.map_arg(args, lambda n: n.meta["val"]), kwargs)
        for key in ("stack_trace", "nn_module_stack", "original_aten", "from_node"):
            if key in self._before.meta:
                node.meta[key] = self._before.meta[key]
        return node

    def after(self, x: Node) -> Writer:
        """A writer that inserts right after *x*, or after the last placeholder when *x* is one."""
        place = x.next
        while place.op == "placeholder":
            place = place.next
        return Writer(self._graph, place)

    def size(self, x: Node, dim: int) -> Any:
        """The extent of *x* along *dim*: an int, or the node of a symbol."""
        extent = x.meta["val"].shape[dim]
        return extent if isinstance(extent, int) else self(aten.sym_size.int, x, dim)


def fake_value(target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``target(*args, **kwargs)`` in the mode of the fake tensors among *args*."""
    leaves = torch.utils._pytree.tree_leaves(args)  # noqa: SLF001
    mode = next((leaf.fake_mode for leaf in leaves if getattr(leaf, "fake_mode", None) is not None), None)
    if mode is None:
        return target(*args, **kwargs)
    with mode, _torch_compat.graphs.symbolic_dispatch():
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
