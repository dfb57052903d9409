# SPDX-License-Identifier: Apache-2.0
"""Defects of passes that put two values into one memory: which values share it, and which writes they see.

AOTAutograd's graph is functional except for the ``copy_`` into inputs at its end. A pass that replaces a copy by its
source, or lets an operator write into its argument, puts two values into one memory that had each its own. It is right
as long as each reader still finds the value that it read in the functional graph.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from magi_backend._torch_compat.compiling import torch_release

from ._defect import Defect, report


def storages(node: Node) -> frozenset[int]:
    """The storages of the tensors that *node* returns."""
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and torch._C._has_storage(leaf))
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)


def storage_of(node: Any) -> int | None:
    """The storage of the tensor that *node* returns; None if it is not a node that returns one tensor."""
    from torch._inductor.fx_utils import get_node_storage

    return get_node_storage(node) if isinstance(node, Node) else None


def is_view(node: Node) -> bool:
    """Whether *node* computes nothing: what it returns lies in the memory of its arguments."""
    own = storages(node)
    return bool(own) and any(own & storages(argument) for argument in node.all_input_nodes)


def renew_views(graph: Graph) -> None:
    """Tell again in which memory each view lies.

    A pass that replaces a copy by its source leaves the views of the copy in a memory that is nobody's, so that the
    next one takes them for values of their own.
    """
    from torch._inductor.fx_utils import get_fake_args_kwargs
    from torch._inductor.virtualized import V

    for node in graph.nodes:
        views = node.target is operator.getitem or any(
            each.alias_info is not None and not each.alias_info.is_write
            for each in getattr(getattr(node.target, "_schema", None), "returns", ())
        )
        is_known, args, kwargs = get_fake_args_kwargs(node)  # a folded constant has no description
        if views and storages(node) and not is_view(node) and is_known and "unbacked_bindings" not in node.meta:
            with V.fake_mode:
                node.meta["val"] = node.target(*args, **kwargs)


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


class Region(NamedTuple):
    """The elements of a tensor in a storage."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any

    def is_known_apart(self, other: Region) -> bool:
        """Whether no element is in both, for all sizes."""
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
        if mine is None or its is None:
            return False
        return all(statically_known_true(sym_eq(left, right)) for left, right in zip(mine, its, strict=True))


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


def _removed_copies(graph: Graph, trial: Callable[[Graph, dict[Node, Node]], None]) -> list[Node]:
    """The nodes that *trial*, a pass, replaces by nodes that have another storage.

    The pass runs on a copy of *graph*, whose nodes it gets by those of *graph*.
    """
    twin, twins = twin_of(graph)
    trial(twin, twins)
    left = set(twin.nodes)
    return [node for node in graph.nodes if twins[node] not in left and not is_view(node) and storage_of(node)]


@dataclass(frozen=True)
class _Overwritten:
    """From *step* on, the elements of *tensor* are others, by *write*, or by a ``copy_`` of the functional graph."""

    step: int
    tensor: torch.Tensor
    write: Any


@dataclass
class Walk:
    """The values of a functional graph, followed through what a pass decided on: merged storages, and writes."""

    memory: Memory = field(default_factory=Memory)
    writes: Mapping[Node, list[_Write]] = field(default_factory=dict)
    """The writes of each operator into its arguments."""
    dropped: Collection[Node] = ()
    """The ``copy_`` that are left out, because their source lies in their target."""
    born: dict[Node, int] = field(default_factory=dict)
    """The step that computed the elements of each value."""
    changes: dict[int | None, list[_Overwritten]] = field(default_factory=dict)
    """What is overwritten in each memory."""

    def unsound(self, graph: Graph) -> Iterator[Any]:
        """Each write that changes what the graph computes, and what merged a storage in which a value is lost."""
        for step, node in enumerate(graph.nodes):
            own = storages(node)
            shared = [self.born[argument] for argument in node.all_input_nodes if own & storages(argument)]
            self.born[node] = min(shared) if is_view(node) and not is_copy_into(node) else step
            found = [self._lost(read) for read in reads(node)]
            if is_copy_into(node) and node not in self.dropped:
                found.append(self._copied(step, *node.args))
            found += [self._written(step, write) for write in self.writes.get(node, ())]
            yield from filter(None, found)

    def _lost(self, read: Node) -> Any:
        """What to undo if *read* is not any more what it was when it was computed."""
        storage = storage_of(read)
        for change in self.changes.get(self.memory.root(storage), ()):
            if self.born[read] < change.step and not self.memory.are_apart(change.tensor, read.meta["val"]):
                undo = change.write or self.memory.why.get(storage)
                if undo is not None:
                    return undo
        return None

    def _copied(self, step: int, target: Node, source: Node) -> Any:
        """Follow a ``copy_``; what to undo if its source lies in its target, in another order."""
        root = self.memory.root(storage_of(target))
        into_itself = self.memory.root(storage_of(source)) == root
        if into_itself and self.memory.are_same(target.meta["val"], source.meta["val"]):
            return None
        undo = self.memory.why.get(storage_of(source)) if into_itself else None
        if undo is None:
            self.changes.setdefault(root, []).append(_Overwritten(step, target.meta["val"], None))
        return undo

    def _written(self, step: int, write: _Write) -> _Write | None:
        """Follow *write*; itself if it may change an operand before that is read."""
        region, root = write.region(), self.memory.root(storage_of(write.tensor))
        for position, operand in write.operands():
            is_in_order = position == write.position and self.memory.are_same(region, operand.meta["val"])
            if (
                self.memory.root(storage_of(operand)) == root
                and not is_in_order
                and not self.memory.are_apart(region, operand.meta["val"])
            ):
                return write
        self.changes.setdefault(root, []).append(_Overwritten(step, write.tensor.meta["val"], write))
        if write.result is not None:
            self.memory.merge(write.result, write.tensor, write)
        return None


def _met_in_operators(graph: Graph, memory: Memory) -> Iterator[Any]:
    """What merged two arguments of an operator of which it may write to one while it reads the other."""
    for node in graph.nodes:
        for _, written, _ in mutable_arguments(node):
            for read in other_arguments(node):
                one, other = storage_of(written), storage_of(read)
                is_merged = one != other and memory.root(one) == memory.root(other)
                if is_merged and not memory.are_apart(written.meta["val"], read.meta["val"]):
                    yield memory.why[other if other in memory.why else one]


def returned_together(graph: Graph, memory: Memory) -> Any:
    """What merged an output with an input or with another output, of which each has its own memory before."""
    inputs = {storage_of(node) for node in graph.find_nodes(op="placeholder")}
    returned: dict[int | None, int | None] = {}
    for storage in filter(None, map(storage_of, graph.output_node().all_input_nodes)):
        root = memory.root(storage)
        if returned.setdefault(root, storage) != storage or root in inputs - {storage}:
            return memory.why.get(storage) or memory.why[returned[root]]
    return None


def _copies_to_keep(graph: Graph, sources: dict[Node, Node]) -> set[Node]:
    """Those of the copies that *sources* replaces without which the graph computes or returns something else."""
    kept: set[Node] = set()
    while True:
        memory = Memory()
        for copy, source in sources.items():
            if copy not in kept:
                memory.merge(copy, source, copy)
        needed = {*Walk(memory).unsound(graph), *_met_in_operators(graph, memory)}
        needed = needed or {returned_together(graph, memory)} - {None}
        if not needed:
            return kept
        kept |= needed


def unknown_operator(*args: Any, **kwargs: Any) -> None:
    """The target of a copy that torch must not remove, and of a reader that it must see, while it decides."""


@contextlib.contextmanager
def _keeping(copies: Collection[Node]) -> Iterator[None]:
    """Hide *copies* from a pass that would remove them."""
    if copies:
        report("keep_copies")
    targets = {copy: copy.target for copy in copies}
    for copy in copies:
        copy.target = unknown_operator
    try:
        yield
    finally:
        for copy, target in targets.items():
            copy.target = target


def _remove_noops(original: Callable[[Graph], None], graph: Graph) -> None:
    """Remove copies, but keep those whose source changes before their last reader.

    ``remove_noop_ops`` replaces a copy (``clone``, ``copy``, a ``slice_scatter`` of everything, ...) by its source. The
    graph writes into its inputs at its end, and what reads the copy after that write, such as the write into another
    input, reads the changed source. So does an operator that mutates the source and reads the copy, or the other way
    round. And in ``x.clone().t().clone()`` the source of the second copy lies in ``x`` once the first is gone, which
    torch does not see, so that the caller gets ``x.t()``. Upstream: pytorch #198131 and #198031.
    """
    from torch._inductor.fx_passes.post_grad import noop_registry

    def source(copy: Node) -> Any:
        place = noop_registry[copy.target][1]  # of an argument, or a function: up to torch 2.14 of all arguments
        if isinstance(place, int):
            return copy.args[place]
        return place(copy if torch_release() >= (2, 15) else copy.args)

    copies = [node for node in graph.nodes if node.target in noop_registry and not is_view(node)]
    of_copies = {storage_of(source(copy)) for copy in copies} & {*map(storage_of, copies)} - {None}
    kept: set[Node] = set()
    if of_copies or any(is_copy_into(node) or mutable_arguments(node) for node in graph.nodes):
        renew_views(graph)
        removed = _removed_copies(graph, lambda twin, _: original(twin))
        kept = _copies_to_keep(graph, {copy: source(copy) for copy in removed})
    with _keeping(kept):
        original(graph)


_COMMUTATIVE = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)
_IDENTITIES = (*_COMMUTATIVE, torch.ops.aten.sub.Tensor, torch.ops.aten.div.Tensor)


def _remove_identities(
    original: Callable[[Any, Any, Any], None], gm: Any, zeros: Collection[Node], ones: Collection[Node]
) -> None:
    """Remove ``x + zeros`` and ``x * ones``, but keep what is returned beside ``x``, or read after ``x`` has changed.

    ``remove_no_ops`` puts ``x`` in the place of the sum. In ``return x, x + zeros`` the caller gets one tensor for two,
    and after ``y = x.view(-1) + zeros; x.add_(1)`` the sum has changed too. It also gives ``x`` the description of the
    sum: another memory, so that torch takes views of ``x`` for copies, and its strides, which in ``zeros + x.t()`` are
    those of the zeros. Related: pytorch #174187.
    """
    graph, constants = gm.graph, {*zeros, *ones}
    if not any(user.target in _IDENTITIES for node in constants for user in node.users):
        original(gm, zeros, ones)
        return

    def trial(twin: Graph, twins: dict[Node, Node]) -> None:
        original(SimpleNamespace(graph=twin), *({twins[node] for node in nodes} for nodes in (zeros, ones)))

    renew_views(graph)
    sources: dict[Node, Node] = {}
    kept: set[Node] = set()
    for copy in _removed_copies(graph, trial):
        source: Any = copy.args[1 if copy.target in _COMMUTATIVE and copy.args[0] in constants else 0]
        mine, its = copy.meta["val"], source.meta["val"]
        if not statically_known_true(sym_eq(mine.stride(), its.stride())):
            kept.add(copy)
        elif mine.dtype is its.dtype:
            sources[copy] = source
    kept |= _copies_to_keep(graph, sources)
    known = [(source, dict(source.meta)) for copy, source in sources.items() if copy not in kept]
    with _keeping(kept):
        original(gm, zeros, ones)
    for source, meta in known:
        source.meta = meta
    renew_views(graph)


KEEP_COPIES = Defect(
    name="keep_copies",
    effect="a copy of a tensor that is changed in place afterwards, or by the operator that reads the copy, has the "
    "changed elements; `x + zeros` and `x * ones` are `x` itself, not a copy",
    severity="wrong code",
    repair="the copy is kept where its source changes before its last reader, or is returned too",
    replaces={
        "torch._inductor.fx_passes.post_grad:remove_noop_ops": _remove_noops,
        "torch._inductor.fx_passes.joint_graph:remove_no_ops": _remove_identities,
    },
    is_of_joint_graphs=True,
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
