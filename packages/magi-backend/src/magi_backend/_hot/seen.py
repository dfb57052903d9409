# SPDX-License-Identifier: Apache-2.0
"""The sizes that a graph was called with, counted to find those that come back. Nothing here grows without bound."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .inputs import Key, SizeInput


MOST_SIZES = 64
"""How many sizes without code of their own are remembered; the least recently used one is forgotten first."""

MOST_VALUES = 64
"""How many values a symbol may take. One with more, such as a decode position, never comes back often enough."""


@dataclass
class Seen:
    """What is known of one size.

    Attributes:
        calls: Calls that ran the code for any size.
        hits: Calls that ran code of its own that was dropped again since.
        left: Calls until code is made.
        made: How often code was made.
        failed: Why code could not be made, or empty.
    """

    calls: int = 0
    hits: int = 0
    left: int = 0
    made: int = 0
    failed: str = ""


class SeenSizes:
    """Counts the calls that found no code for their size. The caller holds a lock.

    Args:
        inputs: The size inputs of the graph.
        hot_after: The call with the same sizes, counted from 1, at which code is made for them.
    """

    def __init__(self, inputs: Sequence[SizeInput], hot_after: int) -> None:
        self._inputs = inputs
        self._hot_after = hot_after
        self._values: list[set[int]] = [set() for _ in inputs]
        self.table: OrderedDict[Key, Seen] = OrderedDict()
        self.calls = 0
        self.dropped = 0
        self.blocked = ""

    def count(self, key: Key) -> bool:
        """Count a call. Returns whether code must be made in this call."""
        self.calls += 1
        seen = self.table.get(key)
        if seen is None:
            seen = Seen(left=self._hot_after)
            self._block(key)
            self._keep(key, seen)
        else:
            self.table.move_to_end(key)
        seen.calls += 1
        seen.left -= 1
        return seen.left <= 0 and not self.blocked and not seen.failed

    def take(self, key: Key) -> Seen:
        """Remove *key*, which has code of its own from now on, and return what is known of it."""
        return self.table.pop(key, None) or Seen()

    def put_back(self, key: Key, seen: Seen) -> None:
        """Count *key* again, whose code was dropped; it must come back twice as often as the last time."""
        seen.left = self._hot_after * 2**seen.made
        self._keep(key, seen)

    def fail(self, key: Key, reason: str) -> None:
        """Remember that no code could be made for *key*, and why."""
        seen = self.table.pop(key, None) or Seen()
        seen.failed = reason
        self._keep(key, seen)

    def _keep(self, key: Key, seen: Seen) -> None:
        if len(self.table) >= MOST_SIZES:
            self.table.popitem(last=False)
            self.dropped += 1
        self.table[key] = seen

    def _block(self, key: Key) -> None:
        if self.blocked:
            return
        for size, values, value in zip(self._inputs, self._values, key, strict=True):
            values.add(value)
            if len(values) > MOST_VALUES:
                self.blocked = f"{size.path} has had more than {MOST_VALUES} values"
                self._values = [set() for _ in self._inputs]
                return
