# SPDX-License-Identifier: Apache-2.0
"""Entries of tuples, lists and dicts, read without any method that a subclass overrides."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from .values import Group, Known, Unknown, Value


TABLES = (dict, MappingProxyType, tuple, list)


def items_of(value: Value) -> tuple[Value, ...]:
    """What iteration over *value* can give."""
    match value:
        case Group(items=items):
            return tuple(item for _, values in items for item in values)
        case Known(obj=obj, how=how) if isinstance(obj, dict | MappingProxyType):
            return tuple(Known(key, how) for key, _ in _pairs(obj))
        case Known(obj=obj, how=how) if isinstance(obj, tuple | list):
            return tuple(Known(item, f"{how}[{at}]") for at, item in _pairs(obj))
    return (Unknown("an item is known at run time"),)


def entries_of(value: Value, at: int) -> tuple[Value, ...]:
    """What unpacking *value* can give at the position *at*."""
    match value:
        case Group(items=items) if at < len(items):
            return items[at][1]
        case Known(obj=obj, how=how) if isinstance(obj, tuple | list) and at < len(obj):
            return (Known(_pairs(obj)[at][1], f"{how}[{at}]"),)
    return (Unknown("a part of an item is known at run time"),)


def chosen(table: Value, keys: list[Known]) -> tuple[Value, ...]:
    """The entries of a table for the keys that are known, or all entries.

    A table that exists already and can still change may have other entries when it is read.
    """
    entries: list[tuple[object, tuple[Value, ...]]] = []
    later: tuple[Value, ...] = ()
    match table:
        case Group(items=items):
            entries = list(items)
        case Known(obj=obj, how=how):
            entries = [(key, (Known(value, f"{how}[{_key_text(key)}]"),)) for key, value in _pairs(obj)]
    wanted = [key.obj for key in keys]
    hits = [values for key, values in entries if any(type(key) is type(one) and key == one for one in wanted)]
    if not hits and isinstance(table, Known) and isinstance(table.obj, dict | list):
        text = f"no entry {keys[0].obj!r}" if len(keys) == 1 else "no entries" if not entries else "not every entry"
        later = (Unknown(f"{table.how} has {text} yet", unread=bool(keys) or not entries),)
    return (*(value for values in (hits or [values for _, values in entries]) for value in values), *later)


def _pairs(table: Any) -> list[tuple[object, Any]]:
    """The keys and items of a table, read without any method that a subclass overrides."""
    if isinstance(table, dict):
        return list(dict.items(table))
    if isinstance(table, MappingProxyType):
        return list(table.items())
    kind = tuple if isinstance(table, tuple) else list
    return list(enumerate(kind.__iter__(table)))


def _key_text(key: object) -> str:
    return repr(key) if isinstance(key, str | int | bool | float | bytes | type(None)) else f"a {type(key).__name__}"
