# SPDX-License-Identifier: Apache-2.0
"""Passes that the environment switches off."""

from __future__ import annotations

import os
import weakref
from difflib import get_close_matches

from magi_passes.errors import UnknownPassNameError


DISABLE_VARIABLE = "MAGI_PASSES_DISABLE"
_ALL = "all"
# Weak references to classes, so that a pass of a test or a notebook is forgotten together with its class.
_known: weakref.WeakSet[type] = weakref.WeakSet()


def note_pass(cls: type) -> None:
    """Remember *cls*, the class of a pass, as one that the environment variable may name."""
    _known.add(cls)


def disabled_passes() -> frozenset[str]:
    """The class names in the environment variable MAGI_PASSES_DISABLE, separated by commas; ``all`` is every pass.

    Raises:
        UnknownPassNameError: A name is not the class of a pass that is loaded.
    """
    names = frozenset(name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",") if name.strip())
    if names:
        known = {_ALL, *(cls.__name__ for cls in list(_known))}
        for name in sorted(names - known):
            close = get_close_matches(name, sorted(known), n=1)
            meant = f" Did you mean {close[0]!r}?" if close else ""
            msg = (
                f"{DISABLE_VARIABLE} names {name!r}, which is not a pass.{meant} Give the names of classes, separated "
                f"by commas, or 'all'. Loaded are {', '.join(sorted(known - {_ALL}))}."
            )
            raise UnknownPassNameError(msg)
    return names


def is_disabled(graph_pass: object, disabled: frozenset[str]) -> bool:
    """Whether *disabled* has the name of the class of *graph_pass*, or ``all``."""
    return _ALL in disabled or type(graph_pass).__name__ in disabled
