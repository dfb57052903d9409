# SPDX-License-Identifier: Apache-2.0
"""Symbolic paddings that are always zero, made zero for the compiler.

A causal convolution over time that keeps a cache pads by what the cache does not cover:

    x = torch.cat([cache, x], dim=2)
    x = F.pad(x, [1, 1, 1, 1, 2 - cache.shape[2], 0])

With symbolic sizes, the amount ``2 - s`` is in the graph although it is 0 in each call. So a padded copy is written,
and every later index divides by symbols. With a guard that the amount is zero, there is no copy; sizes for which it is
not zero cost one more compilation.

Zero padding that only convolutions read is done by the convolutions, as far as they can pad.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch.fx import Graph, Node

from magi_passes import _torch_compat
from magi_passes._framework.compilation import PassContext, Reason
from magi_passes._framework.graph_pass import MagiInductorPass
from magi_passes._graph.nodes import Convolution, Writer, aten, captured_value, hinted, read_convolution, replace_by
from magi_passes._graph.strides import strides_kept


Amount: TypeAlias = int | Node
# conv3d, conv_transpose2d, convolution.default
_CONVOLUTION = re.compile(r"conv(?:olution|[123]d|_transpose)")
_CONVOLUTION_MODULES = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


@dataclass(frozen=True)
class ZeroPadGuardPass(MagiInductorPass):
    """Guard on symbolic paddings that are zero for the example inputs, so that they leave the graph.

    Only paddings that a convolution reads are changed. Sizes for which such an amount is not zero compile once more,
    with the amount as a symbol, so there are at most two compilations for it. An amount that is not zero for the
    example inputs stays a symbol, and so does one that depends on data.
    """

    hook: ClassVar[str] = "pre_grad_custom_pass"

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:  # noqa: ARG002
        """It applies if some symbolic padding of a convolution is zero for the example inputs."""
        count = sum(1 for _ in _zero_amounts(graph))
        return Reason(count > 0, f"{count} symbolic paddings of convolutions are zero")

    def __call__(self, graph: Graph) -> None:
        """Add a guard for each of these amounts."""
        for amount in _zero_amounts(graph):
            bool(amount == 0)  # reading the truth of a symbolic comparison adds the guard


def _zero_amounts(graph: Graph) -> Iterator[torch.SymInt]:
    """The symbolic amounts that are zero now among those by which inputs of convolutions are padded."""
    for node in graph.nodes:
        is_padding = node.op == "call_function" and node.target in _torch_compat.compiling.PADDINGS
        if is_padding and any(map(_convolves, node.users)):
            flat: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("pad", ())
            for entry in flat if isinstance(flat, (list, tuple)) else ():
                amount = _symbolic(entry)
                if amount is not None and hinted(amount) == 0:
                    yield amount


def _symbolic(entry: object) -> torch.SymInt | None:
    """The symbol that *entry*, one amount of a padding, stands for; None if it is a plain number."""
    if isinstance(entry, torch.fx.Node):
        entry = captured_value(entry)
    return entry if isinstance(entry, torch.SymInt) else None


def _convolves(node: Node) -> bool:
    """Whether *node* is a convolution, in the captured graph or after decomposition."""
    if node.op == "call_module":
        owner = node.graph.owning_module
        assert owner is not None
        return isinstance(owner.get_submodule(str(node.target)), _CONVOLUTION_MODULES)
    return node.op == "call_function" and _CONVOLUTION.match(getattr(node.target, "__name__", "")) is not None


@dataclass(frozen=True)
class ZeroPad:
    """An `aten.constant_pad_nd` with zeros: ``pads[i]`` is (before, after) along dimension i of *x*.

    An amount is a plain number, or the node of a symbol. A dimension with symbols may be cropped.
    """

    node: Node
    x: Node
    pads: tuple[tuple[Amount, Amount], ...]


def read_zero_pad(node: Node) -> ZeroPad | None:
    """*node* as a `ZeroPad`; None when it crops by a number, pads with something else, or does not pad at all."""
    if node.target is not aten.constant_pad_nd.default:
        return None
    arguments: Any = (*node.args, *node.kwargs.values())
    x, flat, *value = arguments
    if any(v != 0 for v in value) or any(type(n) is int and n < 0 for n in flat):
        return None
    # torch lists the last dimension first: [left, right, top, bottom, ...]
    pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
    return ZeroPad(node, x, tuple([(0, 0)] * (x.meta["val"].dim() - len(pairs)) + pairs[::-1]))


def flat_pads(pads: Sequence[tuple[Amount, Amount]]) -> list[Amount]:
    """*pads* in the form of `aten.constant_pad_nd`: last dimension first, up to the first one that is padded."""
    first = next((dim for dim, pair in enumerate(pads) if pair != (0, 0)), len(pads))
    return [n for pair in pads[first:][::-1] for n in pair]


@dataclass(frozen=True)
class ConvPaddingPass(MagiInductorPass):
    """Give the symmetric part of an explicit zero padding to the convolutions that read it.

    ``conv(pad(x, (1, 1, 2, 0)))`` becomes ``conv(pad(x, (0, 0, 2, 0)), padding=(0, 1))``: exact, and the tensor with
    the border is never written. A padding that is also read by anything else than convolutions stays.
    """

    hook: ClassVar[str] = "post_grad_custom_pre_pass"

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:  # noqa: ARG002
        """It applies if some padding can be moved into convolutions."""
        count = sum(_movable(node) is not None for node in graph.nodes)
        return Reason(count > 0, f"{count} paddings that only convolutions read")

    def __call__(self, graph: Graph) -> None:
        """Move these paddings into the convolutions."""
        with strides_kept(graph):
            for node in list(graph.nodes):
                if (found := _movable(node)) is not None:
                    _move(*found)


def _movable(node: Node) -> tuple[ZeroPad, list[Convolution], tuple[int, ...]] | None:
    """The padding of *node*, its readers, and how much of it they can do on each side, by dimension."""
    pad = read_zero_pad(node)
    if pad is None or not node.users:
        return None
    readers = [read_convolution(user) for user in node.users]
    if any(conv is None or conv.x is not node or node in (conv.weight, conv.bias) for conv in readers):
        return None
    convolutions = [conv for conv in readers if conv is not None]
    shares = []
    for dim, amounts in enumerate(pad.pads[2:]):
        # With more padding than the kernel reaches, some outputs would see only zeros, which not every library
        # supports.
        room = min(conv.reach[dim] - conv.padding[dim] for conv in convolutions)
        numbers = [amount for amount in amounts if isinstance(amount, int)]
        shares.append(max(0, min(*numbers, room)) if len(numbers) == 2 else 0)
    return (pad, convolutions, tuple(shares)) if any(shares) else None


def _move(pad: ZeroPad, convolutions: list[Convolution], shares: tuple[int, ...]) -> None:
    rest = list(pad.pads)
    for dim, share in enumerate(shares, start=2):
        before, after = rest[dim]
        if isinstance(before, int) and isinstance(after, int):  # the share of a pair with a symbol is zero
            rest[dim] = before - share, after - share
    x = pad.x
    if any(pair != (0, 0) for pair in rest):
        x = Writer(pad.node)(aten.constant_pad_nd.default, pad.x, flat_pads(rest), 0.0)
    for conv in convolutions:
        padding = [own + share for own, share in zip(conv.padding, shares, strict=True)]
        args = (x, *conv.node.args[1:4], padding, list(conv.dilation), *conv.node.args[6:])
        replace_by(conv.node, Writer(conv.node)(aten.convolution.default, *args))
