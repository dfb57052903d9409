# SPDX-License-Identifier: Apache-2.0
"""The statistics of a group norm channel by channel, rather than over an arbitrary cut of channels and pixels.

A group norm flattens channels and pixels and takes one mean and variance over both. Inductor cuts that long reduction
into equal chunks. With constant sizes the compiler turns the place of a chunk into shifts and multiplications; with
symbolic ones every element costs several integer divisions (``(r + x * ceildiv(n, 64)) // (h * w) % 4``), more than all
other work of the kernel. The pixels of one channel lie evenly spaced in memory, so a chunk of them needs no division:

    mean of group = mean of channel means,    variance of group = mean of channel variances + variance of channel means

which is exact, because all channels have equally many pixels (Chan, Golub and LeVeque, 1979).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.fx.experimental.symbolic_shapes import has_free_symbols

from ._convolution import Writer, aten, replace_by
from ._pass import MagiInductorPass
from ._reason import Reason


if TYPE_CHECKING:
    from torch.fx import Graph, Node

    from ._context import PassContext


@dataclass(frozen=True)
class GroupMoments:
    """A `var_mean` over channels and pixels: *node* reads *image*, (batch, channels, *space), in *groups* groups."""

    node: Node
    image: Node
    groups: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ChannelMomentsPass(MagiInductorPass):
    """Take the mean and variance of dynamic group norms by channel first, then over the channels of a group.

    Attributes:
        always: Rewrite static group norms and those on the CPU as well.
    """

    hook: ClassVar[str] = "post_grad_custom_pre_pass"
    uuid_helpers: ClassVar = (Writer, replace_by, GroupMoments)

    always: bool = False

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:  # noqa: ARG002
        """Some group norm can be rewritten, and its size is symbolic or *always* is set."""
        count = sum(self._pays(node) for node in graph.nodes)
        return Reason(count > 0, f"{count} group norms" if self.always else f"{count} group norms of symbolic size")

    def __call__(self, graph: Graph) -> None:
        """Rewrite them."""
        for node in list(graph.nodes):
            if self._pays(node):
                moments = _read(node)
                if moments is not None:
                    _rewrite(graph, moments)

    def _pays(self, node: Node) -> bool:
        moments = _read(node)
        if moments is None:
            return False
        image = moments.image.meta["val"]
        return self.always or (image.device.type == "cuda" and has_free_symbols(image))


def _read(node: Node) -> GroupMoments | None:
    """*node* as `GroupMoments`: ``var_mean(x.view(n, groups, channels / groups, pixels), [2, 3], correction=0)``."""
    if node.target is not aten.var_mean.correction or not node.kwargs.get("keepdim"):
        return None
    if len(node.args) != 2 or node.kwargs.get("correction") != 0 or [d % 4 for d in node.args[1]] != [2, 3]:  # type: ignore[union-attr, operator]
        return None
    grouped: Node = node.args[0]  # type: ignore[assignment]
    dtype = grouped.meta["val"].dtype
    view, converted = grouped, False
    if view.target is torch.ops.prims.convert_element_type.default:
        view, converted = view.args[0], True  # type: ignore[assignment]
    if view.target not in (aten.view.default, aten.reshape.default):
        return None
    image: Node = view.args[0]  # type: ignore[assignment]
    shape, seen = image.meta["val"].shape, view.meta["val"].shape
    fits = (
        len(seen) == 4
        and len(shape) >= 4
        and all(isinstance(extent, int) for extent in (shape[0], seen[0], shape[1], seen[1], seen[2]))
        and shape[0] == seen[0]
        and shape[1] == seen[1] * seen[2]
    )
    assert converted or dtype == image.meta["val"].dtype or not fits
    return GroupMoments(node, image, seen[1], dtype) if fits else None


def _rewrite(graph: Graph, moments: GroupMoments) -> None:
    write = Writer(graph, moments.node)
    image = moments.image
    if image.meta["val"].dtype != moments.dtype:
        image = write(torch.ops.prims.convert_element_type.default, image, moments.dtype)
    batch, channels = image.meta["val"].shape[:2]
    grouped = [batch, moments.groups, channels // moments.groups]
    pixels = list(range(2, image.meta["val"].dim()))
    within, means = (write(aten.view.default, x, grouped) for x in _var_mean(write, image, pixels, keepdim=False))
    between, mean = _var_mean(write, means, [2], keepdim=True)
    variance = write(aten.add.Tensor, write(aten.mean.dim, within, [2], True), between)
    results = [write(aten.unsqueeze.default, value, -1) for value in (variance, mean)]
    for user in list(moments.node.users):
        replace_by(user, results[user.args[1]])  # type: ignore[index]


def _var_mean(write: Writer, x: Node, dims: list[int], *, keepdim: bool) -> tuple[Node, Node]:
    both = write(aten.var_mean.correction, x, dims, correction=0, keepdim=keepdim)
    return write(operator.getitem, both, 0), write(operator.getitem, both, 1)
