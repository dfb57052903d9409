# SPDX-License-Identifier: Apache-2.0
"""Inductor passes that compose, leak no configuration and keep dynamic shapes fast."""

from ._context import PassContext
from ._nd_tiling import NDTilingWorkaroundPass
from ._pass import MagiInductorPass
from ._pipeline import PassPipeline
from ._predicates import is_conv_heavy, is_convolution, is_dynamic
from ._reason import Reason
from ._records import PassRecord, collect_records, pass_records
from .errors import (
    MagiPassesError,
    PassDefinitionError,
    PassesWouldBeDroppedError,
    PassIdentityError,
    UndeclaredConfigMutationError,
    UnknownConfigKeyError,
)


__all__ = [
    "MagiInductorPass",
    "MagiPassesError",
    "NDTilingWorkaroundPass",
    "PassContext",
    "PassDefinitionError",
    "PassIdentityError",
    "PassPipeline",
    "PassRecord",
    "PassesWouldBeDroppedError",
    "Reason",
    "UndeclaredConfigMutationError",
    "UnknownConfigKeyError",
    "collect_records",
    "is_conv_heavy",
    "is_convolution",
    "is_dynamic",
    "pass_records",
]
