# SPDX-License-Identifier: Apache-2.0
"""An operator that sets the memory layout of a tensor, for tensors whose layout Inductor would guess.

Inductor chooses channels-last for tensors of four dimensions only (`maybe_apply_channels_last_stride_order` in
torch/_inductor/graph.py). A video has five, and once one kernel writes it channels-first, all later kernels transpose
it back and forth.

The strides that a rewrite must keep.

A rewrite gives the same numbers, often with other strides: a video that is computed channels-last stays channels-last.
Inductor restores the strides of the outputs that the user sees. Four other places depend on strides, and the first one
gives wrong numbers without an error:

- an operator that reads memory rather than elements, such as `as_strided`, of a node or of what is computed from it;
- the operands of `cond`, `while_loop` and similar operators, whose branches and iterations must have equal strides;
- the outputs of the body of such an operator, for the same reason;
- an output that AOTAutograd adds because several outputs are views of it: it makes those views again at each call.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from magi_passes import _torch_compat

from .nodes import (
    CONVERT,
    Writer,
    aten,
    body_of,
    convolutions_of,
    fake_value,
    hinted,
    is_convolution,
    replace_by,
)


def stored_channels_last(write: Writer, x: Node) -> Node:
    """*x*, written to memory with the channels innermost; one node for all calls with the same *x*."""
    ops = _torch_compat.compiling.layout_ops()
    op = ops.channels_last
    x = join_channels_last(x)
    if x.target in (op, ops.cat_channels_last):
        return x
    known = next((user for user in x.users if user.target is op), None)
    if known is None:
        _store_what_is_repeated(x)
        known = write.after(x)(op, x)
    return known


def join_channels_last(x: Node) -> Node:
    """*x*, or if it is a concatenation, one that takes its place, into which each operand is written channels-last.

    The layout of an operand is of no importance: a causal decoder joins what it keeps of the frames before, which it
    returned channels-first, and the output of the layer before, which is channels-last.
    """
    if x.target is not aten.cat.default:
        return x
    tensors: Any = x.args[0]
    kinds = {(each.meta["val"].dtype, each.meta["val"].dim()) for each in (x, *tensors)}
    if len(tensors) < 2 or len(kinds) > 1:
        return x
    for tensor in tensors:
        _store_what_is_repeated(tensor)
    dim = x.args[1] if len(x.args) > 1 else x.kwargs.get("dim", 0)
    op = _torch_compat.compiling.layout_ops().cat_channels_last
    joined = Writer(x)(op, tensors, dim % x.meta["val"].dim())
    replace_by(x, joined)
    return joined


def is_joined_along(x: Node, dim: int) -> bool:
    """Whether *x* is what `join_channels_last` wrote, along *dim*."""
    return x.target is _torch_compat.compiling.layout_ops().cat_channels_last and x.args[1:] == (dim,)


def _store_what_is_repeated(x: Node) -> None:
    """If *x* repeats pixels of a video that is stored channels-first, make it read a channels-last copy.

    Replication padding and nearest upsampling compute the source of each pixel, and Inductor finds no tile that reads
    one layout and writes the other through such an index.
    """
    reader, source, repeats = x, x, False
    while _repeats_pixels(source) or source.target is CONVERT:
        repeats = repeats or source.target is not CONVERT
        reader, source = source, source.args[0]  # type: ignore[assignment]
    if repeats and _lies_channels_first(source):
        stored = stored_channels_last(Writer(reader), source)
        reader.replace_input_with(source, stored)


def _repeats_pixels(node: Node) -> bool:
    """Whether *node* indexes an image or a video by positions in space only."""
    if node.target not in (aten._unsafe_index.Tensor, aten.index.Tensor):  # noqa: SLF001
        return False
    source, places = node.args
    return source.meta["val"].dim() == node.meta["val"].dim() and places[:2] == [None, None]  # type: ignore[index, union-attr]


_MOVES = frozenset(
    {
        *(CONVERT, operator.getitem, aten.cat.default, aten.clone.default),
        *(aten.permute.default, aten.reshape.default, aten.slice.Tensor),
        *(aten.split.Tensor, aten.split_with_sizes.default, aten.view.default),
    }
)


def _lies_channels_first(x: Node) -> bool:
    """Whether *x* is computed elementwise from an image or a video that is a channels-first input of the graph."""
    todo, seen = [x], {x}
    while todo:
        node = todo.pop()
        value, target = node.meta.get("val"), node.target
        if node.op == "placeholder" and isinstance(value, torch.Tensor) and value.dim() in (4, 5):
            if not statically_known_true(value.stride(1) == 1):
                return True
            continue
        if target in _MOVES or torch.Tag.pointwise in getattr(target, "tags", ()):
            new = [operand for operand in node.all_input_nodes if operand not in seen]
            todo += new
            seen.update(new)
    return False


def store_sums(graph: Graph, videos: list[Node]) -> None:
    """Store the sums that several nodes read, which Inductor writes to memory, channels-last.

    *videos* are the results of convolutions. A residual connection adds one to an earlier sum. If the frames are in
    separate tensors, Inductor cannot tell the best layout of the sum, and uses channels-first.
    """
    op = _torch_compat.compiling.layout_ops().channels_last
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or len(node.users) < 2 or not any(v in node.args for v in videos):
            continue
        value = node.meta["val"]
        if value.dim() not in (4, 5) or any(user.target is op for user in node.users):
            continue
        _store(node)


def store_behind_views(graph: Graph) -> None:
    """Store what convolutions read through views, such as the frames of a video as images, channels-last.

    A convolution makes Inductor compute its input channels-last, but an input that is a view is copied instead.
    """
    for conv in convolutions_of(graph):
        source = _owner_of_memory(conv.x)
        value = source.meta["val"]
        if source is conv.x or source.op != "call_function" or is_convolution(source) or value.dim() not in (4, 5):
            continue
        if statically_known_true(value.shape[1] == conv.x.meta["val"].shape[1]):
            _store(_repeated_in_own_type(source))


def _repeated_in_own_type(x: Node) -> Node:
    """*x*; if it is pixels that are repeated in float32 and rounded back, a node that repeats them as they are.

    torch upsamples in float32 (`pw_cast_for_opmath` in torch/_decomp/decompositions.py), and Inductor would store a
    sum with many operands in float32 and channels-first before *x* is asked for.
    """
    index: Any = x.args[0]
    if x.target is not CONVERT or not _repeats_pixels(index) or index.args[0].target is not CONVERT:
        return x
    pixels, places = index.args[0].args[0], index.args[1]
    dtype, inner = pixels.meta["val"].dtype, index.meta["val"].dtype
    if dtype != x.meta["val"].dtype or torch.promote_types(dtype, inner) != inner:
        return x
    repeated = Writer(x)(index.target, pixels, places)
    replace_by(x, repeated)
    return repeated


def _store(node: Node) -> None:
    """Make all that read *node* read it channels-last from memory."""
    stored = stored_channels_last(Writer(node.next), node)
    if stored is not node:
        node.replace_all_uses_with(stored, delete_user_cb=lambda user: user is not stored)


_READ_MEMORY = frozenset(
    {
        *("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "_reshape_alias"),
        *("view_as_complex", "resize", "resize_", "resize_as", "resize_as_", "set_"),
        *("stride", "sym_stride", "storage_offset", "sym_storage_offset", "is_contiguous", "sym_is_contiguous"),
        *("is_strides_like_format", "is_non_overlapping_and_dense", "view.dtype", "view_copy.dtype"),
    }
)


@contextlib.contextmanager
def strides_kept(graph: Graph) -> Iterator[None]:
    """A context in which *graph* is rewritten; at its end, the strides that something depends on are restored.

    A node that replaced another one is copied into the strides of the old one if the change would reach such a place.
    All other nodes keep the strides that the rewrite gave them.
    """
    _keep_strides_of_bases(graph)
    readers = [node for node in graph.nodes if _depends_on_strides(node)]
    if _torch_compat.compiling.is_body_of_higher_order_op(graph):
        readers.append(graph.output_node())
    operands = {node: _operands(node) for node in graph.nodes} if readers else {}
    yield
    if readers:
        for root, old in _roots_that_reach(graph, readers, operands).items():
            _restore(root, old)


def _keep_strides_of_bases(graph: Graph) -> None:
    """Make Inductor return those outputs of *graph* that others are views of with their current strides."""
    output = graph.output_node()
    visible, strides = (output.meta.get(key) for key in ("user_visible_output_idxs", "original_output_strides"))
    if visible is not None and strides is not None:
        # The places are those of the forward graph; a backward graph can return None there.
        tensors = {place for place, made in enumerate(output.args[0]) if isinstance(made, torch.fx.Node)}  # type: ignore[arg-type]
        bases = tensors.intersection(_torch_compat.compiling.outputs_that_are_bases(), range(len(strides)))
        output.meta["user_visible_output_idxs"] = sorted({*visible, *bases})


def keep_strides_of_outputs(graph: Graph) -> None:
    """Make Inductor return the outputs of *graph* with their strides although it chooses other layouts inside.

    Of an output that is a view, Inductor keeps the order of the strides alone (`GraphLowering.run_node`): with another
    layout behind it, a view with gaps is returned as a dense copy. A copy that the graph makes gets the gaps as well.
    Views of inputs stay views, and so do outputs that share memory, because AOTAutograd makes them again from what they
    are views of. It does not do that for a view of a tensor that is only saved for the backward graph.
    """
    _keep_strides_of_bases(graph)
    output = graph.output_node()
    returned = [output.args[0][place] for place in output.meta.get("user_visible_output_idxs", ())]  # type: ignore[index]
    memories = {node: _owner_of_memory(node) for node in returned if isinstance(node, torch.fx.Node)}
    owners = list(memories.values())
    for node, memory in memories.items():
        is_view_of_what_is_inside = memory is not node and memory.op == "call_function" and owners.count(memory) == 1
        if is_view_of_what_is_inside and not _is_dense(node):
            output.replace_input_with(node, Writer(output)(aten.clone.default, node))


def _owner_of_memory(node: Node) -> Node:
    """The node that *node* is a view of; *node* itself if it is not a view."""
    while node.op == "call_function":
        maker: Any = node.args[0] if node.target is operator.getitem else node
        returns = getattr(getattr(maker.target, "_schema", None), "returns", ())
        if all(each.alias_info is None for each in returns):
            break
        node = maker.args[0]
    return node


def _is_dense(node: Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or _same_strides(value, fake_value(aten.clone.default, (value,), {}))


def _depends_on_strides(node: Node) -> bool:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):  # noqa: SLF001
        namespace, _, name = target._schema.name.partition("::")  # noqa: SLF001
        return namespace == "aten" and not _READ_MEMORY.isdisjoint((name, f"{name}.{target._overloadname}"))  # noqa: SLF001
    bodies = [body for operand in node.all_input_nodes if (body := body_of(operand)) is not None]
    return any(_takes_a_tensor(body.graph) for body in bodies)


def _takes_a_tensor(body: Graph) -> bool:
    """Whether *body* takes a tensor; the score function of `flex_attention`, for example, takes numbers only."""
    values = [node.meta.get("val") for node in body.find_nodes(op="placeholder")]
    return any(not isinstance(value, torch.Tensor) or value.dim() > 1 for value in values)


def _operands(node: Node) -> list[Node]:
    """The nodes among the arguments of *node*, one for each position."""
    found: list[Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _roots_that_reach(
    graph: Graph, readers: Sequence[Node], before: Mapping[Node, Sequence[Node]]
) -> dict[Node, torch.Tensor]:
    """The new nodes that changed the strides of an operand of *readers*, each with the value of the node it replaced.

    *before* has the operands of each node as they were before the rewrite.
    """
    roots: dict[Node, torch.Tensor] = {}
    for node in graph.nodes:
        for new, old in zip(_operands(node), before.get(node, ()), strict=False):
            if new not in before and isinstance(old.meta.get("val"), torch.Tensor):
                roots[new] = old.meta["val"]
    changed: dict[Node, torch.Tensor] = {}
    sources: dict[Node, set[Node]] = {}
    upstream = _upstream(readers)
    for node in graph.nodes:
        if node not in upstream:
            continue
        of_inputs = {root for operand in node.all_input_nodes for root in sources.get(operand, ())}
        known = node.meta.get("val")
        value = _with_strides_of_inputs(node, changed) if of_inputs else known
        if not isinstance(value, torch.Tensor) or not isinstance(known, torch.Tensor):
            continue
        if not _same_strides(value, roots.get(node, known)):
            changed[node], sources[node] = value, of_inputs | ({node} if node in roots else set())
    reached = {root for reader in readers for operand in _operands(reader) for root in sources.get(operand, ())}
    return {root: old for root, old in roots.items() if root in reached}


def _upstream(readers: Sequence[Node]) -> set[Node]:
    todo, found = list(readers), set()
    while todo:
        for node in todo.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                todo.append(node)
    return found


def _with_strides_of_inputs(node: Node, changed: Mapping[Node, torch.Tensor]) -> Any:
    """The value of *node* for inputs with the strides in *changed*; its old value if running it would add symbols.

    Higher-order operators get their operands with the old strides, so their values do not change either.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or "unbacked_bindings" in node.meta:  # noqa: SLF001
        return node.meta.get("val")
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: changed.get(n, n.meta.get("val")))
    return fake_value(node.target, args, kwargs)


def _same_strides(x: torch.Tensor, y: torch.Tensor) -> bool:
    return all(
        statically_known_true(size == 1) or statically_known_true(ours == theirs)
        for size, ours, theirs in zip(y.shape, x.stride(), y.stride(), strict=True)
    )


def _restore(root: Node, old: torch.Tensor) -> None:
    """Make the users of *root* read a copy of it with the strides of *old*, a dense tensor in some order."""
    write = Writer(root.next)
    outermost_first = sorted(range(old.dim()), key=lambda dim: hinted(old.stride(dim)), reverse=True)
    back = [outermost_first.index(dim) for dim in range(old.dim())]
    permuted = write(aten.permute.default, root, outermost_first)
    copy = write(aten.clone.default, permuted, memory_format=torch.contiguous_format)
    restored = write(aten.permute.default, copy, back)
    root.replace_all_uses_with(restored, delete_user_cb=lambda user: user is not permuted)
