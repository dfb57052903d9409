# SPDX-License-Identifier: Apache-2.0
"""A defect of the pass that lets operators write into their arguments: what it decided on, and who still reads that."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ._defect import Defect, report
from .aliases import (
    Walk,
    is_copy_into,
    mutable_arguments,
    renew_views,
    returned_together,
    storage_of,
    twin_of,
    unknown_operator,
)


@dataclass(frozen=True)
class _Write:
    """*node* writes into *tensor*, at *position* of a list if that is one of several, so that *result* lies there."""

    node: Node
    tensor: Node
    result: Node | None
    position: int | None = None

    def region(self) -> torch.Tensor:
        """A tensor of the elements that may change."""
        from torch._inductor.fx_passes.reinplace import _generalized_scatter
        from torch._inductor.fx_utils import get_fake_args_kwargs
        from torch._inductor.virtualized import V

        region: torch.Tensor = self.tensor.meta["val"]
        if self.node.target is _generalized_scatter:
            with V.fake_mode, V.fake_mode.shape_env.ignore_fresh_unbacked_symbols():
                views: Any = self.node.args[2]
                for view in views:
                    _, args, kwargs = get_fake_args_kwargs(view)
                    region = view.target(region, *args, **kwargs)
        return region

    def operands(self) -> Iterator[tuple[int | None, Node]]:
        """What a scatter reads while it writes, with the position in a list."""
        if self.node.target not in _inplace_forms():
            # An operator or launch that got one tensor twice got it twice in the program too.
            return
        mutated = _mutated(self.node)
        for index, argument in enumerate(self.node.args):
            if index not in mutated:
                leaves = enumerate(argument) if isinstance(argument, (list, tuple)) else [(None, argument)]
                yield from ((position, leaf) for position, leaf in leaves if storage_of(leaf) is not None)  # type: ignore[misc]


def _inplace_forms() -> dict[Any, Any]:
    from torch._inductor.fx_passes import reinplace

    return {**reinplace.inplaceable_foreach_ops, **reinplace.inplaceable_ops}


def _mutated(node: Node) -> tuple[int, ...]:
    """The places of the arguments that the in-place form of *node* writes to."""
    mutated = _inplace_forms()[node.target].mutated_arg
    return mutated if isinstance(mutated, tuple) else (mutated,)


def _item(node: Node, index: Any) -> Node | None:
    return next((user for user in node.users if user.target is operator.getitem and user.args[1] == index), None)


def _may_write(node: Node) -> bool:
    """Whether torch knows a way for *node* to write into its arguments."""
    return node.op == "call_function" and (node.target in _inplace_forms() or bool(mutable_arguments(node)))


def _writes(node: Node, twin: Node) -> Iterator[_Write]:
    """The writes into arguments of *node*, as torch decided for its *twin*."""
    for key, tensor, place in mutable_arguments(node):
        cloned: Any = twin.meta.get("only_clone_these_tensors", twin.kwargs.get("tensors_to_clone"))
        if key not in cloned:
            yield _Write(node, tensor, _item(node, place))
    if node.target in _inplace_forms() and twin.target is not node.target:
        for index in _mutated(node):
            argument: Any = node.args[index]
            if isinstance(argument, torch.fx.Node):
                yield _Write(node, argument, node)
            else:
                for position, tensor in enumerate(argument):
                    yield _Write(node, tensor, _item(node, position), position)


def _decided(graph: Graph, original: Callable[[Graph], None]) -> _Write | None:
    """One of the writes that *original* would decide on although it must not."""
    twin, twins = twin_of(graph)
    original(twin)
    left = set(twin.nodes)
    writes = {node: list(_writes(node, twins[node])) for node in graph.nodes if _may_write(node)}
    dropped = {node for node in graph.nodes if is_copy_into(node) and twins[node] not in left}
    walk = Walk(writes=writes, dropped=dropped)
    return next(walk.unsound(graph), None) or returned_together(graph, walk.memory)  # type: ignore[no-any-return]


def _reinplace(original: Callable[[Graph], None], graph: Graph) -> None:
    """Let operators write into their arguments, but only where nothing reads or returns what they overwrite.

    ``reinplace_inplaceable_ops_core`` lets a scatter, a custom operator or a launch write into a graph input if the
    graph copies something into that input later. It does not ask what: in ``y = slice_scatter(x, s); x.zero_(); return
    y`` the result lies in ``x`` and is overwritten by the zeros, and in ``x.copy_(y); return y`` the caller gets ``x``
    itself. Nor does it look at the other arguments of a scatter, which may lie in what it writes to: ``x[1:] =
    x[:-1].clone()``. Upstream: pytorch #198094, #197829 and #195484.

    The repair lets torch decide for a copy of the graph, and follows the values through what it decided. Where one of
    them is lost, it adds a reader that torch sees, and removes it after torch has decided for the graph itself.
    """
    from torch._dynamo.utils import ReinplaceCounters

    readers: list[Node] = []
    if any(map(_may_write, graph.nodes)):
        renew_views(graph)
        counted = dict(ReinplaceCounters._values)
        while (write := _decided(graph, original)) is not None:
            assert len(readers) <= len(graph.nodes), f"torch writes into {write.tensor}, which is read"
            with graph.inserting_after(write.node):
                readers.append(graph.call_function(unknown_operator, (write.tensor,)))
        ReinplaceCounters._values.clear()
        ReinplaceCounters._values.update(counted)
    original(graph)
    for reader in readers:
        graph.erase_node(reader)
    if readers:
        report("reinplace_unread")


REINPLACE_UNREAD = Defect(
    name="reinplace_unread",
    effect="what a scatter or a custom operator returns lies in a tensor of the caller and is overwritten there, or is "
    "computed from elements that it has overwritten",
    severity="wrong code",
    repair="the operator gets memory of its own where another value would be lost",
    replaces={"torch._inductor.fx_passes.reinplace:reinplace_inplaceable_ops_core": _reinplace},
)
