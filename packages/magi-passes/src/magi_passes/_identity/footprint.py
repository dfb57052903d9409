# SPDX-License-Identifier: Apache-2.0
"""What a description of code was made from, to find out later whether any of it was replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_


MISSING = object()
"""Stands for a name that was looked up and not found; a module may define it later."""


@dataclass(frozen=True)
class Footprint:
    """Every place that a walk has read, with the objects that it found there.

    Objects are compared by identity, which shows a function that was replaced, an item that was added to a table, or a
    new name. The comparison takes a small part of the time of a walk.
    """

    names: list[tuple[Mapping[str, object], str, object]] = field(default_factory=list)
    parts: list[tuple[Callable[[], Iterable[object]], Sequence[object]]] = field(default_factory=list)

    def read(self, namespace: Mapping[str, object], name: str) -> object:
        """The value of *name*, or `MISSING`."""
        value = namespace.get(name, MISSING)
        self.names.append((namespace, name, value))
        return value

    def note(self, read: Callable[[], Iterable[object]]) -> None:
        """Remember *read* and the objects that it returns now."""
        self.parts.append((read, tuple(read())))

    def is_unchanged(self) -> bool:
        """Whether a walk would find the same objects in the same places."""
        for namespace, name, value in self.names:
            if namespace.get(name, MISSING) is not value:
                return False
        for read, then in self.parts:
            now = tuple(read())
            if len(now) != len(then) or not all(map(is_, now, then)):
                return False
        return True
