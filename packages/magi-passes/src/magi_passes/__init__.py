# SPDX-License-Identifier: Apache-2.0
"""Inductor passes that compose, leak no configuration and keep dynamic shapes fast."""

from ._choose.chooser import ConvChooser
from ._framework.context import PassContext, Reason, current_context
from ._framework.graph_pass import MagiInductorPass
from ._framework.pipeline import PassPipeline
from ._framework.records import PassRecord, collect_records, pass_records
from ._graph.predicates import is_conv_heavy, is_convolution, is_dynamic
from ._graph.work import ConvShare, conv_share
from ._rewrites.layout import ConvLayoutPass
from ._rewrites.moments import ChannelMomentsPass
from ._rewrites.narrow_sizes import NarrowSizesPass
from ._rewrites.nd_tiling import NDTilingWorkaroundPass
from ._rewrites.padding import ConvPaddingPass, ZeroPadGuardPass
from ._rewrites.temporal import TemporalConvPass
from .errors import (
    BrokenGraphError,
    MagiPassesError,
    PassArgumentError,
    PassArgumentTypeError,
    PassDefinitionError,
    PassesWouldBeDroppedError,
    PassFailedError,
    PassIdentityError,
    UndeclaredConfigMutationError,
    UnknownConfigKeyError,
    UnknownPassNameError,
    UnscopedConfigError,
)


__all__ = [
    "BrokenGraphError",
    "ChannelMomentsPass",
    "ConvChooser",
    "ConvLayoutPass",
    "ConvPaddingPass",
    "ConvShare",
    "MagiInductorPass",
    "MagiPassesError",
    "NDTilingWorkaroundPass",
    "NarrowSizesPass",
    "PassArgumentError",
    "PassArgumentTypeError",
    "PassContext",
    "PassDefinitionError",
    "PassFailedError",
    "PassIdentityError",
    "PassPipeline",
    "PassRecord",
    "PassesWouldBeDroppedError",
    "Reason",
    "TemporalConvPass",
    "UndeclaredConfigMutationError",
    "UnknownConfigKeyError",
    "UnknownPassNameError",
    "UnscopedConfigError",
    "ZeroPadGuardPass",
    "collect_records",
    "conv_share",
    "current_context",
    "is_conv_heavy",
    "is_convolution",
    "is_dynamic",
    "pass_records",
]
