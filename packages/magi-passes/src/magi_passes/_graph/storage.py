# SPDX-License-Identifier: Apache-2.0
"""An operator that sets the memory layout of a tensor, for tensors whose layout Inductor would guess.

Inductor chooses channels-last for tensors of four dimensions only (`maybe_apply_channels_last_stride_order` in
torch/_inductor/graph.py). A video has five, and once one kernel writes it channels-first, all later kernels transpose
it back and forth.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from magi_passes import _torch_compat

from .convolution import Writer, aten


if TYPE_CHECKING:
    from torch.fx import Graph, Node


def stored_channels_last(write: Writer, x: Node) -> Node:
    """*x*, written to memory with the channels innermost; one node for all calls with the same *x*."""
    op = _torch_compat.channels_last_op()
    if x.target is op:
        return x
    known = next((user for user in x.users if user.target is op), None)
    if known is None:
        _store_what_is_repeated(x)
        known = write.after(x)(op, x)
    return known


def _store_what_is_repeated(x: Node) -> None:
    """If *x* repeats pixels of a video that is stored channels-first, make it read a channels-last copy.

    Replication padding and nearest upsampling compute the source of each pixel, and Inductor finds no tile that reads
    one layout and writes the other through such an index.
    """
    reader, source, repeats = x, x, False
    while _repeats_pixels(source) or source.target is _CONVERT:
        repeats = repeats or source.target is not _CONVERT
        reader, source = source, source.args[0]  # type: ignore[assignment]
    if repeats and _lies_channels_first(source):
        stored = stored_channels_last(Writer(source.graph, reader), source)
        reader.replace_input_with(source, stored)


def _repeats_pixels(node: Node) -> bool:
    """Whether *node* indexes an image or a video by positions in space only."""
    if node.target not in (aten._unsafe_index.Tensor, aten.index.Tensor):  # noqa: SLF001
        return False
    source, places = node.args
    return source.meta["val"].dim() == node.meta["val"].dim() and places[:2] == [None, None]  # type: ignore[index, union-attr]


_CONVERT = torch.ops.prims.convert_element_type.default
_MOVES = frozenset(
    {
        *(_CONVERT, operator.getitem, aten.cat.default, aten.clone.default),
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
    op = _torch_compat.channels_last_op()
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or len(node.users) < 2 or not any(v in node.args for v in videos):
            continue
        value = node.meta["val"]
        if value.dim() not in (4, 5) or any(user.target is op for user in node.users):
            continue
        stored = Writer(graph, node.next)(op, node)
        node.replace_all_uses_with(stored, delete_user_cb=lambda user, stored=stored: user is not stored)
