# SPDX-License-Identifier: Apache-2.0
"""What makes a graph impossible to compile, whatever its operators do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magi_passes import _torch_compat


if TYPE_CHECKING:
    from torch.fx import Graph, Node


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
                if _torch_compat.is_erased(operand):
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
