# SPDX-License-Identifier: Apache-2.0
"""Channels-last convolutions for dynamic graphs on CUDA."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch.fx.experimental.symbolic_shapes import has_free_symbols

from magi_passes import _torch_compat
from magi_passes._framework.arguments import check_nodes_per_conv, check_types
from magi_passes._framework.context import Reason
from magi_passes._framework.graph_pass import MagiInductorPass
from magi_passes._graph.convolution import Convolution, read_convolution
from magi_passes._graph.predicates import is_conv_heavy
from magi_passes._graph.strides import keep_strides_of_outputs
from magi_passes._graph.work import convolution_flops


if TYPE_CHECKING:
    from torch.fx import Graph

    from magi_passes._framework.context import PassContext


# How long a convolution takes channels-last, relative to channels-first: the numbers of Inductor's own decision
# (decide_layout_opt in torch/_inductor/graph.py), measured there over the convolutions of a benchmark suite.
RELATIVE_TIME = {"grouped": 1.358, "default": 0.823, "narrowing": 0.725, "small": 0.783}


def kind_of(conv: Convolution) -> str:
    """The class of *conv* in `RELATIVE_TIME`; depthwise convolutions do not count as grouped."""
    out, channels = conv.weight.meta["val"].shape[:2]
    if conv.groups > 1 and channels > 1:
        return "grouped"
    if out <= 64 and channels <= 64:
        return "small"
    if out * 2 <= channels and conv.kernel[0] > 1:
        return "narrowing"
    return "default"


@dataclass(frozen=True)
class ConvLayoutPass(MagiInductorPass):
    """Turn Inductor's channels-last layout on for convolutions of symbolic size on CUDA if it is expected to be faster.

    Inductor decides by the share of each kind of convolution, but does not decide at all if a shape is symbolic
    (`decide_layout_opt`, pytorch issue 102670). This pass makes the same decision with the sizes of the example inputs.
    Static graphs, graphs on the CPU and graphs whose layout the user chose are left to Inductor.

    Attributes:
        nodes_per_conv: The threshold of `is_conv_heavy`.
    """

    inductor_config_keys_potentially_mutated_by_this_pass: ClassVar[tuple[str, ...]] = ("force_layout_optimization",)

    nodes_per_conv: int = 300

    def __post_init__(self) -> None:
        """Raise for a value that cannot be a threshold.

        Raises:
            PassArgumentTypeError: *nodes_per_conv* is not an int.
            PassArgumentError: It is not positive.
        """
        check_types(self)
        check_nodes_per_conv(self)

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        """It applies to symbolic convolutions on CUDA that are expected to be faster channels-last."""
        if not context.config["layout_optimization"]:
            return Reason(False, "layout_optimization is off")
        if "force_layout_optimization" in context.user_keys:
            return Reason(False, "you set force_layout_optimization")
        convolutions = [conv for node in graph.nodes if (conv := read_convolution(node)) is not None]
        operands = [operand.meta["val"] for conv in convolutions for operand in (conv.x, conv.weight)]
        if not convolutions or any(value.device.type != "cuda" for value in operands):
            return Reason(False, "no forward convolution on CUDA")
        if not any(map(has_free_symbols, operands)):
            return Reason(False, "static: Inductor decides itself")
        if not is_conv_heavy(graph, self.nodes_per_conv):
            return Reason(False, "not convolution-heavy")
        if not context.is_inference:
            return _training_verdict(convolutions)
        flops: dict[str, float] = defaultdict(float)
        for conv in convolutions:
            flops[kind_of(conv)] += convolution_flops(conv)
        expected = sum(RELATIVE_TIME[kind] * count for kind, count in flops.items())
        relative = expected / (sum(flops.values()) or 1.0)
        return Reason(relative <= 1, f"channels-last is expected to take {relative:.2f} of the time")

    def __call__(self, graph: Graph) -> None:
        """Make Inductor use the layout without its own decision."""
        keep_strides_of_outputs(graph)
        _torch_compat.config.set_config("force_layout_optimization", True)


def _training_verdict(convolutions: list[Convolution]) -> Reason:
    """Inductor's rule for training: no grouped or narrowing convolutions, and not only small ones."""
    kinds = {kind_of(conv) for conv in convolutions}
    if kinds & {"grouped", "narrowing"}:
        return Reason(False, "training with grouped or narrowing convolutions")
    return Reason(kinds != {"small"}, "training" if kinds != {"small"} else "training with small convolutions only")
