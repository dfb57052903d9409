# SPDX-License-Identifier: Apache-2.0
"""Find the first operator whose compiled result, or gradient, differs from eager.

The graph is cut behind an operator: what is before the cut is compiled for itself and compared with eager; for
gradients, what is after it. Halving finds the shortest part that is wrong, and the operator at its cut is to blame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from magi_backend import _torch_compat

from .check import differences_between


if TYPE_CHECKING:
    from .check import Function

Compile = Callable[[GraphModule], "Function"]


def first_operator(gm: GraphModule, args: tuple[Any, ...], compile_part: Compile, *, gradients: bool) -> str:
    """A sentence on the first operator of *gm* that differs, on inputs *args*."""
    calls = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    if gradients:
        culprit = _halve(list(reversed(calls)), lambda node: _tail_differs(gm, node, args, compile_part))
    else:
        culprit = _halve(calls, lambda node: _head_differs(gm, node, args, compile_part))
    if culprit is None:
        return "No part of it differs when it is compiled for itself, so it takes the whole piece to go wrong."
    direction = " on the way back from the outputs" if gradients else ""
    return f"The first operator that differs{direction} is {_describe(culprit)}."


def _halve(calls: list[Node], differs: Callable[[Node], bool]) -> Node | None:
    """The first of *calls* up to which a part differs, if longer parts of a part that differs do too."""
    if not calls or not differs(calls[-1]):
        return None
    low, high = 0, len(calls) - 1
    while low < high:
        middle = (low + high) // 2
        if differs(calls[middle]):
            high = middle
        else:
            low = middle + 1
    return calls[high]


def _head_differs(gm: GraphModule, last: Node, args: tuple[Any, ...], compile_part: Compile) -> bool:
    """Whether the part of *gm* that ends with *last* computes another value of it when compiled."""
    head, known = Graph(), dict[Node, Node]()
    for node in gm.graph.nodes:
        known[node] = head.node_copy(node, known.__getitem__)
        if node is last:
            break
    used = len(head.find_nodes(op="placeholder"))
    head.output(_tensors_of(known[last], head))
    return _differs(GraphModule(gm, head), args[:used], compile_part)


def _tail_differs(gm: GraphModule, first: Node, args: tuple[Any, ...], compile_part: Compile) -> bool:
    """Whether the part of *gm* that starts with *first* has other gradients, of what enters it, when compiled."""
    nodes = list(gm.graph.nodes)
    tail_nodes = nodes[nodes.index(first) :]
    inside = set(tail_nodes)
    entering = list(dict.fromkeys(n for node in tail_nodes for n in node.all_input_nodes if n not in inside))
    values = _values(gm, args, entering)
    tail, known = Graph(), dict[Node, Node]()
    for node in entering:
        known[node] = tail.node_copy(node) if node.op == "get_attr" else tail.placeholder(node.name)
    for node in tail_nodes:
        known[node] = tail.node_copy(node, known.__getitem__)
    inputs = tuple(
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
        for node, value in zip(entering, values, strict=True)
        if node.op != "get_attr"
    )
    return _differs(GraphModule(gm, tail), inputs, compile_part)


def _values(gm: GraphModule, args: tuple[Any, ...], wanted: list[Node]) -> list[Any]:
    """The eager values of *wanted* nodes."""
    found: dict[Node, Any] = {}

    class Recorder(Interpreter):
        def run_node(self, node: Node) -> Any:
            found[node] = super().run_node(node)
            return found[node]

    copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in args]
    Recorder(gm, garbage_collect_values=False).run(*copies)
    return [found[node] for node in wanted]


def _tensors_of(node: Node, graph: Graph) -> tuple[Node, ...]:
    """The output of a part that ends with *node*: the tensor, or the items of a tuple."""
    value = node.meta.get("example_value")
    if isinstance(value, tuple | list):
        return tuple(graph.call_function(_item, (node, index)) for index in range(len(value)))
    return (node,)


def _item(values: Any, index: int) -> Any:
    return values[index]


def _differs(part: GraphModule, inputs: tuple[Any, ...], compile_part: Compile) -> bool:
    compiled = compile_part(_torch_compat.graph_copy(part))
    return any(not difference.agrees for difference in differences_between(compiled, part, inputs))


def _describe(node: Node) -> str:
    """The operator, and the innermost line of user code that called it."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    calls = [index for index, line in enumerate(lines) if line.startswith("File ")]
    if not calls:
        return f"{target} (node {node.name})"
    where, code = lines[calls[-1]], lines[calls[-1] + 1 :][:1]
    return f"{target} (node {node.name}), {where}: {' '.join(code)}"
