# SPDX-License-Identifier: Apache-2.0
"""Passes that change how Inductor writes kernels: their layout, their tiles, and the type of their sizes."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import has_free_symbols

from magi_passes import _torch_compat
from magi_passes._framework.compilation import PassContext, Reason, current, memo_of_current
from magi_passes._framework.graph_pass import CheckedPass, MagiInductorPass
from magi_passes._graph.nodes import (
    Convolution,
    all_nodes,
    convolutions_of,
    flops,
    is_conv_heavy,
    is_convolution,
    is_dynamic,
)
from magi_passes._graph.strides import keep_strides_of_outputs
from magi_passes.errors import PassArgumentError


# How long a convolution takes channels-last, relative to channels-first: the numbers of Inductor's own decision
# (decide_layout_opt in torch/_inductor/graph.py), measured there over the convolutions of a benchmark suite. For groups
# of 24 channels, cuDNN copies image, weights and result into a layout of its own; the kernels of regnety_032 take
# 4.90 ms, and 3.73 channels-first (one H100, torch 2.11). Groups of 4, 8, 16 and 32 are not copied (resnext50_32x4d).
RELATIVE_TIME = {"grouped": 1.358, "copied": 3.3, "default": 0.823, "narrowing": 0.725, "small": 0.783}


def kind_of(conv: Convolution) -> str:
    """The class of *conv* in `RELATIVE_TIME`; depthwise convolutions do not count as grouped."""
    out, channels = conv.weight.meta["val"].shape[:2]
    if conv.groups > 1 and channels > 1:
        return "grouped" if channels.bit_count() == 1 else "copied"
    if out <= 64 and channels <= 64:
        return "small"
    if out * 2 <= channels and conv.kernel[0] > 1:
        return "narrowing"
    return "default"


@dataclass(frozen=True)
class ConvLayoutPass(CheckedPass):
    """Turn Inductor's channels-last layout on for convolutions of symbolic size on CUDA if it is expected to be faster.

    Inductor decides by the share of each kind of convolution, but does not decide at all if a shape is symbolic
    (`decide_layout_opt`, pytorch issue 102670). This pass makes the same decision with the sizes of the example inputs.
    Static graphs, graphs on the CPU and graphs whose layout the user chose are left to Inductor.

    Attributes:
        nodes_per_conv: The threshold of `is_conv_heavy`.
    """

    inductor_config_keys_potentially_mutated_by_this_pass: ClassVar[tuple[str, ...]] = ("force_layout_optimization",)

    nodes_per_conv: int = 300

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        """It applies to symbolic convolutions on CUDA that are expected to be faster channels-last."""
        if not context.config["layout_optimization"]:
            return Reason(False, "layout_optimization is off")
        if "force_layout_optimization" in context.user_keys:
            return Reason(False, "you set force_layout_optimization")
        convolutions = convolutions_of(graph)
        operands = [operand.meta["val"] for conv in convolutions for operand in (conv.x, conv.weight)]
        if not convolutions or any(value.device.type != "cuda" for value in operands):
            return Reason(False, "no forward convolution on CUDA")
        if not any(map(has_free_symbols, operands)):
            return Reason(False, "static: Inductor decides itself")
        if not is_conv_heavy(graph, self.nodes_per_conv):
            return Reason(False, "not convolution-heavy")
        if not context.is_inference:
            # Inductor's rule for training: no grouped or narrowing convolutions, and not only small ones.
            kinds = {kind_of(conv) for conv in convolutions}
            if kinds & {"grouped", "copied", "narrowing"}:
                return Reason(False, "training with grouped or narrowing convolutions")
            only_small = kinds == {"small"}
            return Reason(not only_small, "training with small convolutions only" if only_small else "training")
        work: dict[str, float] = defaultdict(float)
        for conv in convolutions:
            work[kind_of(conv)] += flops(conv.node)
        expected = sum(RELATIVE_TIME[kind] * count for kind, count in work.items())
        relative = expected / (sum(work.values()) or 1.0)
        return Reason(relative <= 1, f"channels-last is expected to take {relative:.2f} of the time")

    def __call__(self, graph: Graph) -> None:
        """Make Inductor use the layout without its own decision."""
        keep_strides_of_outputs(graph)
        _torch_compat.config.set_config("force_layout_optimization", True)


@dataclass(frozen=True)
class NDTilingWorkaroundPass(CheckedPass):
    """Make Inductor tile by dimension in dynamic, convolution-heavy graphs, as it does in static graphs.

    Until torch 2.10, the analysis that proposes tilings did not handle symbolic sizes (`extract_normalized_read_writes`
    in torch/_inductor/tiling_utils.py). Since 2.11 it does, so there this pass applies only if *max_torch* says so.

    Reductions are left as they are. With ``triton.tile_reductions``, Triton adds up a tile of three dimensions, and
    where two of them are reduced and the block of the third has several elements, the sums are wrong for some sizes: of
    a (128, 32, 16) tensor over its first and last dimension, for each block of two (Triton 3.6 on one H200; in Triton's
    interpreter they are right).

    Attributes:
        max_torch: Run on torch releases older than this one, such as ``"2.11"`` or ``"2.13.1"``; None runs on all. An
            alpha, a nightly or a release candidate counts as the release that it precedes.
        max_tiles: How many tile dimensions a kernel may have, 2 or 3. A kernel gets three only if it reduces nothing.
        nodes_per_conv: The threshold of `is_conv_heavy`.
        static: Run on static graphs too.
    """

    inductor_config_keys_potentially_mutated_by_this_pass: ClassVar[tuple[str, ...]] = (
        "triton.prefer_nd_tiling",
        "triton.max_tiles",
    )

    max_torch: str | None = "2.11"
    max_tiles: int = 3
    nodes_per_conv: int = 300
    static: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_torch is not None:
            try:
                _torch_compat.config.numbers_of(self.max_torch)
            except ValueError as error:
                raise PassArgumentError(f"NDTilingWorkaroundPass: max_torch={error}") from None

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        """It applies to dynamic, convolution-heavy graphs on older torch if the user has not set ND tiling."""
        numbers = _torch_compat.config.numbers_of
        if self.max_torch is not None and numbers(context.torch_version) >= numbers(self.max_torch):
            return Reason(False, f"torch {context.torch_version} is not older than {self.max_torch}")
        if "triton.prefer_nd_tiling" in context.user_keys:
            return Reason(False, f"you set triton.prefer_nd_tiling={context.config['triton.prefer_nd_tiling']}")
        is_static = not is_dynamic(graph)
        if is_static and not self.static:
            return Reason(False, "static: no placeholder carries a free symbol")
        convolutions, nodes = sum(map(is_convolution, all_nodes(graph))), sum(1 for _ in all_nodes(graph))
        if not is_conv_heavy(graph, self.nodes_per_conv):
            return Reason(False, f"not convolution-heavy: {convolutions} convolutions in {nodes} nodes")
        return Reason(True, f"{'static' if is_static else 'dynamic'}, {convolutions} convolutions in {nodes} nodes")

    def __call__(self, graph: Graph) -> None:  # noqa: ARG002
        """Set the two keys."""
        _torch_compat.config.set_config("triton.prefer_nd_tiling", True)
        _torch_compat.config.set_config("triton.max_tiles", self.max_tiles)


@dataclass(frozen=True)
class NarrowSizesPass(MagiInductorPass):
    """Pass symbolic sizes to Triton kernels in 32 bits, and compute numbers in 64 that 32 bits do not hold.

    Inductor passes sizes in 64 bits, so every index with a symbol is computed and divided in 64 bits. Here a kernel
    that counts its elements in 32 bits gets sizes in 32 bits. Guards ensure that everything that it computes from
    sizes stays below 2**31; a larger size compiles once more, with 64 bits where they are needed. Places that a kernel
    computes with floats, as those that an interpolation reads from, have 32 bits as well if the largest one fits.

    Inductor computes a number such as ``torch.arange(n) * 40000`` in 32 bits where those count the elements, and does
    not notice that it overflows. A kernel with such a number counts in 64 bits, in static graphs as well.

    Example:
        >>> from magi_passes import NarrowSizesPass, PassPipeline
        >>> options = PassPipeline([NarrowSizesPass()]).inductor_options()
    """

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:  # noqa: ARG002
        """It applies on a GPU, if the call of Inductor passed through this package."""
        values = [value for node in graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor)]
        if not any(value.device.type == "cuda" for value in values):
            return Reason(False, "no tensor on CUDA")
        if current().compilation is None:
            return Reason(False, "called outside of a compilation")
        return Reason(True, "symbolic sizes" if any(map(has_free_symbols, values)) else "numbers may need 64 bits")

    def __call__(self, graph: Graph) -> None:  # noqa: ARG002
        """Make code generation choose the width of sizes and numbers."""
        compilation = current().compilation
        if compilation is not None:
            compilation.memos.setdefault("narrow sizes", {})
            _torch_compat.narrow.install_narrow_sizes(functools.partial(memo_of_current, "narrow sizes"))
