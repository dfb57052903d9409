# SPDX-License-Identifier: Apache-2.0
"""Which of the passes for convolutions a graph gets: by a cost model, or by trying them.

The cost model asks three questions of the graph, with the sizes of the example inputs:

1. Are convolutions most of its arithmetic (`conv_share`)? If not, the graph stays as it is.
2. Are most of those convolutions 3D with few taps, in half precision on CUDA (`TemporalConvPass`)? Then they become 2D,
   and channels-last is forced, because their inputs are written that way.
3. Otherwise, is channels-last expected to be faster (`ConvLayoutPass`)?

Padding and group norms are rewritten in addition to either, because that removes work and adds none. A graph on a GPU
that is changed by any of them also gets tilings of up to three dimensions. The rewrites leave kernels that read one
layout and write another, and with one dimension each load of such a kernel touches a different memory sector. The
decoder of WAN 2.1 takes 403 ms with one dimension and 261 ms with three (one H200, torch 2.11). Tilings of two
dimensions made another model slower, at 0.7 times its speed, so only tuning tries them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from magi_passes import _torch_compat
from magi_passes._framework.arguments import check_max_tiles, check_types, check_value
from magi_passes._framework.context import PassContext, Reason, current_context
from magi_passes._framework.declared import disabled_passes, is_disabled
from magi_passes._framework.graph_pass import MagiInductorPass
from magi_passes._graph.convolution import read_convolution
from magi_passes._graph.predicates import has_collectives, is_dynamic
from magi_passes._graph.strides import keep_strides_of_outputs
from magi_passes._graph.work import conv_share, convolution_flops
from magi_passes._rewrites.layout import ConvLayoutPass
from magi_passes._rewrites.moments import ChannelMomentsPass
from magi_passes._rewrites.nd_tiling import NDTilingWorkaroundPass
from magi_passes._rewrites.padding import ConvPaddingPass
from magi_passes._rewrites.temporal import TemporalConvPass, is_temporal

from .tuning import Choice, choose_fastest


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph


@dataclass(frozen=True)
class ForceChannelsLastPass(MagiInductorPass):
    """Channels-last for every 2D convolution, without a cost model, because `TemporalConvPass` needs it."""

    hook: ClassVar[str] = "post_grad_custom_pre_pass"
    inductor_config_keys_potentially_mutated_by_this_pass: ClassVar[tuple[str, ...]] = ("force_layout_optimization",)

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:  # noqa: ARG002
        """It applies unless the user switched the layout off."""
        return Reason(bool(context.config["layout_optimization"]), "channels-last")

    def __call__(self, graph: Graph) -> None:
        """Make Inductor use the layout without its own decision."""
        keep_strides_of_outputs(graph)
        _torch_compat.config.set_config("force_layout_optimization", True)


@dataclass(frozen=True)
class ConvChooser(MagiInductorPass):
    """Choose among stock, channels-last, ND tiling, temporal convolutions as 2D, and their combinations.

    Example:
        >>> from magi_passes import ConvChooser, PassPipeline
        >>> options = PassPipeline([ConvChooser()]).inductor_options()

    Attributes:
        tune: Compile the candidates, measure each on inputs like the example inputs, and keep the fastest, stock among
            them. The choice is remembered on disk per graph, device and torch release. A graph with collectives is
            not tuned, but gets the choice of the cost model.
        cache_dir: Where choices are remembered; None is a folder in Inductor's cache directory.
        temporal: Whether `TemporalConvPass` may be chosen.
        layout: Whether channels-last may be chosen.
        nd_tiling: Whether ND tiling may be chosen.
        max_tiles: The most tile dimensions that may be chosen, 2 or 3.
        min_share: The share of arithmetic in convolutions below which a graph is left alone.
    """

    hook: ClassVar[str] = "post_grad_custom_pre_pass"
    inductor_config_keys_potentially_mutated_by_this_pass: ClassVar[tuple[str, ...]] = (
        *NDTilingWorkaroundPass.inductor_config_keys_potentially_mutated_by_this_pass,
        *ConvLayoutPass.inductor_config_keys_potentially_mutated_by_this_pass,
    )

    tune: bool = False
    cache_dir: str | None = None
    temporal: bool = True
    layout: bool = True
    nd_tiling: bool = True
    max_tiles: int = 3
    min_share: float = 0.5

    def __post_init__(self) -> None:
        """Raise for values that no graph could satisfy.

        Raises:
            PassArgumentTypeError: A field has another type than it is annotated with.
            PassArgumentError: *max_tiles* is neither 2 nor 3, or *min_share* is not between 0 and 1.
        """
        check_types(self)
        check_max_tiles(self)
        rule = "it is a share of the arithmetic; use a number from 0 to 1"
        check_value(self, "min_share", holds=0 <= self.min_share <= 1, rule=rule)

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        """It applies if convolutions are most of the work, and some passes are expected, or measured, to be faster."""
        share = conv_share(graph).flops
        if share < self.min_share:
            return Reason(False, f"{share:.0%} of the arithmetic is in convolutions")
        if self._is_tuned(graph):
            choice = self._tuned(graph, context)
            return Reason(bool(choice.passes), choice.text)
        plan = self._planned(graph, context)
        names = " + ".join(type(part).__name__ for part in plan) or "nothing to gain"
        not_tuned = "; not tuned, because the graph has collectives" if self.tune else ""
        return Reason(bool(plan), f"{share:.0%} of the arithmetic is in convolutions: {names}{not_tuned}")

    def __call__(self, graph: Graph) -> None:
        """Run the chosen passes in order, each if it applies to the graph that the earlier ones returned."""
        context = current_context() or PassContext()
        plan = self._tuned(graph, context).passes if self._is_tuned(graph) else self._planned(graph, context)
        for part in plan:
            if part.is_applicable(graph, context):
                part(graph)

    def _is_tuned(self, graph: Graph) -> bool:
        # Processes that time a candidate a different number of times would wait for each other without end.
        return self.tune and not has_collectives(graph)

    def _planned(self, graph: Graph, context: PassContext) -> tuple[MagiInductorPass, ...]:
        convolutions = [conv for node in graph.nodes if (conv := read_convolution(node)) is not None]
        over_time = sum(convolution_flops(conv) for conv in convolutions if is_temporal(conv))
        mostly_temporal = over_time > 0.5 * sum(map(convolution_flops, convolutions))
        if self.temporal and mostly_temporal and TemporalConvPass().is_applicable(graph, context):
            wanted: Sequence[MagiInductorPass] = (*_rewrites(), TemporalConvPass(), ForceChannelsLastPass())
        elif self.layout and ConvLayoutPass().is_applicable(graph, context):
            wanted = (*_rewrites(), ConvLayoutPass())
        else:
            wanted = _rewrites()
        plan = [part for part in wanted if self._may(part) and part.is_applicable(graph, context)]
        on_gpu = any(conv.x.meta["val"].device.type != "cpu" for conv in convolutions)
        tiling = NDTilingWorkaroundPass(None if plan and on_gpu else OLD_TORCH, self.max_tiles, static=bool(plan))
        return (*plan, *(part for part in (tiling,) if self._may(part) and part.is_applicable(graph, context)))

    def _may(self, part: MagiInductorPass) -> bool:
        allowed = {
            TemporalConvPass: self.temporal,
            ConvLayoutPass: self.layout,
            ForceChannelsLastPass: self.layout,
            NDTilingWorkaroundPass: self.nd_tiling,
        }
        return allowed.get(type(part), True) and not is_disabled(part, disabled_passes())

    def _tuned(self, graph: Graph, context: PassContext) -> Choice:
        candidates = [tuple(part for part in plan if self._may(part)) for plan in self._candidates(graph, context)]
        return choose_fastest(graph, context, list(dict.fromkeys(candidates)), self.cache_dir)

    def _candidates(self, graph: Graph, context: PassContext) -> list[tuple[MagiInductorPass, ...]]:
        """The plans to try: stock, what the cost model would choose, and each layout with each tiling."""
        tilings: list[tuple[MagiInductorPass, ...]] = [()]
        # The tiling keys affect Triton code only.
        on_gpu = any(isinstance(x, torch.Tensor) and x.device.type != "cpu" for x in context.example_inputs)
        if is_dynamic(graph) and on_gpu:
            tilings += [(NDTilingWorkaroundPass(None, tiles),) for tiles in range(2, self.max_tiles + 1)]
        bases: list[tuple[MagiInductorPass, ...]] = [(), (*_rewrites(), ForceChannelsLastPass())]
        if TemporalConvPass().is_applicable(graph, context):
            bases.append((*_rewrites(), TemporalConvPass(), ForceChannelsLastPass()))
        return [(), self._planned(graph, context), *((*base, *tiling) for base in bases for tiling in tilings)]


# Before this release, Inductor itself proposed no tilings for symbolic sizes.
OLD_TORCH = NDTilingWorkaroundPass.max_torch


def _rewrites() -> tuple[MagiInductorPass, ...]:
    """The rewrites that every plan begins with."""
    return (ConvPaddingPass(), ChannelMomentsPass())
