# SPDX-License-Identifier: Apache-2.0
"""Which values of a graph share memory, and which writes they see, once a pass of Inductor has merged storages.

AOTAutograd's graph is functional except for the ``copy_`` into inputs at its end. A pass that replaces a copy by its
source, or lets an operator write into its argument, puts two values into one memory that had each its own. It is right
as long as each reader still finds the value that it read in the functional graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from torch.fx import Graph, Node


def storages(node: Node) -> frozenset[int]:
    """The storages of the tensors that *node* returns."""
    tensors = (leaf for leaf in torch.utils._pytree.tree_leaves(node.meta.get("val")) if _has_storage(leaf))
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)


def _has_storage(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and torch._C._has_storage(value)


def storage_of(node: Any) -> int | None:
    """The storage of the tensor that *node* returns; None if it is not a node that returns one tensor."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value.untyped_storage()._cdata if value is not None and _has_storage(value) else None


def is_view(node: Node) -> bool:
    """Whether *node* computes nothing: what it returns lies in the memory of its arguments."""
    own = storages(node)
    return bool(own) and any(own & storages(argument) for argument in node.all_input_nodes)


def is_copy_into(node: Node) -> bool:
    return node.target is torch.ops.aten.copy_.default


def reads(node: Node) -> list[Node]:
    """The tensors whose elements *node* reads."""
    from torch._inductor.fx_passes.reinplace import META_ONLY_OPS

    if node.target in META_ONLY_OPS or (is_view(node) and not is_copy_into(node)):
        return []
    return [node.args[1]] if is_copy_into(node) else node.all_input_nodes  # type: ignore[list-item]


def twin_of(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """A copy of *graph* for a trial of a pass, and the node in it for each node."""
    twins: dict[Node, Node] = {}
    twin = torch.fx.Graph(graph.owning_module)
    twin.output(twin.graph_copy(graph, twins))
    (output,) = graph.find_nodes(op="output")
    twins[output] = twin.output_node()
    return twin, twins


@dataclass(frozen=True)
class Region:
    """The elements of a tensor in a storage."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any

    def is_known_equal(self, other: Region) -> bool:
        """Whether both are the same elements in the same order, for all sizes."""
        from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

        return (
            len(self.size) == len(other.size)
            and statically_known_true(sym_eq(self.size, other.size))
            and statically_known_true(sym_eq(self.stride, other.stride))
            and statically_known_true(sym_eq(self.offset, other.offset))
        )

    def is_known_apart(self, other: Region) -> bool:
        """Whether no element is in both, for all sizes."""
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return (
            statically_known_true(self._end() <= other.offset)
            or statically_known_true(other._end() <= self.offset)
            or self._is_another_box(other)
            or other._is_another_box(self)
        )

    def _end(self) -> Any:
        """The position behind the last element."""
        steps = ((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return self.offset + sum(steps) + 1

    def _is_another_box(self, other: Region) -> bool:
        """Whether both are boxes of one grid of elements, of which *other* starts later in a dimension than self ends.

        The strides are numbers, and each divides the one before it.
        """
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        distance = other.offset - self.offset
        if self.stride != other.stride or not all(type(n) is int for n in (*self.stride, distance)) or distance < 0:
            return False
        width: Any = None
        is_apart = False
        for stride, size, length in sorted(zip(self.stride, self.size, other.size, strict=True), key=lambda d: -d[0]):
            if stride <= 0 or (width is not None and width % stride):
                return False
            start, distance = divmod(distance, stride)
            columns = None if width is None else width // stride
            if columns is not None and not (
                statically_known_true(size <= columns) and statically_known_true(start + length <= columns)
            ):
                return False
            is_apart = is_apart or statically_known_true(size <= start)
            width = stride
        return is_apart and distance == 0


@dataclass
class Memory:
    """The memories of a graph's values after some storages were merged into others."""

    merged: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """For a storage the one that it lies in, and the shift of its elements there; None where that is not known."""
    why: dict[int | None, Any] = field(default_factory=dict)
    """For a merged storage what merged it."""

    def merge(self, node: Node, into: Node, why: Any) -> None:
        """Put what *node* returns where *into* is, because of *why*."""
        own, other = node.meta["val"], into.meta["val"]
        shift = other.storage_offset() - own.storage_offset() if own.stride() == other.stride() else None
        storage = own.untyped_storage()._cdata
        self.merged[storage], self.why[storage] = (other.untyped_storage()._cdata, shift), why

    def root(self, storage: int | None) -> int | None:
        """The storage in which *storage* lies."""
        while storage in self.merged:
            storage = self.merged[storage][0]
        return storage

    def region(self, tensor: torch.Tensor) -> Region | None:
        """Where *tensor* lies in the storage in which its own lies; None where that is not known."""
        storage, offset = tensor.untyped_storage()._cdata, tensor.storage_offset()
        while storage in self.merged:
            storage, shift = self.merged[storage]
            if shift is None:
                return None
            offset = offset + shift
        return Region(tuple(tensor.size()), tuple(tensor.stride()), offset)

    def are_apart(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether two tensors in one memory are known to have no element in common."""
        mine, its = self.region(one), self.region(other)
        return mine is not None and its is not None and mine.is_known_apart(its)

    def are_same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether two tensors in one memory are known to have the same elements in the same order."""
        mine, its = self.region(one), self.region(other)
        return mine is not None and its is not None and mine.is_known_equal(its)


def mutable_arguments(node: Node) -> list[tuple[Any, Node, Any]]:
    """What the operator or launch that *node* wraps writes to: torch's key of it, the tensor, the place of the result.

    It is empty for any other node.
    """
    ops = torch.ops.higher_order
    if node.target is ops.triton_kernel_wrapper_functional:
        launched: Any = node.kwargs["kwargs"]
        return [(name, launched[name], name) for name in node.kwargs["tensors_to_clone"]]  # type: ignore[union-attr]
    if node.target is ops.auto_functionalized_v2:
        written: list[tuple[Any, Any]] = list(enumerate(node.kwargs["_all_bases"]))  # type: ignore[arg-type]
    elif node.target is ops.auto_functionalized:
        from torch._higher_order_ops.auto_functionalize import get_mutable_args

        written = [(name, node.kwargs[name]) for name in get_mutable_args(node.args[0])[0]]  # type: ignore[arg-type]
    else:
        return []
    first = len(node.meta["val"]) - len(written)
    return [(key, tensor, first + at) for at, (key, tensor) in enumerate(written) if storage_of(tensor) is not None]


def other_arguments(node: Node) -> list[Node]:
    """The tensors that the operator or launch that *node* wraps only reads."""
    launch = node.target is torch.ops.higher_order.triton_kernel_wrapper_functional
    given: Any = node.kwargs["kwargs"] if launch else node.kwargs
    written = {"_all_bases", *(key for key, _, _ in mutable_arguments(node))}
    leaves = torch.utils._pytree.tree_leaves([value for key, value in given.items() if key not in written])
    return [leaf for leaf in leaves if storage_of(leaf) is not None]
