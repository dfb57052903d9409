# SPDX-License-Identifier: Apache-2.0
"""Stable forms of values: plain ones, containers, instances, and what only exists while a program runs.

A *form* is text that is equal exactly for equal values, in every process.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import gc
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

from .code import digest
from .library import Standing, standing_of
from .members import MISSING, Footprint, attribute, is_a, stored


_ATOMS = (type(None), bool, int, str, bytes, complex, type(Ellipsis), type(NotImplemented), range, slice)
TORCH_ATOMS: tuple[type, ...] = (torch.dtype, torch.device, torch.layout, torch.memory_format)
# These decide when code runs, or hold what belongs to other objects of this process, so their content differs between
# processes.
_RUNTIME = (
    *(type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Semaphore),
    *(threading.local, weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
    *(logging.Logger, type(os.environ)),
)
_CONTENT: tuple[Any, ...] = (dict, list, tuple, deque, set, frozenset, str, int, float, bytes)
"""Types of Python whose subclasses have a content besides attributes."""
_LARGEST_TENSOR = 4096
_PARAMETERS = "__dataclass_params__"


@dataclass(frozen=True)
class Place:
    """How a value is reached, in words, and whose code reads it.

    What the author's own code reads must have a stable form. What this project reads without a stable form, such as a
    lock or a log, is state, and its form is its type. Of what an installed distribution reads, only code and plain
    values count, because its objects lead to everything that the process holds.
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


class Forms(Protocol):
    """What the functions below call for the values inside a value."""

    footprint: Footprint
    atoms: tuple[type, ...]

    def form(self, value: Any, place: Place) -> str:
        """The form of *value*, which is found at *place*."""

    def unordered(self, values: Iterable[Any], place: Place) -> list[str]:
        """The forms of the items of a set, in an order that is the same in every process."""

    def unstable(self, value: Any, place: Place, why: str) -> str:
        """The form of a value without a stable form, which is its type, or an error."""


def plain_form(walk: Forms, value: Any, place: Place) -> str | None:
    """The form of a value that cannot change and whose identity does not matter; None for any other value."""
    if type(value) in _ATOMS:
        return digest(type(value).__name__, repr(value))
    if type(value) is float:
        return digest("float", value.hex())
    if is_a(value, enum.Enum):
        held = stored(value)  # a class may compute `name` and `value`
        return digest("enum", walk.form(type(value), place), str(held["_name_"]), walk.form(held["_value_"], place))
    if is_a(value, walk.atoms):
        return digest("torch", type(value).__name__, str(value))
    if type(value) is tuple:
        return digest("tuple", *(walk.form(item, place.inner(f"[{at}]")) for at, item in enumerate(value)))
    if type(value) is frozenset:
        return digest("frozenset", *walk.unordered(value, place))
    return None


def runtime_form(walk: Forms, value: Any, place: Place) -> str | None:
    """The form of a value that exists only while a program runs: its type, and its name if it has one.

    None for any other.
    """
    if is_a(value, _RUNTIME):
        name = attribute(value, "name")
        return digest("runtime", type_name(type(value)), name if type(name) is str else "")
    if is_a(value, ContextVar):
        walk.footprint.note(lambda: _content_of(value))
        if place.is_lenient:
            return digest("context variable", value.name)
        return digest("context variable", value.name, walk.form(_content_of(value), place.inner(".get()")))
    if is_a(value, deque) and place.is_lenient:
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


def container_form(walk: Forms, value: Any, place: Place) -> str | None:
    """The form of a list, set or dict, from its items; None for any other value."""
    if type(value) in (list, deque):
        walk.footprint.note(lambda: value)
        return digest("list", *(walk.form(item, place.inner(f"[{at}]")) for at, item in enumerate(value)))
    if type(value) is set:
        walk.footprint.note(lambda: value)
        return digest("set", *walk.unordered(value, place))
    if type(value) is dict or (type(value) is types.MappingProxyType and _is_of_dict(value)):
        walk.footprint.note(lambda: (*value.keys(), *value.values()))
        return digest("dict", *items_form(walk, value.items(), place))
    return None


def _is_of_dict(proxy: types.MappingProxyType[Any, Any]) -> bool:
    """Whether a read-only view shows a dict of Python's own. A mapping of the author's would run his methods."""
    return all(type(mapping) is dict for mapping in gc.get_referents(proxy))


def items_form(walk: Forms, items: Iterable[tuple[Any, Any]], place: Place) -> Iterator[str]:
    """The forms of the keys and items of a mapping, in its order."""
    for key, item in tuple(items):
        yield walk.form(key, place.inner(" (a key)"))
        yield walk.form(item, place.inner(f"[{key!r}]" if type(key) in (str, int) else " (an item)"))


def instance_form(walk: Forms, value: Any, place: Place) -> str:
    """The form of an object, from its class and attributes; for subclasses of containers, from its items too."""
    if standing_of(type(value)) is Standing.LIBRARY:
        return library_instance_form(walk, value, place)
    parts = [walk.form(type(value), place)]
    walk.footprint.note(lambda: state_of(value).values())
    for name, item in sorted(state_of(value).items()):
        parts += [name, walk.form(item, place.inner(f".{name}"))]
    base = next((one for one in _CONTENT if is_a(value, one)), None)
    if base is None:
        if not _has_dict(value) and not any("__slots__" in vars(one) for one in type(value).__mro__):
            why = f"is a {type_name(type(value))}, which keeps its content to itself"
            return walk.unstable(value, place, why)  # a type of an extension
    elif base is dict:
        walk.footprint.note(lambda: (*dict.keys(value), *dict.values(value)))
        parts += items_form(walk, dict.items(value), place)
    elif base in (list, tuple, deque):
        walk.footprint.note(lambda: base.__iter__(value))
        parts += (walk.form(item, place.inner(f"[{at}]")) for at, item in enumerate(base.__iter__(value)))
    elif base in (set, frozenset):
        walk.footprint.note(lambda: base.__iter__(value))
        parts += walk.unordered(base.__iter__(value), place)
    else:
        parts.append(base.__repr__(value))
    return digest("instance", *parts)


def _has_dict(value: Any) -> bool:
    return any("__dict__" in vars(one) for one in type(value).__mro__)


def library_instance_form(walk: Forms, value: Any, place: Place) -> str:
    """The form of an object of a library, from what pickle would take it apart into."""
    if is_a(value, torch.Tensor):
        return tensor_form(walk, value, place)
    if is_a(value, dataclasses.Field):
        fields = (value.name, value.default, value.default_factory, dict(value.metadata), value.init)
        return digest("field", *(walk.form(part, place) for part in fields))
    if is_a(value, torch.nn.Module):
        return digest("module", type_name(type(value)), walk.form(vars(value), place))
    if is_a(value, (dict, list, set, deque)):
        walk.footprint.note(lambda: (*value, *(value.values() if is_a(value, dict) else ())))
    if _has_dict(value):
        walk.footprint.note(lambda: stored(value).values())
    try:
        reduce = copyreg.dispatch_table.get(type(value))
        reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception as error:  # noqa: BLE001 - whatever a library's type raises, it has no stable form
        return walk.unstable(value, place, f"is a {type_name(type(value))}, which cannot be pickled ({error})")
    if isinstance(reduced, str):
        return digest("named", type_name(type(value)), reduced)
    parts = (list(part) if isinstance(part, Iterator) else part for part in reduced)
    return digest("reduced", type_name(type(value)), *(walk.form(part, place) for part in parts))


def tensor_form(walk: Forms, value: torch.Tensor, place: Place) -> str:
    """The form of a small tensor on the CPU, from its content; any other tensor has no stable form."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.device.type != "cpu":
        return walk.unstable(value, place, "is a tensor that cannot be read here")
    if value.layout != torch.strided or value.numel() > _LARGEST_TENSOR:
        return walk.unstable(value, place, f"is a tensor of {value.numel()} elements")
    data = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return digest("tensor", str(value.dtype), str(tuple(value.shape)), bytes(data.tolist()).hex())


def state_of(value: Any) -> dict[str, Any]:
    """The values that distinguish *value* from other instances of its class, by name.

    They are the fields of a frozen dataclass, and the attributes of any other. The result of a
    `functools.cached_property` is left out, because it follows from the rest.
    """
    cls = type(value)
    if is_frozen(cls):
        fields = {one.name: attribute(value, one.name) for one in dataclasses.fields(cls)}
        # A descriptor keeps the value of a field elsewhere in the object.
        if not any("__set__" in vars(base) for held in fields.values() for base in type(held).__mro__):
            return {name: held for name, held in fields.items() if held is not MISSING}
    state = dict(stored(value))
    for base in cls.__mro__:
        for name, member in vars(base).items():
            if is_a(member, functools.cached_property):
                state.pop(name, None)
            if is_a(member, types.MemberDescriptorType) and attribute(value, name) is not MISSING:
                state.setdefault(name, attribute(value, name))
    return state


def is_frozen(cls: type) -> bool:
    """Whether *cls* is a frozen dataclass."""
    parameters = next((vars(base)[_PARAMETERS] for base in cls.__mro__ if _PARAMETERS in vars(base)), None)
    return parameters is not None and bool(parameters.frozen)


def type_name(cls: type) -> str:
    """The module and the qualified name of *cls*, with a dot between them."""
    return f"{cls.__module__}.{cls.__qualname__}"
