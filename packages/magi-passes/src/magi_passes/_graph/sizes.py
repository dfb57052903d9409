# SPDX-License-Identifier: Apache-2.0
"""Sizes as numbers, for decisions that must not guard on them."""

from __future__ import annotations

from typing import Any

from magi_passes import _torch_compat


def hinted(extent: Any) -> int:
    """*extent* as an int: for a symbol, its value for the example inputs; for an unbacked symbol, 1."""
    return extent if isinstance(extent, int) else _torch_compat.size_hint(extent)
