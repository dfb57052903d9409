# SPDX-License-Identifier: Apache-2.0
"""How a report names a compilation: the function, its place, and the sizes that it was compiled for."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from magi_backend._records.records import Compilation


_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)$")


def called(compilation: Compilation) -> str:
    """The label of the user if there is one, otherwise the name of the function.

    Example:
        >>> from magi_backend import Compilation
        >>> called(Compilation(0, "graph 0", 1, (), (), function="torch_dynamo_resume_in_step_at_12"))
        'step, after line 12'
    """
    if not compilation.function or not compilation.label.startswith("graph "):
        return compilation.label
    found = _RESUMED.search(compilation.function)
    return f"{found[1]}, after line {found[2]}" if found else compilation.function.replace(".<locals>", "")


def short(place: str) -> str:
    """The end of a path with a line, such as ``model.py:12``."""
    return PurePath(place).name


def summary(inputs: tuple[str, ...], shown: int = 3) -> str:
    """The first inputs, and how many more there are, because parameters make the list long."""
    more = f" and {len(inputs) - shown} more" if len(inputs) > shown else ""
    return ", ".join(inputs[:shown]) + more if inputs else "none"


def state(compilation: Compilation, *, finished: bool = True) -> str:
    """How the compilation ended, in a word or two; empty if it succeeded in the first way."""
    fell_back = any(graph.fell_back for graph in compilation.graphs)
    if compilation.error or (not fell_back and any(graph.error for graph in compilation.graphs)):
        return "failed"
    if fell_back:
        return "fell back"
    if not finished:
        return "not finished"
    if any(not check.agrees for check in compilation.checks):
        return "differs from eager"
    return ""
