# SPDX-License-Identifier: Apache-2.0
"""Scale the rows of a matrix, with one operator that is registered when this package is imported."""

from __future__ import annotations

from ._ops import Scale as Scale
from ._ops import scale_rows as scale_rows


__all__ = ["Scale", "scale_rows"]
