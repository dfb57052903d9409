# SPDX-License-Identifier: Apache-2.0
"""Group norms computed row by row and on the image, rather than over arbitrary chunks of channels and pixels.

A group norm flattens channels and pixels and takes one mean and variance over both. Inductor cuts that long reduction
into equal chunks. With constant sizes, the compiler turns the position of a chunk into shifts and multiplications. With
symbolic sizes, every element costs several integer divisions (``(r + x * ceildiv(n, 64)) // (h * w) % 4``), more than
all other work of the kernel. The pixels of one row of one channel are evenly spaced in memory, so they need none:

    mean of group = mean of row means,    variance of group = mean of row variances + variance of row means

which is exact, because all rows have equally many pixels (Chan, Golub and LeVeque, 1979).

The moments of a row come from two sums, of ``x - first`` and of its square. The first pixel is taken away so that a
mean far from zero costs no digits. ``var_mean`` moves a mean, with a division for each number (Welford, 1962).

The normalisation reads the same flattened view, and computes the row and frame of every element again (``(x + w * y + h
* w * t) // (h * w) % frames``). It needs only the two numbers of the element's group, so it is moved to the image, with
the numbers repeated for each channel. If a weight and a bias for each channel follow, the four numbers become two, as
in eager code (``ComputeFusedParamsCUDAKernel`` in aten/src/ATen/native/cuda/group_norm_kernel.cu):

    (x - mean) * factor * weight + bias = x * scale + shift,    scale = factor * weight,    shift = bias - mean * scale

Both are written to memory. In a channels-last image, neighbouring elements belong to different channels, so otherwise
each element would load the four numbers and the sums that they are made of, and compute the square root again.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import has_free_symbols, statically_known_true

from magi_passes import _torch_compat
from magi_passes._framework.compilation import PassContext, Reason
from magi_passes._framework.graph_pass import CheckedPass
from magi_passes._graph.nodes import CONVERT, Writer, aten, hinted_shape, is_same_shape, replace_by
from magi_passes._graph.strides import stored_channels_last, strides_kept


MANY_ELEMENTS = 2**23
"""To read so many elements takes a GPU longer than to launch the two or three kernels that the rewrite adds.

With constant sizes of at most 5.6 million elements, the rewrite made a whole decoder slower, from 1.16 to 1.30 ms; with
8.4 million and more it made one faster, from 35.2 to 25.4 ms (one H200, torch 2.11). With symbolic sizes it is always
faster.
"""


SHORT_ROW = 32
"""Rows with fewer pixels are taken together: the two numbers of each would be as many as what they are made of."""


@dataclass(frozen=True)
class GroupMoments:
    """A `var_mean` over channels and pixels: *node* reads *image*, (batch, channels, *space), in *groups* groups.

    *grouped* is the view of the image that it reads: (batch, groups, channels / groups, pixels).
    """

    node: Node
    grouped: Node
    image: Node
    groups: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ChannelMomentsPass(CheckedPass):
    """Compute the mean and variance of group norms by row first, and normalise the image without a view.

    Attributes:
        always: Rewrite group norms on the CPU as well, and small ones of constant size.
    """

    hook: ClassVar[str] = "post_grad_custom_pre_pass"

    always: bool = False

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:  # noqa: ARG002
        """It applies if some group norm can be rewritten, and is on CUDA and symbolic or large, or *always* is set."""
        count = sum(self._paying(node) is not None for node in graph.nodes)
        return Reason(count > 0, f"{count} group norms")

    def __call__(self, graph: Graph) -> None:
        """Rewrite the group norms."""
        with strides_kept(graph):
            for node in list(graph.nodes):
                if (moments := self._paying(node)) is not None:
                    _rewrite(moments)

    def _paying(self, node: Node) -> GroupMoments | None:
        """The moments that *node* computes, if to rewrite them is expected to be faster or *always* is set."""
        moments = _read(node)
        if moments is None or self.always:
            return moments
        image = moments.image.meta["val"]
        is_worth_launches = has_free_symbols(image) or image.numel() >= MANY_ELEMENTS
        return moments if image.device.type == "cuda" and is_worth_launches else None


def _read(node: Node) -> GroupMoments | None:
    """*node* as `GroupMoments`: ``var_mean(x.view(n, groups, channels / groups, pixels), [2, 3], correction=0)``."""
    if node.target is not aten.var_mean.correction or not node.kwargs.get("keepdim"):
        return None
    if len(node.args) != 2 or node.kwargs.get("correction") != 0 or [d % 4 for d in node.args[1]] != [2, 3]:  # type: ignore[union-attr, operator]
        return None
    grouped: Node = node.args[0]  # type: ignore[assignment]
    dtype = grouped.meta["val"].dtype
    view, converted = grouped, False
    if view.target is CONVERT:
        view, converted = view.args[0], True  # type: ignore[assignment]
    if view.target not in (aten.view.default, aten.reshape.default):
        return None
    image: Node = view.args[0]  # type: ignore[assignment]
    shape, seen = image.meta["val"].shape, view.meta["val"].shape
    fits = (
        # Half precision would round after each of the two steps, while one step is computed in float32.
        dtype in (torch.float32, torch.float64)
        and len(seen) == 4
        and len(shape) >= 4
        and all(isinstance(extent, int) for extent in (shape[1], seen[1], seen[2]))
        and statically_known_true(shape[0] == seen[0])
        and shape[1] == seen[1] * seen[2]
    )
    assert converted or dtype == image.meta["val"].dtype or not fits
    return GroupMoments(node, grouped, image, seen[1], dtype) if fits else None


def _rewrite(moments: GroupMoments) -> None:
    write = Writer(moments.node)
    image = _stored_sum(moments.image)
    if image.meta["val"].dtype != moments.dtype:
        image = write(CONVERT, image, moments.dtype)
    of_rows = _moments_of_rows(write, image)
    space = [write.size(of_rows[0], dim) for dim in range(2, image.meta["val"].dim())]
    batch, channels = write.size(image, 0), image.meta["val"].shape[1]
    within, means = (
        write(aten.view.default, x, [batch, moments.groups, channels // moments.groups, *space]) for x in of_rows
    )
    rest = list(range(2, image.meta["val"].dim() + 1))
    both = write(aten.var_mean.correction, means, rest, correction=0, keepdim=True)
    between, mean = (write(operator.getitem, both, place) for place in (0, 1))
    variance = write(aten.add.Tensor, write(aten.mean.dim, within, rest, True), between)
    results = [write(aten.view.default, x, [batch, moments.groups, 1, 1]) for x in (variance, mean)]
    for user in list(moments.node.users):
        replace_by(user, results[user.args[1]])  # type: ignore[index]
    for normalised, *of_groups in _normalised(moments.grouped, results[1], image):
        # A weight and a bias for each channel may follow, if nothing else reads what comes before them.
        scaled, weight = _only_user(normalised, aten.mul.Tensor)
        shifted, bias = _only_user(scaled, aten.add.Tensor)
        write = Writer(shifted)
        mean, factor = (_for_each_channel(write, x, image) for x in of_groups)
        scale = factor if weight is None else write(aten.mul.Tensor, factor, weight)
        offset = write(aten.mul.Tensor, mean, scale)
        shift = write(aten.neg.default, offset) if bias is None else write(aten.sub.Tensor, bias, offset)
        replace_by(shifted, write(aten.add.Tensor, write(aten.mul.Tensor, image, scale), shift))
    for scaled, scale, shifted, shift in _affine_calls(image):
        scaled.replace_input_with(scale, stored_channels_last(Writer(scaled), scale))
        shifted.replace_input_with(shift, stored_channels_last(Writer(shifted), shift))


def _stored_sum(image: Node) -> Node:
    """*image*, written to memory if it is computed from several images, as behind a residual connection.

    It is written in its own type. Inductor would compute it in each kernel that reads it; and if that takes more than
    four loads, write the difference to the first pixel to memory, in float32.
    """
    reader, source = image, image
    while source.target in (CONVERT, aten.clone.default):
        reader, source = source, source.args[0]  # type: ignore[assignment]
    images, todo, seen, size = 0, [source], {source}, prod(hinted_shape(source.meta["val"]))
    while todo and images < 2:
        node = todo.pop()
        if node.target is CONVERT or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            operands = [each for each in node.all_input_nodes if isinstance(each.meta["val"], torch.Tensor)]
            new = {each for each in operands if prod(hinted_shape(each.meta["val"])) == size} - seen
            todo += new
            seen |= new
        else:
            images += 1
    if images < 2:
        return image
    stored = Writer(source).after(source)(_torch_compat.compiling.layout_ops().stored, source)
    # Other passes look for the sums of residual connections.
    others = [user for user in source.users if user is not stored and user.target is not aten.add.Tensor]
    for each in others if image is source else [reader]:
        each.replace_input_with(source, stored)
    return stored if image is source else image


def _affine_calls(image: Node) -> list[tuple[Node, Node, Node, Node]]:
    """Each ``image * scale + shift`` with numbers for each channel: the product, its factor, the sum and its summand.

    Inductor's own decomposition writes this for channels-first images.
    """
    calls = []
    for scaled in image.users:
        scale, (shifted, shift) = _other_operand(scaled, aten.mul.Tensor, image), _only_user(scaled, aten.add.Tensor)
        if scale is not None and shift is not None:
            calls.append((scaled, scale, shifted, shift))
    return calls


def _only_user(node: Node, target: Any) -> tuple[Node, Node | None]:
    """The one user of *node*, with its other operand, if it calls *target* with one number for each channel."""
    users = list(node.users)
    other = _other_operand(users[0], target, node) if len(users) == 1 else None
    return (node, None) if other is None else (users[0], other)


def _other_operand(call: Node, target: Any, image: Node) -> Node | None:
    """The other operand of *call* of *target* besides *image*; None unless it is one number for each channel."""
    if call.target is not target or call.kwargs or call.args.count(image) != 1:
        return None
    other: Any = next(arg for arg in call.args if arg is not image)
    return other if isinstance(other, torch.fx.Node) and _is_of_channels(other, image) else None


def _is_of_channels(x: Node, image: Node) -> bool:
    """Whether *x* is one number for each channel of *image*, (batch or 1, channels, 1, …), and not of a wider type."""
    ours, theirs = x.meta["val"], image.meta["val"]
    batch, channels = theirs.shape[:2]
    of_channels = [(one_or_batch, channels, *[1] * (theirs.dim() - 2)) for one_or_batch in (1, batch)]
    has_shape = any(is_same_shape(ours.shape, shape) for shape in of_channels)
    return has_shape and torch.promote_types(ours.dtype, theirs.dtype) == theirs.dtype


def _normalised(grouped: Node, mean: Node, image: Node) -> list[tuple[Node, Node, Node]]:
    """Each ``((grouped - mean) * factor).view(image.shape)``, with its *mean* and its factor."""
    return [
        (back, mean, factor)
        for centred in grouped.users
        if centred.target is aten.sub.Tensor and centred.args == (grouped, mean) and not centred.kwargs
        for scaled in centred.users
        if scaled.target is aten.mul.Tensor
        for factor in scaled.args  # one number for each group: (batch, groups, 1, 1)
        if factor is not centred and isinstance(factor, torch.fx.Node)
        if is_same_shape(factor.meta["val"].shape[2:], (1, 1))
        for back in scaled.users
        if back.target in (aten.view.default, aten.reshape.default)
        if is_same_shape(back.meta["val"].shape, image.meta["val"].shape)
    ]


def _for_each_channel(write: Writer, of_groups: Node, image: Node) -> Node:
    """*of_groups*, (batch, groups, 1, 1), as (batch, channels, 1, …), which broadcasts over *image*."""
    batch, groups, channels = write.size(of_groups, 0), of_groups.meta["val"].shape[1], image.meta["val"].shape[1]
    repeated = write(aten.expand.default, of_groups, [batch, groups, channels // groups, 1])
    return write(aten.reshape.default, repeated, [batch, channels, *[1] * (image.meta["val"].dim() - 2)])


def _moments_of_rows(write: Writer, image: Node) -> tuple[Node, Node]:
    """The variance and the mean of each row of *image*, (batch, channels, …, 1), from two sums."""
    shape = hinted_shape(image.meta["val"])
    pixels = [len(shape) - 1]
    while pixels[0] > 2 and prod(shape[pixels[0] :]) < SHORT_ROW:
        pixels.insert(0, pixels[0] - 1)
    first = image
    for dim in pixels:
        first = write(aten.slice.Tensor, first, dim, 0, 1)
    centred = write(aten.sub.Tensor, image, first)
    squares, mean = (write(aten.mean.dim, x, pixels, True) for x in (write(aten.mul.Tensor, centred, centred), centred))
    variance = write(aten.sub.Tensor, squares, write(aten.mul.Tensor, mean, mean))
    # It may round to less than nothing.
    return write(aten.clamp_min.default, variance, 0), write(aten.add.Tensor, mean, first)
