# SPDX-License-Identifier: Apache-2.0
"""What of a value counts, read as it is stored: no property, descriptor, ``__getattr__`` or override of it is run.

A walk meets everything that code names, also modules that load a heavy part when it is asked for an attribute, and
proxies that raise when they are. It must neither load nor fail.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any


MISSING: Any = object()
"""Stands for a name that was looked up and not found; a module may define it later."""
C_FUNCTIONS = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
"""Functions written in C, bound or not."""
REMEMBERED = "_magi_identity"
"""The attribute of a class that holds what is known of its identity."""
# Written by Python, some of it long after the class was made. It says nothing about what methods do, or says it in
# memory addresses.
_CLASS_MACHINERY = frozenset(
    {
        *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__slots__", "__slotnames__"),
        *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__type_params__"),
        *("__dataclass_params__", "__orig_bases__", "__parameters__", "__abstractmethods__", "_abc_impl"),
        *("__firstlineno__", "__static_attributes__", "_value2member_map_", REMEMBERED),
    }
)


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


def is_a(value: object, classes: type | tuple[type, ...]) -> bool:
    """`isinstance`, which would ask a proxy for its ``__class__``."""
    return issubclass(type(value), classes)


def stored(value: object) -> Mapping[str, Any]:
    """The attributes that *value* itself holds, by name."""
    try:
        found: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found


def attribute(value: object, name: str) -> Any:
    """What *value* or its class holds as *name*: a property itself, not what it computes; `MISSING` if nothing does."""
    held = stored(value)
    if name in held:
        return held[name]
    for cls in type(value).__mro__:
        if name in vars(cls):
            member = vars(cls)[name]
            try:
                return member.__get__(value) if type(member) is types.MemberDescriptorType else member
            except AttributeError:  # a slot that is not filled
                return MISSING
    return MISSING


def members_of(cls: type) -> dict[str, object]:
    """What the author of *cls*, or a class decorator, put into it, by name."""
    return {
        name: member
        for name, member in sorted(vars(cls).items(), key=lambda pair: pair[0])
        if name not in _CLASS_MACHINERY and not is_a(member, (types.MemberDescriptorType, types.GetSetDescriptorType))
    }


def contents_of(cell: types.CellType) -> tuple[object, ...]:
    """The content of the cell of a closure, as a tuple of one; an empty tuple while the cell has none."""
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return ()
