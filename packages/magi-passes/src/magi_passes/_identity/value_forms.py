# SPDX-License-Identifier: Apache-2.0
"""Stable forms of values: plain ones, containers, instances, and what only exists while a program runs.

A *form* is text that is equal exactly for equal values, in every process.

The functions here differ from those of magi-tritonwrap only where they note a footprint, where a value has no stable
form, and in the values that only one of the two packages meets.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import logging
import os
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from magi_passes._torch_compat import operator_types

from .code import digest
from .footprint import Footprint
from .library import Standing, standing_of


_ATOMS = (type(None), bool, int, str, bytes, complex, type(Ellipsis), type(NotImplemented), range, slice)
_TORCH_ATOMS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_OPERATORS = operator_types()
# These decide when code runs, or hold what belongs to other objects of this process, so their content differs between
# processes.
_RUNTIME = (
    *(type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Semaphore),
    *(threading.local, weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
    *(logging.Logger, type(os.environ)),
)
_LARGEST_TENSOR = 4096


@dataclass(frozen=True)
class Place:
    """How a value is reached, in words, and whose code reads it.

    What the author's own code reads must have a stable form, or an error is raised. What this project reads without a
    stable form, such as a lock or a log, is state, and its form is its type. Of what an installed distribution reads,
    only code and plain values count, because its objects lead to everything that the process holds.
    """

    text: str
    read_by: Standing = Standing.OPEN

    @property
    def is_lenient(self) -> bool:
        """Whether the type of a value without a stable form is its form."""
        return self.read_by is not Standing.OPEN

    def of(self, text: str) -> Place:
        """Another place that the same code reads."""
        return Place(text, self.read_by)

    def inner(self, text: str) -> Place:
        """A part of this place."""
        return Place(self.text + text, self.read_by)


class Walk(Protocol):
    """What the functions below call for the values inside a value."""

    footprint: Footprint

    def form(self, value: Any, place: Place) -> str:
        """The form of *value*, which is found at *place*."""

    def unordered(self, values: Iterable[Any], place: Place) -> list[str]:
        """The forms of the items of a set, in an order that is the same in every process."""

    def unstable(self, value: Any, place: Place) -> str:
        """The form of a value without a stable form, which is its type, or an error."""


def plain_form(walk: Walk, value: Any, place: Place) -> str | None:
    """The form of a value that cannot change and whose identity does not matter; None for any other value."""
    if type(value) in _ATOMS:
        return digest(type(value).__name__, repr(value))
    if type(value) is float:
        return digest("float", value.hex())
    if isinstance(value, enum.Enum):
        return digest("enum", walk.form(type(value), place), str(value.name), walk.form(value.value, place))
    if isinstance(value, _TORCH_ATOMS):
        return digest("torch", type(value).__name__, str(value))
    if isinstance(value, _OPERATORS):
        return digest("operator", str(value))
    if type(value) is tuple:
        return digest("tuple", *(walk.form(item, place.inner(f"[{at}]")) for at, item in enumerate(value)))
    if type(value) is frozenset:
        return digest("frozenset", *walk.unordered(value, place))
    return None


def runtime_form(walk: Walk, value: Any, place: Place) -> str | None:
    """The form of a value that exists only while a program runs: its type, and its name if it has one.

    None for any other.
    """
    if isinstance(value, _RUNTIME):
        return digest("runtime", type_name(type(value)), str(getattr(value, "name", "")))
    if isinstance(value, ContextVar):
        if place.is_lenient:
            return digest("context variable", value.name)
        walk.footprint.note(lambda: _content_of(value))
        return digest("context variable", value.name, walk.form(_content_of(value), place.inner(".get()")))
    if isinstance(value, deque) and place.is_lenient:
        return digest("runtime", "deque")  # a log: what this project and libraries keep in one grows while they run
    return None


def _content_of(variable: ContextVar[Any]) -> tuple[Any, ...]:
    try:
        return (variable.get(),)
    except LookupError:
        return ()


def foreign_form(value: Any, place: Place) -> str | None:
    """The form of a container or an instance that an installed distribution reads; None where others read it.

    A table of settings cannot be told from a table of what the library has seen so far. An edit of the former changes a
    file, which counts.
    """
    return digest("foreign", type_name(type(value))) if place.read_by is Standing.INSTALLED else None


def container_form(walk: Walk, value: Any, place: Place) -> str | None:
    """The form of a list, set or dict, from its items; None for any other value."""
    if type(value) in (list, deque):
        walk.footprint.note(lambda: value)
        return digest("list", *(walk.form(item, place.inner(f"[{at}]")) for at, item in enumerate(value)))
    if type(value) is set:
        walk.footprint.note(lambda: value)
        return digest("set", *walk.unordered(value, place))
    if type(value) in (dict, types.MappingProxyType):
        walk.footprint.note(lambda: (*value.keys(), *value.values()))
        return digest("dict", *items_form(walk, value, place))
    return None


def items_form(walk: Walk, value: Any, place: Place) -> Iterator[str]:
    """The forms of the keys and items of a mapping, in its order."""
    for key, item in tuple(value.items()):
        yield walk.form(key, place.inner(" (a key)"))
        yield walk.form(item, place.inner(f"[{key!r}]" if isinstance(key, str | int) else " (an item)"))


def instance_form(walk: Walk, value: Any, place: Place) -> str:
    """The form of an object, from its class and attributes; for subclasses of containers, from its items too."""
    if standing_of(type(value)) is Standing.LIBRARY:
        return library_instance_form(walk, value, place)
    parts = [walk.form(type(value), place)]
    state = state_of(value)
    walk.footprint.note(lambda: state_of(value).values())
    for name, item in sorted(state.items()):
        parts += [name, walk.form(item, place.inner(f".{name}"))]
    if isinstance(value, dict):
        walk.footprint.note(lambda: (*dict.keys(value), *dict.values(value)))
        parts += items_form(walk, value, place)
    elif isinstance(value, list | tuple | deque):
        walk.footprint.note(lambda: value)
        parts += (walk.form(item, place.inner(f"[{at}]")) for at, item in enumerate(value))
    elif isinstance(value, set | frozenset):
        walk.footprint.note(lambda: value)
        parts += walk.unordered(value, place)
    elif isinstance(value, str | int | float | bytes):
        parts.append(repr(value))
    elif not hasattr(value, "__dict__") and not any("__slots__" in vars(base) for base in type(value).__mro__):
        return walk.unstable(value, place)  # a type of an extension, whose content cannot be read
    return digest("instance", *parts)


def library_instance_form(walk: Walk, value: Any, place: Place) -> str:
    """The form of an object of a library, from what pickle would take it apart into."""
    if isinstance(value, torch.Tensor):
        return tensor_form(walk, value, place)
    if isinstance(value, dataclasses.Field):
        fields = (value.name, value.default, value.default_factory, dict(value.metadata), value.init)
        return digest("field", *(walk.form(part, place) for part in fields))
    if isinstance(value, torch.nn.Module):
        return digest("module", type_name(type(value)), walk.form(vars(value), place))
    if isinstance(value, dict | list | set | deque):
        walk.footprint.note(lambda: (*value, *(value.values() if isinstance(value, dict) else ())))
    if hasattr(value, "__dict__"):
        walk.footprint.note(lambda: vars(value).values())
    try:
        reduce = copyreg.dispatch_table.get(type(value))
        reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception:  # noqa: BLE001 - whatever a library's type raises, it has no stable form
        return walk.unstable(value, place)
    if isinstance(reduced, str):
        return digest("named", type_name(type(value)), reduced)
    parts = (list(part) if isinstance(part, Iterator) else part for part in reduced)
    return digest("reduced", type_name(type(value)), *(walk.form(part, place) for part in parts))


def tensor_form(walk: Walk, value: torch.Tensor, place: Place) -> str:
    """The form of a small tensor on the CPU, from its content; any other tensor has no stable form."""
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
    if not is_plain or value.device.type != "cpu" or value.numel() > _LARGEST_TENSOR:
        return walk.unstable(value, place)
    data = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return digest("tensor", str(value.dtype), str(tuple(value.shape)), bytes(data.tolist()).hex())


def state_of(value: Any) -> dict[str, Any]:
    """The values that distinguish *value* from other instances of its class, by name.

    They are the fields of a frozen dataclass, and the attributes of any other. The result of a
    `functools.cached_property` is left out, because it follows from the rest.
    """
    if is_frozen(type(value)):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    state = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, functools.cached_property):
                state.pop(name, None)
            if isinstance(member, types.MemberDescriptorType) and hasattr(value, name):
                state.setdefault(name, getattr(value, name))
    return state


def is_frozen(cls: type) -> bool:
    """Whether *cls* is a frozen dataclass."""
    parameters = getattr(cls, "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def type_name(cls: type) -> str:
    """The module and the qualified name of *cls*, with a dot between them."""
    return f"{cls.__module__}.{cls.__qualname__}"
