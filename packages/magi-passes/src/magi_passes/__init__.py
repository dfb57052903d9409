# SPDX-License-Identifier: Apache-2.0
"""Inductor passes that compose, leak no configuration and keep dynamic shapes fast."""

from ._choose import ConvChooser
from ._framework.adapt import adapt
from ._framework.compilation import PassContext, PassRecord, Reason, collect_records, current_context, pass_records
from ._framework.graph_pass import MagiInductorPass
from ._framework.pipeline import PassPipeline
from ._graph.nodes import conv_share, is_conv_heavy, is_convolution, is_dynamic
from ._rewrites.attention import WrittenAttentionPass
from ._rewrites.attention_plans import AttentionPlansPass
from ._rewrites.code_generation import ConvLayoutPass, NarrowSizesPass, NDTilingWorkaroundPass
from ._rewrites.few_channels import FewOutputChannelsPass
from ._rewrites.masks import AttentionMaskPass
from ._rewrites.moments import ChannelMomentsPass
from ._rewrites.padding import ConvPaddingPass, ZeroPadGuardPass
from ._rewrites.temporal import TemporalConvPass
from ._rewrites.wide_heads import WideHeadsPass
from .errors import MagiPassesError, PassFailedError, UnscopedConfigError


ND_TilingWorkaroundPass = NDTilingWorkaroundPass  # as MagiCompiler calls it

__all__ = [
    "AttentionMaskPass",
    "AttentionPlansPass",
    "ChannelMomentsPass",
    "ConvChooser",
    "ConvLayoutPass",
    "ConvPaddingPass",
    "FewOutputChannelsPass",
    "MagiInductorPass",
    "MagiPassesError",
    "NDTilingWorkaroundPass",
    "NarrowSizesPass",
    "PassContext",
    "PassFailedError",
    "PassPipeline",
    "PassRecord",
    "Reason",
    "TemporalConvPass",
    "UnscopedConfigError",
    "WideHeadsPass",
    "WrittenAttentionPass",
    "ZeroPadGuardPass",
    "adapt",
    "collect_records",
    "conv_share",
    "current_context",
    "is_conv_heavy",
    "is_convolution",
    "is_dynamic",
    "pass_records",
]
