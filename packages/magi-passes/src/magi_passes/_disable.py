# SPDX-License-Identifier: Apache-2.0
"""Passes that the environment switches off."""

from __future__ import annotations

import os

from ._pass import MagiInductorPass


DISABLE_VARIABLE = "MAGI_PASSES_DISABLE"


def disabled_passes() -> frozenset[str]:
    """The class names in the environment variable MAGI_PASSES_DISABLE, separated by commas; ``all`` is every pass."""
    return frozenset(name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",") if name.strip())


def is_disabled(graph_pass: MagiInductorPass, disabled: frozenset[str]) -> bool:
    """Whether MAGI_PASSES_DISABLE names the class of *graph_pass*, or all."""
    return "all" in disabled or type(graph_pass).__name__ in disabled
