# SPDX-License-Identifier: Apache-2.0
"""In which order Inductor runs kernels so that little memory is in use at a time.

Run on torch 2.11 and 2.13, read in 2.10 and 2.12.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace as with_changes
from typing import Any

from .kernels import install_lock, replace


def install_orders(memo_of_current: Callable[[], dict[Any, Any] | None]) -> None:
    """Repair how Inductor orders kernels for a small peak of memory, where *memo_of_current* returns a dict.

    `reorder_for_peak_memory` (torch/_inductor/memory.py) tries several orders, estimates the peak of each, and takes
    the best. It counts the parts of a concatenation as memory of their own, and then the concatenation once more, so
    parts that are copied from inputs, such as the frames that a causal decoder kept, seem to cost little at the
    beginning of the program, where they allocate all that is joined. Here memory that is joined is counted once, from
    the first part that is written to the last use of any.

    The copies of outputs come last, where what they read is kept until then. Of the orders that torch tries, the one
    that copies them early writes other copies early, too. Here `order_that_frees` is tried as well.
    """
    from torch._inductor import memory

    with install_lock:
        if not hasattr(memory.compute_memory_timeline, "__wrapped__"):
            replace(memory, "compute_memory_timeline", _count_what_is_joined_once, memo_of_current)
            replace(memory, "reorder_for_peak_memory", _try_to_free_early, memo_of_current)


def _count_what_is_joined_once(timeline: Any, _memo: Any, nodes: Any, freeable: Any, outputs: Any) -> Any:
    found, *rest = timeline(nodes, freeable, outputs)
    memory_of = _memories()
    places: dict[str, list[Any]] = {}
    for each in found:
        places.setdefault(memory_of(each.buffer), []).append(each)
    counted = []
    for group in places.values():
        ends = [each.end_step for each in group]
        # An output is kept, which is written as -1.
        end, start = -1 if -1 in ends else max(ends), min(each.start_step for each in group)
        whole = max(group, key=lambda each: each.size_alloc)
        counted.append(with_changes(whole, start_step=start, end_step=end))
    return counted, *rest


def _try_to_free_early(reorder: Any, _memo: Any, *args: Any, **kwargs: Any) -> Any:
    methods = inspect.signature(reorder).parameters["methods"].default
    return reorder(*args, **{"methods": [*methods, order_that_frees], **kwargs})


def _memories() -> Callable[[Any], str]:
    """A function of a buffer: the name of the concatenation that it is a part of, or else its own."""
    from torch._inductor.ir import ConcatKernel, NonOwningLayout
    from torch._inductor.virtualized import V

    found: dict[str, str] = {}
    for buffer in V.graph.scheduler.name_to_buf.values():
        if isinstance(buffer.node, ConcatKernel):
            parts: list[Any] = buffer.node.inputs  # type: ignore[assignment]
            owned = [part.get_name() for part in parts if isinstance(part.layout, NonOwningLayout)]
            found |= dict.fromkeys(owned, buffer.get_name())
    return lambda buffer: found.get(buffer.get_name(), buffer.get_name())


def order_that_frees(nodes: Sequence[Any]) -> list[Any]:
    """*nodes* in their order, but each that frees as much as it allocates as soon as what it reads is there."""
    memory_of = _memories()
    sizes: dict[str, int] = {}
    users: dict[str, set[Any]] = {}
    for node in nodes:
        for buffer in (*node.get_outputs(), *node.mpi_node.pred_buffers):
            sizes[buffer.get_name()] = buffer.mpi_buffer.size_free
            users.setdefault(memory_of(buffer), set()).update(buffer.mpi_buffer.succ_nodes)
    waits_for = {node: set(node.mpi_node.pred_nodes) for node in nodes}
    order: dict[Any, None] = {}

    def freed(node: Any) -> int:
        last_used = {name for name in map(memory_of, node.mpi_node.pred_buffers) if users[name] == {node}}
        return sum(sizes.get(name, 0) for name in last_used)

    def run(node: Any) -> None:
        todo = [node]
        while todo:
            each = todo.pop()
            if each in order:
                continue
            order[each] = None
            after = list(each.mpi_node.succ_nodes)
            for one in after:
                waits_for[one].discard(each)
            for name in map(memory_of, each.mpi_node.pred_buffers):
                users[name].discard(each)
                after += users[name] if len(users[name]) == 1 else ()
            todo += [
                one for one in after if not waits_for[one] and one not in order and freed(one) >= one.mpi_node.size
            ]

    for node in nodes:
        run(node)
    return list(order)
