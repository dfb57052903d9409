# SPDX-License-Identifier: Apache-2.0
"""Recomputed loop bodies keep their dependence on the last write to a buffer (torch < 2.14).

``SchedulerNode.recompute_size_and_body``, which the C++ backend calls to fuse loops, reads the dependences of a
node again from its body, where a mutated buffer has its first name, and renames them only if the node has fake
dependences. So a reader of ``index_put_``'s result no longer waits for it, and the two functions that order the nodes
may put it first. To find out whether they would have, they are called with the dependences that torch had kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._defect import Defect
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


NAME = "keep_mutation_order"

_LOST = "_magi_lost_reads"
"""The attribute of a repaired node: its current dependences, and the reads that torch had kept."""


def _repaired_parts(node: Any) -> list[Any]:
    """The nodes fused into *node* whose dependences were set by the repair."""
    return [part for part in node.get_nodes() if part.__dict__.get(_LOST, (None,))[0] is part.read_writes]


def _unrepaired(node: Any, parts: Sequence[Any]) -> Any:
    """The names that *node* would wait for if its *parts* had the reads that torch had kept."""
    others = [part for part in node.get_nodes() if part not in parts]
    gained = {dep for part in parts for dep in part.read_writes.reads} - {
        dep for part in others for dep in part.read_writes.reads
    }
    kept = [dep for dep in node.unmet_dependencies if dep not in gained]
    inside, available = set(node.get_buffer_names()), node.scheduler.available_buffer_names
    lost = [dep for part in parts for dep in part.__dict__[_LOST][1]]
    return type(node.unmet_dependencies)(
        [*kept, *(dep for dep in lost if dep.name not in inside and dep.name not in available)]
    )


def _misplaced(order: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
    """Those of *parts* that read a buffer before it is written in this *order*."""
    places = {name: place for place, node in enumerate(order) for name in node.get_buffer_names()}
    at = {part: place for place, node in enumerate(order) for part in node.get_nodes()}
    return [part for part in parts if any(places.get(dep.name, -1) > at[part] for dep in part.read_writes.reads)]


def _report_misplaced(nodes: Sequence[Any], order: Callable[[], Sequence[Any]]) -> None:
    """Report each repaired node that would be ahead of a write in *order*, the order without the repair."""
    repaired = {node: parts for node in nodes if (parts := _repaired_parts(node))}
    if not repaired:
        return
    right = {node: node.unmet_dependencies for node in repaired}
    try:
        for node, parts in repaired.items():
            node.unmet_dependencies = _unrepaired(node, parts)
        unrepaired = order()
    finally:
        for node, dependences in right.items():
            node.unmet_dependencies = dependences
    for part in _misplaced(unrepaired, [part for parts in repaired.values() for part in parts]):
        report(NAME)
        del part.__dict__[_LOST]  # each node is reported once


def patch() -> None:
    """Rename the dependences, and wrap the functions that order the nodes."""
    from torch._inductor import memory
    from torch._inductor.scheduler import Scheduler, SchedulerNode

    def renaming(original: Callable[..., None]) -> Callable[..., None]:
        def recompute_size_and_body(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if not is_active(NAME) or not self.mutation_renames:
                return
            lost = self.read_writes
            renamed = lost.rename(self.mutation_renames)
            if renamed != lost:
                self.set_read_writes(renamed)
                self.__dict__[_LOST] = (self.read_writes, lost.reads)

        return recompute_size_and_body

    def topological(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def topological_sort_schedule(self: Any, nodes: list[Any]) -> list[Any]:
            if is_active(NAME):
                _report_misplaced(nodes, lambda: original(self, nodes))
            return original(self, nodes)

        return topological_sort_schedule

    def peak_memory(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def reorder_for_peak_memory(nodes: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
            if is_active(NAME):
                _report_misplaced(nodes, lambda: original(nodes, *args, **kwargs))
            return original(nodes, *args, **kwargs)

        return reorder_for_peak_memory

    replace(SchedulerNode, "recompute_size_and_body", renaming)
    replace(Scheduler, "topological_sort_schedule", topological)
    replace(memory, "reorder_for_peak_memory", peak_memory)


DEFECT = Defect(
    name=NAME,
    effect="on a CPU, gradients through upsampling and other scatter-adds are silently zero",
    severity="wrong code",
    since=(2, 13, 0),
    fixed=(2, 14, 0),
    repair="a kernel that reads a mutated buffer waits for the mutation",
    patch=patch,
)
