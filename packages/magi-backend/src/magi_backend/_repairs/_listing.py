# SPDX-License-Identifier: Apache-2.0
"""The defects in this folder."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path

from ._defect import Defect


@functools.cache
def known_defects() -> tuple[Defect, ...]:
    """Every defect in this folder, by name. Modules whose names start with an underscore hold what repairs share."""
    folder, package = str(Path(__file__).parent), __name__.rpartition(".")[0]
    names = sorted(module.name for module in pkgutil.iter_modules([folder]) if not module.name.startswith("_"))
    return tuple(importlib.import_module(f"{package}.{name}").DEFECT for name in names)


def active_defects(release: tuple[int, ...]) -> tuple[Defect, ...]:
    """The defects that the torch *release* has."""
    return tuple(defect for defect in known_defects() if defect.concerns(release))
