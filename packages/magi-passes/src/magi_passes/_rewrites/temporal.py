# SPDX-License-Identifier: Apache-2.0
"""3D convolutions with few time taps as 2D convolutions.

A tap is one plane of the kernel along time. Output frame t of a convolution with three taps reads three input frames.
Concatenated along the channels, they are one image, and the three planes of the kernel are one 2D kernel:

    out[:, :, t] = conv2d(cat([x[:, :, t], x[:, :, t + 1], x[:, :, t + 2]], dim=1), cat(planes, dim=1))

Libraries have better 2D than 3D kernels, channels-last needs no copies around a 2D convolution, and the concatenation
is written by the kernel that produces x. Frames beyond the ends of x are zeros, so their taps are left out rather than
multiplied. With two frames of padding before three frames (a causal decoder), that saves a third of the arithmetic.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from magi_passes._framework.compilation import PassContext, Reason
from magi_passes._framework.graph_pass import CheckedPass
from magi_passes._graph.nodes import Convolution, Writer, aten, convolutions_of, hinted, read_convolution, replace_by
from magi_passes._graph.strides import (
    is_joined_along,
    join_channels_last,
    store_behind_views,
    store_sums,
    stored_channels_last,
    strides_kept,
)

from .padding import flat_pads, read_zero_pad


@dataclass(frozen=True)
class Frames:
    """Consecutive output frames ``first … first + count - 1`` that read the same taps of the kernel."""

    first: int
    count: int
    taps: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """The input of a convolution, without zero frames; *before* and *after* are their numbers around *x* along time."""

    x: Node
    before: int
    after: int


def source_of(conv: Convolution) -> Source:
    """The input of *conv*, with explicit time padding and the padding of *conv* counted as zero frames."""
    pad, own = read_zero_pad(conv.x), conv.padding[0]
    if pad is None or any(pair != (0, 0) for pair in (*pad.pads[:2], *pad.pads[3:])):
        return Source(conv.x, own, own)
    before, after = pad.pads[2]
    if not isinstance(before, int) or not isinstance(after, int):
        return Source(conv.x, own, own)
    return Source(pad.x, own + before, own + after)


def split_frames(length: int, before: int, after: int, conv: Convolution) -> list[Frames]:
    """Group the output frames of *conv* over *length* frames by the taps that read no zeros.

    Example: three taps, three frames, two zeros before: frame 0 reads tap 2, frame 1 taps 1 and 2, frame 2 all three.
    """
    taps, stride, dilation = conv.kernel[0], conv.stride[0], conv.dilation[0]
    frames = (length + before + after - conv.reach[0] - 1) // stride + 1
    real = [
        tuple(k for k in range(taps) if before <= t * stride + k * dilation < before + length) for t in range(frames)
    ]
    groups = [(taps, [t for t, _ in members]) for taps, members in groupby(enumerate(real), key=lambda item: item[1])]
    return [Frames(members[0], len(members), taps) for taps, members in groups]


@dataclass(frozen=True)
class TemporalConvPass(CheckedPass):
    """Write 3D convolutions with few time taps as channels-last 2D convolutions over the taps as channels.

    The result is exact: the same products are summed. Every stride, padding, dilation, number of groups and kernel is
    accepted, with a constant or symbolic number of frames; transposed and 2D convolutions stay.

    Attributes:
        always: Rewrite every convolution that can be rewritten, instead of only those where it is expected to be
            faster: half precision on CUDA, ungrouped, at most *max_taps* taps.
        max_taps: The largest number of taps; the image of all taps is as many times larger than the input.
        min_skipped: Split frames by the taps that read no zeros if that saves at least this share of the arithmetic;
            below it, zero frames are written and one convolution computes all frames.
        native_channels: With at least so many input channels, or a multiple of 64, a convolution of which no tap can be
            left out stays 3D, with its input stored channels-last. The 3D kernel is then as fast, and no copy of the
            taps is written. On one H200 (torch 2.11, cuDNN 9.19), it takes 0.75 to 0.94 of the time for 64, 128, 160,
            192 and 256 channels, and 1.2 to 1.6 for 96, where cuDNN has no kernel for Hopper.
    """

    hook: ClassVar[str] = "post_grad_custom_pre_pass"

    always: bool = False
    max_taps: int = 4
    min_skipped: float = 0.125
    native_channels: int = 128

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:  # noqa: ARG002
        """It applies if some convolution can be rewritten, and that is expected to be faster or *always* is set."""
        candidates = [conv for conv in convolutions_of(graph) if is_temporal(conv)]
        chosen = [conv for conv in candidates if self._pays(conv)]
        return Reason(bool(chosen), f"{len(chosen)} of {len(candidates)} convolutions over time")

    def __call__(self, graph: Graph) -> None:
        """Rewrite the chosen convolutions."""
        with strides_kept(graph):
            found = frozenset(graph.nodes)
            # First, because several convolutions may read a node whose place is taken.
            for conv in self._chosen(graph):
                join_channels_last(source_of(conv).x)
            videos: list[Node] = []
            for conv in self._chosen(graph):
                video = self._rewrite(Writer(conv.node), conv)
                replace_by(conv.node, video)
                videos.append(video)
            store_sums(graph, videos)
            store_behind_views(graph)
            written = [node for node in graph.nodes if node not in found]
            _write_together([node for node in written if _is_small_weight_of_taps(node)])

    def _chosen(self, graph: Graph) -> Iterator[Convolution]:
        for node in list(graph.nodes):
            conv = read_convolution(node)  # now, because what is done to one may change the next
            if conv is not None and is_temporal(conv) and self._pays(conv):
                yield conv

    def _pays(self, conv: Convolution) -> bool:
        x = conv.x.meta["val"]
        is_half = x.dtype in (torch.bfloat16, torch.float16)
        return self.always or (
            x.device.type == "cuda" and is_half and conv.groups == 1 and conv.kernel[0] <= self.max_taps
        )

    def _rewrite(self, write: Writer, conv: Convolution) -> Node:
        source = source_of(conv)
        length = source.x.meta["val"].shape[2]
        if isinstance(length, int):
            groups = split_frames(length, source.before, source.after, conv)
            computed = sum(group.count * len(group.taps) for group in groups)
            total = sum(group.count for group in groups) * conv.kernel[0]
            if all(group.taps for group in groups) and total - computed >= self.min_skipped * total:
                frames = _frames_first(write, source.x)
                parts = [_convolve(write, conv, Source(frames, source.before, 0), group) for group in groups]
                return _as_video(write, conv, parts)
        channels = conv.weight.meta["val"].shape[1]
        if channels >= self.native_channels or channels % 64 == 0:
            return _convolve_in_3d(write, conv, source)
        frames = _frames_first(write, source.x)
        if source.before or source.after:
            time = (*((source.before, source.after),), *[(0, 0)] * (frames.meta["val"].dim() - 1))
            frames = write(aten.constant_pad_nd.default, frames, flat_pads(time), 0.0)
        every = Frames(0, -1, tuple(range(conv.kernel[0])))
        return _as_video(write, conv, [_convolve(write, conv, Source(frames, 0, 0), every)])


def is_temporal(conv: Convolution) -> bool:
    """Whether *conv* has a time dimension."""
    return len(conv.kernel) == 3


def _frames_first(write: Writer, video: Node) -> Node:
    """*video*, (batch, channels, frames, …), as (frames, batch, channels, …), without the batch if it is one."""
    stored = stored_channels_last(write, video)
    if video.meta["val"].shape[0] == 1:
        return write(aten.permute.default, write(aten.squeeze.dim, stored, 0), [1, 0, 2, 3])
    return write(aten.permute.default, stored, [2, 0, 1, 3, 4])


def _convolve(write: Writer, conv: Convolution, source: Source, frames: Frames) -> Node:
    """The output *frames* by a 2D convolution: (frames · batch, out channels, height, width), frames outermost."""
    at_weight = write.after(conv.weight)
    planes = [at_weight(aten.select.int, conv.weight, 2, tap) for tap in frames.taps]
    weight = planes[0] if len(planes) == 1 else at_weight(aten.cat.default, planes, 1)
    args = (conv.bias, list(conv.stride[1:]), list(conv.padding[1:]), list(conv.dilation[1:]), False, [0, 0])
    images = _taps_side_by_side(write, conv, source, frames)
    return write(aten.convolution.default, images, weight, *args, conv.groups)


def _convolve_in_3d(write: Writer, conv: Convolution, source: Source) -> Node:
    """*conv* itself, of an input that is stored channels-last."""
    padding, x = (source.before, *conv.padding[1:]), source.x
    if source.before != source.after:
        padding = (0, *conv.padding[1:])
        x = _with_zero_frames(write, source)
    args = (conv.weight, conv.bias, list(conv.stride), list(padding), list(conv.dilation), False, [0, 0, 0])
    return write(aten.convolution.default, stored_channels_last(write, x), *args, conv.groups)


def _with_zero_frames(write: Writer, source: Source) -> Node:
    """The video of *source* with its zero frames; those of a concatenation along time are part of its outer operands.

    What is kept of the frames before is copied into a concatenation anyway, and the layer before writes into the same.
    """

    def padded(x: Node, before: int, after: int) -> Node:
        pads = flat_pads([(before, after), (0, 0), (0, 0)])
        return write(aten.constant_pad_nd.default, x, pads, 0.0) if before or after else x

    if not is_joined_along(source.x, 2):
        return padded(source.x, source.before, source.after)
    join: Any = source.x.target
    tensors: Any = source.x.args[0]
    first, *others, last = tensors
    return write(join, [padded(first, source.before, 0), *others, padded(last, 0, source.after)], 2)


# A GPU writes so many elements in about the time of a kernel launch, a few microseconds.
_SMALL_WEIGHT = 2**20


def _is_small_weight_of_taps(node: Node) -> bool:
    """Whether *node* is a small concatenation of the planes of a parameter, as `_convolve` writes it."""
    if node.target is not aten.cat.default:
        return False
    planes: Any = node.args[0]
    are_planes = all(plane.target is aten.select.int and plane.args[0].op == "placeholder" for plane in planes)
    # They are written together by a product with 1.0, which would turn ints into floats.
    are_planes = are_planes and node.meta["val"].dtype.is_floating_point
    return are_planes and hinted(node.meta["val"].numel()) <= _SMALL_WEIGHT


def _write_together(weights: list[Node]) -> None:
    """Make one kernel write all *weights*, rather than one kernel for each."""
    if len(weights) < 2:
        return
    # Inductor makes one kernel for a whole list of products, and a product with one changes nothing.
    written = Writer(weights[-1].next)(aten._foreach_mul.Scalar, weights, 1.0)  # noqa: SLF001
    write = Writer(written.next)
    for index, weight in enumerate(weights):
        copy = write(operator.getitem, written, index)
        weight.replace_all_uses_with(copy, lambda user: user is not written)


def _taps_side_by_side(write: Writer, conv: Convolution, source: Source, frames: Frames) -> Node:
    """The input frames that each of *frames* reads, as one image: (frames · batch, taps · channels, height, width).

    The taps are outermost among the channels of each group of *conv*.
    """
    taps, stride, dilation = frames.taps, conv.stride[0], conv.dilation[0]
    start = frames.first * stride + taps[0] * dilation - source.before
    reach = (taps[-1] - taps[0]) * dilation + 1
    stop = start + (frames.count - 1) * stride + reach if frames.count > 0 else 2**63 - 1
    taken = write(aten.slice.Tensor, source.x, 0, start, stop)
    # A view, in which an index finds a tap by a division. A concatenation loads each element once for every tap.
    windows = write(aten.unfold.default, taken, 0, reach, stride)
    *shape, _ = windows.meta["val"].shape
    if dilation > 1:
        windows = write(aten.slice.Tensor, windows, len(shape), 0, 2**63 - 1, dilation)
    rest = [write.size(source.x, dim) for dim in (-2, -1)]
    # (frames · batch, groups, channels, height, width, taps); the video may have a symbol for its channels.
    channels = conv.weight.meta["val"].shape[1]
    grouped = write(aten.reshape.default, windows, [-1, conv.groups, channels, *rest, len(taps)])
    together = write(aten.permute.default, grouped, [0, 1, 5, 2, 3, 4])
    images = write(aten.reshape.default, together, [-1, conv.groups * len(taps) * channels, *rest])
    return stored_channels_last(write, images)


def _as_video(write: Writer, conv: Convolution, parts: list[Node]) -> Node:
    """The frames of *parts*, in order, as (batch, out channels, frames, height, width)."""
    frames = parts[0] if len(parts) == 1 else write(aten.cat.default, parts, 0)
    if conv.x.meta["val"].shape[0] == 1:
        return write(aten.unsqueeze.default, write(aten.permute.default, frames, [1, 0, 2, 3]), 0)
    shape = [-1, write.size(conv.x, 0), *(write.size(frames, dim) for dim in (1, 2, 3))]
    return write(aten.permute.default, write(aten.reshape.default, frames, shape), [1, 2, 0, 3, 4])
