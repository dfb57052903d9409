# SPDX-License-Identifier: Apache-2.0
"""A captured graph cut into parts, each of which computes from eager values.

A part that differs from eager is itself wrong, because errors of earlier operators never reach it. All parts of one cut
are side by side in one graph, so that they cost one compilation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from magi_backend import _torch_compat

from .copies import alone, copy_inputs, state_of
from .trees import leaves_of, with_leaves


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Unit = tuple[Node, ...]
"""Calls that a cut cannot separate; nearly always a single one."""


@dataclass(frozen=True)
class Part:
    """Consecutive calls of a graph.

    Attributes:
        nodes: The calls, in order.
        before: Calls before the part that switch on a mode, such as autocast, that is still on where the part starts.
        entering: The values that it reads but does not compute.
        leaving: Those of its values that are read after it.
    """

    nodes: tuple[Node, ...]
    before: tuple[Node, ...]
    entering: tuple[Node, ...]
    leaving: tuple[Node, ...]


def units(gm: GraphModule) -> tuple[Unit, ...]:
    """The calls of *gm* in order, grouped if they cannot be separated.

    An item of a tuple is grouped with the call that made the tuple, if it follows directly. Calls between two calls
    that open and close a level of ``torch.func`` form one group.
    """
    found: list[list[Node]] = []
    depth = 0
    for node in gm.graph.nodes:
        if not node.op.startswith("call_"):
            continue
        opened = _torch_compat.nesting(node)
        if found and (depth or _is_item_of(node, found[-1])):
            found[-1].append(node)
        else:
            found.append([node])
        depth += opened
    return tuple(map(tuple, found))


def _is_item_of(node: Node, unit: list[Node]) -> bool:
    return _torch_compat.is_item(node) and node.args[0] in unit


def part_of(gm: GraphModule, chosen: Iterable[Unit]) -> Part:
    """The part of *gm* that consists of *chosen*, which must be consecutive."""
    nodes = tuple(node for unit in chosen for node in unit)
    inside = set(nodes)
    read = dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inside)
    before = tuple(_modes_on(gm, nodes[0]))
    entering = tuple(node for node in read if node not in before)
    leaving = tuple(node for node in nodes if not node.users or any(user not in inside for user in node.users))
    return Part(nodes, before, entering, tuple(node for node in leaving if _holds_tensors(node)))


def _modes_on(gm: GraphModule, first: Node) -> Iterator[Node]:
    """The calls before *first* that switched on a mode that is still on at *first*."""
    grad_mode = None
    regions: dict[Node, None] = {}
    for node in gm.graph.nodes:
        if node is first:
            break
        if _torch_compat.sets_grad_mode(node):
            grad_mode = node
        elif _torch_compat.enters_autocast(node):
            regions[node] = None
        elif _torch_compat.leaves_autocast(node):
            regions.pop(node.args[0], None)
    if grad_mode is not None:
        yield grad_mode
    yield from regions


def _holds_tensors(node: Node) -> bool:
    leaves = pytree.tree_leaves(node.meta.get("example_value"))
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves)


def side_by_side(gm: GraphModule, parts: Sequence[Part], entered: Sequence[Entered]) -> GraphModule:
    """One graph with a copy of each of *parts*.

    Its inputs are the values that *entered* them, its output a tuple for each.
    """
    graph = Graph()
    given = [
        {node: graph.placeholder(f"part{index}_{node.name}") for node in _given(part)}
        for index, part in enumerate(parts)
    ]
    outputs = []
    for part, known, each in zip(parts, given, entered, strict=True):
        # A compiled graph that writes to an input cannot always differentiate it, although it could inside a larger
        # graph.
        copied = [node for node, place in zip(_given(part), each.copied, strict=True) if place]
        known |= {node: graph.call_method("clone", (known[node],)) for node in copied}
        outputs.append((*_copied(part, known, graph), *(known[node] for node in copied)))
    graph.output(tuple(outputs))
    return GraphModule(gm, graph)


def _given(part: Part) -> tuple[Node, ...]:
    """The values that enter *part* as inputs; constants of the graph are copied with the part."""
    return tuple(node for node in part.entering if node.op != "get_attr")


def _copied(part: Part, known: dict[Node, Node], graph: Graph) -> tuple[Any, ...]:
    for node in (*(node for node in part.entering if node.op == "get_attr"), *part.before, *part.nodes):
        known[node] = graph.node_copy(node, known.__getitem__)
    outputs = tuple(_tensors_in(known[node], node.meta.get("example_value"), graph) for node in part.leaving)
    for node in reversed((*part.before, *part.nodes)):
        closed = any(_torch_compat.leaves_autocast(user) and user in known for user in node.users)
        if _torch_compat.enters_autocast(node) and not closed:
            graph.call_function(_torch_compat.leave_autocast(), (known[node],))
    if any(_torch_compat.sets_grad_mode(node) for node in (*part.before, *part.nodes)):
        graph.call_function(_torch_compat.set_grad_mode(), (torch.is_grad_enabled(),))
    return outputs


def _tensors_in(node: Node, value: Any, graph: Graph) -> Any:
    """*node*, or its items if it is a tuple, because a compiled graph returns only tensors."""
    if not isinstance(value, tuple | list):
        return node
    items = (graph.call_function(_item, (node, index)) for index in range(len(value)))
    return tuple(_tensors_in(item, each, graph) for item, each in zip(items, value, strict=True))


def _item(values: Any, index: int) -> Any:
    return values[index]


@dataclass(frozen=True)
class Entered:
    """The values that entered a part.

    Attributes:
        values: The values as they were when the part started, detached from any autograd graph.
        copied: For each, whether the part works on a copy of it, which is then one of its outputs.
    """

    values: tuple[Any, ...]
    copied: tuple[bool, ...]


def entering_values(gm: GraphModule, args: tuple[Any, ...], parts: Sequence[Part]) -> tuple[Entered, ...]:
    """The values that enter each of *parts* when *gm* runs eager on a copy of *args*."""
    recorder = _Recorder(gm, parts)
    recorder.run(*copy_inputs(args).values)
    return tuple(recorder.entered(index) for index in range(len(parts)))


class _Recorder(Interpreter):
    """Runs a graph, and keeps the values that enter each of *parts*."""

    def __init__(self, gm: GraphModule, parts: Sequence[Part]) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self._parts = parts
        self._values: dict[int, tuple[Any, ...]] = {}
        self._copies: dict[int, tuple[Any, ...]] = {}
        self._states: dict[int, list[object]] = {}
        self._written: set[int] = set()

    def run_node(self, node: Node) -> Any:
        for index, part in enumerate(self._parts):
            if node is part.nodes[0]:
                self._values[index] = tuple(self.env[each] for each in _given(part))
                self._copies[index] = copy_inputs(self._values[index]).values
                self._states[index] = _states(self._values[index])
        value = super().run_node(node)
        for index, part in enumerate(self._parts):
            if node is part.nodes[-1] and _states(self._values[index]) != self._states[index]:
                self._written.add(index)
        return value

    def entered(self, index: int) -> Entered:
        """The values that entered part *index*, which require gradients like the originals.

        Values that share memory share it here only if the part writes, because gradients through shared memory cannot
        be told apart.
        """
        written = index in self._written
        pairs = zip(leaves_of(self._copies[index]), leaves_of(self._values[index]), strict=True)
        leaves = iter([_entered(twin, value, written=written) for (_, twin), (_, value) in pairs])
        values = tuple(with_leaves(self._copies[index], lambda _: next(leaves)))
        for node, value in zip(_given(self._parts[index]), values, strict=True):
            _fix_sizes(value, node.meta.get("example_value"))
        sharing = Counter(_torch_compat.storage_id(leaf) for _, leaf in leaves_of(values) if _is_tensor(leaf))
        copied = (
            written and _is_tensor(value) and value.requires_grad and sharing[_torch_compat.storage_id(value)] == 1
            for value in values
        )
        return Entered(values, tuple(copied))


def _states(values: tuple[Any, ...]) -> list[object]:
    return [state_of(leaf) for _, leaf in leaves_of(values) if _is_tensor(leaf)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _entered(twin: Any, value: Any, *, written: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return twin
    return (twin.detach() if written else alone(twin)).requires_grad_(value.requires_grad)


def _fix_sizes(value: Any, captured: Any) -> None:
    """Make the compiler treat those sizes of *value* as constants that were constants in the capture."""
    if isinstance(value, torch.Tensor) and isinstance(captured, torch.Tensor):
        for dim, size in enumerate(captured.shape):
            if isinstance(size, int):
                _torch_compat.fix_size(value, dim)
