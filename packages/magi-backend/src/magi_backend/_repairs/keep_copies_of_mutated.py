# SPDX-License-Identifier: Apache-2.0
"""A copy is kept if its source changes before the last reader of the copy (torch >= 2.10).

``remove_noop_ops`` replaces a copy (``clone``, ``copy``, a ``slice_scatter`` of everything, ...) by its source. The
graph writes into its inputs at its end, and what reads the copy after that write, such as the write into another input,
reads the changed source. So does an operator that mutates the source and reads the copy, or the other way round.
Upstream: pytorch #198131 and #198031.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._aliases import Memory, is_copy_into, is_view, mutable_arguments, other_arguments, reads, storage_of, twin_of
from ._defect import Defect
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import Graph, Node


NAME = "keep_copies_of_mutated"


def _kept(*args: Any, **kwargs: Any) -> None:
    """The target of a copy while torch removes the others."""


def _removed_copies(graph: Graph, original: Callable[[Graph], None]) -> list[Node]:
    """The nodes that *original* would replace by their sources, which have another storage."""
    twin, twins = twin_of(graph)
    original(twin)
    left = set(twin.nodes)
    return [node for node in graph.nodes if twins[node] not in left and not is_view(node) and storage_of(node)]


def _source(copy: Node) -> Node:
    """What `remove_noop_ops` puts in the place of *copy*."""
    from torch._inductor.fx_passes.post_grad import noop_registry

    source = noop_registry[copy.target][1]
    return copy.args[source] if isinstance(source, int) else source(copy.args)  # type: ignore[return-value]


def _writes(node: Node) -> Iterator[tuple[Node, list[Node]]]:
    """The tensors that *node* may write to, each with those that it reads meanwhile."""
    if is_copy_into(node):
        yield node.args[0], [node.args[1]]  # type: ignore[misc, list-item]
    for _, tensor, _ in mutable_arguments(node):
        yield tensor, other_arguments(node)


def _needed(graph: Graph, memory: Memory) -> set[Node]:
    """Those of the copies merged in *memory* without which a node would read another value."""
    needed: set[Node] = set()
    overwritten: set[int | None] = set()
    for node in graph.nodes:
        for read in reads(node):
            storage = storage_of(read)
            if memory.root(storage) in overwritten - {storage}:
                needed.add(memory.why[storage])
        for written, others in _writes(node):
            storage = storage_of(written)
            for other in others:
                read_storage = storage_of(other)
                if (
                    storage != read_storage
                    and memory.root(storage) == memory.root(read_storage)
                    and not memory.are_apart(written.meta["val"], other.meta["val"])
                    and not (is_copy_into(node) and memory.are_same(written.meta["val"], other.meta["val"]))
                ):
                    needed.add(memory.why[read_storage if read_storage in memory.why else storage])
        if is_copy_into(node) and memory.root(storage_of(node.args[1])) != storage_of(node.args[0]):
            overwritten.add(storage_of(node.args[0]))
    return needed


def _copies_to_keep(graph: Graph, original: Callable[[Graph], None]) -> set[Node]:
    if not any(next(_writes(node), None) for node in graph.nodes):
        return set()
    copies = _removed_copies(graph, original)
    kept: set[Node] = set()
    while True:
        memory = Memory()
        for copy in copies:
            if copy not in kept:
                memory.merge(copy, _source(copy), copy)
        needed = _needed(graph, memory)
        if not needed:
            return kept
        kept |= needed


def patch() -> None:
    """Keep such copies."""
    from torch._inductor.fx_passes import post_grad

    def make(original: Callable[[Graph], None]) -> Callable[[Graph], None]:
        def remove_noop_ops(graph: Graph) -> None:
            if not is_active(NAME):
                original(graph)
                return
            targets = {copy: copy.target for copy in _copies_to_keep(graph, original)}
            if targets:
                report(NAME)
            for copy in targets:
                copy.target = _kept
            try:
                original(graph)
            finally:
                for copy, target in targets.items():
                    copy.target = target

        return remove_noop_ops

    replace(post_grad, "remove_noop_ops", make)


DEFECT = Defect(
    name=NAME,
    effect="a copy of a tensor that is changed in place afterwards, or by the operator that reads the copy, has the "
    "changed elements",
    severity="wrong code",
    since=(2, 10, 0),
    fixed=None,
    repair="the copy is kept where its source changes before its last reader",
    patch=patch,
    is_of_joint_graphs=True,
)
