# SPDX-License-Identifier: Apache-2.0
"""Convolutions with few output channels as one matrix product and a sum over the taps.

The last convolution of a decoder makes the three colours of an image. Libraries multiply tiles of at least 32 output
channels, and read each pixel once for every tap of the kernel. With the taps among the *output* channels, each pixel is
read once:

    products = weight.view(taps * 3, channels) @ image.view(channels, pixels)
    out[:, y, x] = sum(products[tap, :, y + tap.y, x + tap.x] for tap in taps)

The products are in float32, like the sums of a convolution, and are rounded once, after the bias is added. They take
four bytes for each tap, output channel and pixel, so this is for few of both.

Measured on one H200 (torch 2.11, bfloat16): 96 to 3 channels, 3x3x3 taps, four frames of 544x960: 0.64 to 0.76 ms in
place of 1.57, or of 2.14 with the copy of `TemporalConvPass`; 128 to 3 channels, eight frames of 480x720: 0.81 to 0.97
in place of 2.26 and 3.20. The root mean square error is 1.7e-3 of the output's, and 2.0e-3 to 2.3e-3 with cuDNN.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from torch.fx import Graph, Node

from magi_passes._framework.compilation import PassContext, Reason
from magi_passes._framework.graph_pass import CheckedPass
from magi_passes._graph.nodes import (
    CONVERT,
    Convolution,
    Writer,
    aten,
    hinted,
    is_half_on_cuda,
    product_in_float32,
    read_convolution,
    replace_by,
)
from magi_passes._graph.strides import stored_channels_last, strides_kept

from .padding import read_zero_pad


MANY_PRODUCTS = 2**28
"""A convolution that multiplies fewer numbers, for each output channel, takes less than about 0.1 ms."""


@dataclass(frozen=True)
class FewOutputChannelsPass(CheckedPass):
    """Write convolutions with few output channels as a matrix product, and a sum over the taps of the kernel.

    Convolutions of images and videos without stride and groups are rewritten, with any padding, dilation and kernel
    that is not larger than the image.

    Attributes:
        always: Rewrite every convolution that can be rewritten, instead of only those where it is expected to be
            faster: in half precision on CUDA, large, with few taps and output channels for their input channels.
    """

    hook: ClassVar[str] = "post_grad_custom_pre_pass"

    always: bool = False

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:  # noqa: ARG002
        """It applies if some convolution has few output channels, or *always* is set."""
        count = sum(1 for _ in self._chosen(graph))
        return Reason(count > 0, f"{count} convolutions with few output channels")

    def __call__(self, graph: Graph) -> None:
        """Rewrite these convolutions."""
        with strides_kept(graph):
            for conv in self._chosen(graph):
                replace_by(conv.node, _as_product(Writer(conv.node), conv))

    def _chosen(self, graph: Graph) -> Iterator[Convolution]:
        for node in list(graph.nodes):
            conv = read_convolution(node)
            if conv is not None and _can_be_rewritten(conv) and (self.always or _pays(conv)):
                yield conv


def _can_be_rewritten(conv: Convolution) -> bool:
    # Products are moved by less than the extent of the image.
    extents = _without_padding(conv)[0].meta["val"].shape[2:]
    is_large = all(hinted(extent) > reach for extent, reach in zip(extents, conv.reach, strict=True))
    return len(extents) in (2, 3) and conv.groups == 1 and set(conv.stride) == {1} and is_large


def _pays(conv: Convolution) -> bool:
    x, (out, channels) = conv.x.meta["val"], conv.weight.meta["val"].shape[:2]
    if not is_half_on_cuda(x):
        return False
    # A convolution reads a channel once for every tap, in about the time in which a GPU reads two bytes of memory. The
    # product reads a channel once, in two bytes, and each of its results is written and read in four.
    results, taps = conv.node.meta["val"], prod(conv.kernel)
    seen, made = hinted(x.numel()) // channels, hinted(results.numel()) // out
    products = made * channels * taps
    return bool(products >= MANY_PRODUCTS and 4 * seen * (channels + 4 * out * taps) <= products)


def _as_product(write: Writer, conv: Convolution) -> Node:
    """The output of *conv*, (batch, out channels, *space), from products of all taps with all pixels."""
    x, pads = _without_padding(conv)
    x = stored_channels_last(write, x)
    dtype, space = conv.node.meta["val"].dtype, len(conv.kernel)
    out, channels = conv.weight.meta["val"].shape[:2]
    # (taps * out channels, channels) and (channels, batch * pixels)
    taps_first = write(aten.permute.default, conv.weight, [*range(2, 2 + space), 0, 1])
    weight = write(aten.reshape.default, taps_first, [-1, channels])
    pixels = write(aten.permute.default, x, [0, *range(2, 2 + space), 1])
    image = write(aten.permute.default, write(aten.reshape.default, pixels, [-1, channels]), [1, 0])
    shape = [*conv.kernel, out, *(write.size(x, dim) for dim in (0, *range(2, 2 + space)))]
    total = write(aten.reshape.default, product_in_float32(write, weight, image), shape)
    # The taps along the innermost dimension are added first, then those along the one outside of it.
    for dim in reversed(range(space)):
        before, after = pads[dim]
        moved = []
        for tap in range(conv.kernel[dim]):
            # Output pixel y reads pixel y + offset; a negative amount crops.
            offset = tap * conv.dilation[dim] - before
            amounts = [0, 0] * (space - 1 - dim) + [-offset, after + before - conv.reach[dim] + offset]
            product = write(aten.select.int, total, dim, tap)
            moved.append(write(aten.constant_pad_nd.default, product, amounts, 0.0) if any(amounts) else product)
        total = functools.reduce(functools.partial(write, aten.add.Tensor), moved)
    if conv.bias is not None:
        bias = write(aten.reshape.default, conv.bias, [out] + [1] * (space + 1))
        total = write(aten.add.Tensor, total, write(CONVERT, bias, total.meta["val"].dtype))
    result = total if total.meta["val"].dtype == dtype else write(CONVERT, total, dtype)
    return write(aten.permute.default, result, [1, 0, *range(2, 2 + space)])


def _without_padding(conv: Convolution) -> tuple[Node, list[tuple[int, int]]]:
    """The input of *conv* without zeros around it, and how many were before and after it, by dimension of space."""
    own = [(amount, amount) for amount in conv.padding]
    pad = read_zero_pad(conv.x)
    if pad is None or any(pair != (0, 0) for pair in pad.pads[:2]):
        return conv.x, own
    explicit: Any = pad.pads[2:]
    if not all(type(amount) is int for pair in explicit for amount in pair):
        return conv.x, own
    return pad.x, [(a + before, b + after) for (a, b), (before, after) in zip(own, explicit, strict=True)]
