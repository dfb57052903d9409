# SPDX-License-Identifier: Apache-2.0
"""Graph breaks and failed guards, read from what Dynamo reports."""

from __future__ import annotations

import re
from typing import Any

from .hidden import hidden_in_guard, without_fractions
from .records import GraphBreak, Recompilation


def graph_break(found: Any) -> GraphBreak:
    """The record of a graph break *found* by Dynamo, an object with a ``reason`` and a ``user_stack``."""
    lines = [line.strip() for line in without_fractions(str(found.reason)).splitlines() if line.strip()]
    hints = tuple(line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: "))
    reason = lines[0] if lines else "unknown"
    if not found.user_stack:
        return GraphBreak("an unknown line", "", reason, hints)
    frame = found.user_stack[-1]
    return GraphBreak(f"{frame.filename}:{frame.lineno}", frame.name, reason, hints)


_FAILED = re.compile(r"^(\d+/\d+(?:_\d+)?): (.*)", re.DOTALL)
_STACK = re.compile(r'File "([^"]+)", line (\d+)')
_COMMENT = re.compile(r"\s{2,}# ")


def recompilation(reason: str) -> Recompilation | None:
    """The record of a recompilation for which Dynamo gives *reason*; None if that is empty.

    Example:
        >>> recompilation("0/0: tensor 'x' size mismatch at index 0. expected 3, actual 5").guard
        "tensor 'x' size mismatch at index 0. expected 3, actual 5"
    """
    if not reason:
        return None
    found = _FAILED.match(reason)
    of, text = (found[1], found[2]) if found else ("", reason)
    guard, _, stack = text.partition("\nUser stack trace:")
    places = _STACK.findall(stack)
    guard = _COMMENT.split(guard.strip(), maxsplit=1)[0]
    return Recompilation(of, hidden_in_guard(guard), ":".join(places[-1]) if places else "")
