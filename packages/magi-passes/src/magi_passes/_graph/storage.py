# SPDX-License-Identifier: Apache-2.0
"""An operator that says how a tensor is to lie in memory, for tensors whose layout Inductor would guess.

Inductor chooses channels-last for tensors of four dimensions only (`maybe_apply_channels_last_stride_order` in
torch/_inductor/graph.py). A video has five, and once one of its kernels writes it channels-first, all that follow
transpose it back and forth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magi_passes import _torch_compat

from .convolution import Writer, aten


if TYPE_CHECKING:
    from torch.fx import Graph, Node


def stored_channels_last(write: Writer, x: Node) -> Node:
    """*x*, written to memory with the channels innermost; one node however often it is asked for."""
    op = _torch_compat.channels_last_op()
    if x.target is op:
        return x
    known = next((user for user in x.users if user.target is op), None)
    if known is None:
        known = write.after(x)(op, x)
    return known


def store_sums(graph: Graph, videos: list[Node]) -> None:
    """Store channels-last the sums that Inductor will write to memory, because several nodes read them.

    *videos* are what convolutions returned. A residual connection adds one to the sum before; from frames that lie in
    separate tensors Inductor cannot tell how the sum is best laid out, and takes channels-first.
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
