# SPDX-License-Identifier: Apache-2.0
"""Tilings with several dimensions for the dynamic kernels of convolutional models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from magi_passes import _torch_compat
from magi_passes._framework.arguments import check_max_tiles, check_nodes_per_conv, check_types
from magi_passes._framework.context import Reason
from magi_passes._framework.graph_pass import MagiInductorPass
from magi_passes._graph.predicates import all_nodes, is_conv_heavy, is_convolution, is_dynamic
from magi_passes.errors import PassArgumentError


if TYPE_CHECKING:
    from torch.fx import Graph

    from magi_passes._framework.context import PassContext


@dataclass(frozen=True)
class NDTilingWorkaroundPass(MagiInductorPass):
    """Make Inductor tile by dimension in dynamic, convolution-heavy graphs, as it does in static graphs.

    Until torch 2.10, the analysis that proposes tilings did not handle symbolic sizes (`extract_normalized_read_writes`
    in torch/_inductor/tiling_utils.py). Since 2.11 it does, so there this pass applies only if *max_torch* says so.

    Attributes:
        max_torch: Run on torch releases older than this one, such as ``"2.11"`` or ``"2.13.1"``; None runs on all. An
            alpha, a nightly or a release candidate counts as the release that it precedes.
        max_tiles: How many tile dimensions a kernel may have, 2 or 3. A kernel gets three only if it reduces nothing
            and its grid is within the limits of CUDA for all sizes that the guards of the compilation admit.
        nodes_per_conv: The threshold of `is_conv_heavy`.
        static: Run on static graphs too.
    """

    inductor_config_keys_potentially_mutated_by_this_pass: ClassVar[tuple[str, ...]] = (
        "triton.prefer_nd_tiling",
        "triton.max_tiles",
        "triton.tile_reductions",
    )

    max_torch: str | None = "2.11"
    max_tiles: int = 3
    nodes_per_conv: int = 300
    static: bool = False

    def __post_init__(self) -> None:
        """Raise for values that no torch release accepts.

        Raises:
            PassArgumentTypeError: A field has another type than it is annotated with.
            PassArgumentError: *max_tiles* is neither 2 nor 3, *nodes_per_conv* is not positive, or *max_torch* is not
                a release.
        """
        check_types(self)
        check_max_tiles(self)
        check_nodes_per_conv(self)
        if self.max_torch is not None:
            try:
                _torch_compat.machine.numbers_of(self.max_torch)
            except ValueError as error:
                msg = f"NDTilingWorkaroundPass: max_torch={error}"
                raise PassArgumentError(msg) from None

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        """It applies to dynamic, convolution-heavy graphs on older torch if the user has not set ND tiling."""
        if self._is_too_new(context):
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

    def _is_too_new(self, context: PassContext) -> bool:
        numbers = _torch_compat.machine.numbers_of
        return self.max_torch is not None and numbers(context.torch_version) >= numbers(self.max_torch)

    def __call__(self, graph: Graph) -> None:  # noqa: ARG002
        """Set the three keys."""
        _torch_compat.config.set_config("triton.prefer_nd_tiling", True)
        _torch_compat.config.set_config("triton.max_tiles", self.max_tiles)
        _torch_compat.config.set_config("triton.tile_reductions", True)
