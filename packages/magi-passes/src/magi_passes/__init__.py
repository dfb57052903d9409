# SPDX-License-Identifier: Apache-2.0
"""Inductor passes that compose, leak no configuration and keep dynamic shapes fast."""

from ._chooser import ConvChooser
from ._context import PassContext, current_context
from ._layout import ConvLayoutPass
from ._moments import ChannelMomentsPass
from ._nd_tiling import NDTilingWorkaroundPass
from ._pad_guard import ZeroPadGuardPass
from ._padding import ConvPaddingPass
from ._pass import MagiInductorPass
from ._pipeline import PassPipeline
from ._predicates import is_conv_heavy, is_convolution, is_dynamic
from ._reason import Reason
from ._records import PassRecord, collect_records, pass_records
from ._temporal import TemporalConvPass
from ._work import ConvShare, conv_share
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
