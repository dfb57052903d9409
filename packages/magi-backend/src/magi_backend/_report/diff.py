# SPDX-License-Identifier: Apache-2.0
"""The lines in which two texts differ."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


if TYPE_CHECKING:
    from collections.abc import Iterator


Kind = Literal["same", "added", "removed", "skipped"]


@dataclass(frozen=True)
class DiffLine:
    """A line of a diff; *text* of a skipped one says how many lines are left out."""

    kind: Kind
    text: str


def diff_lines(before: str, after: str, around: int = 2) -> list[DiffLine]:
    """The lines that differ, each with *around* equal lines before and after it.

    Example:
        >>> texts = ("a b c".replace(" ", chr(10)), "a c".replace(" ", chr(10)))
        >>> [(line.kind, line.text) for line in diff_lines(*texts, around=1)]
        [('same', 'a'), ('removed', 'b'), ('same', 'c')]
    """
    return list(_lines(before.splitlines(), after.splitlines(), around))


def changed_lines(lines: list[DiffLine]) -> tuple[int, int]:
    """How many lines were added, and how many removed."""
    return sum(line.kind == "added" for line in lines), sum(line.kind == "removed" for line in lines)


def _lines(before: list[str], after: list[str], around: int) -> Iterator[DiffLine]:
    # Equal lines at both ends are most of a graph, and difflib is slow for them.
    head = 0
    while head < min(len(before), len(after)) and before[head] == after[head]:
        head += 1
    tail = 0
    while tail < min(len(before), len(after)) - head and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    start, ends = max(head - around, 0), (len(before) - max(tail - around, 0), len(after) - max(tail - around, 0))
    old, new = before[start : ends[0]], after[start : ends[1]]
    shown = 0
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(around):
        skipped = start + group[0][1] - shown
        if skipped:
            yield DiffLine("skipped", f"{skipped} lines")
        for kind, old_start, old_end, new_start, new_end in group:
            if kind == "equal":
                yield from (DiffLine("same", text) for text in old[old_start:old_end])
            else:
                yield from (DiffLine("removed", text) for text in old[old_start:old_end])
                yield from (DiffLine("added", text) for text in new[new_start:new_end])
        shown = start + group[-1][2]
    if shown and shown < len(before):
        yield DiffLine("skipped", f"{len(before) - shown} lines")
