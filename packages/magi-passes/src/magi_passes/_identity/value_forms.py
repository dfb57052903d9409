# SPDX-License-Identifier: Apache-2.0
"""Values: where one is read, which have a stable form of themselves, and what distinguishes one from its like.

A *form* is text that is equal exactly for equal values, in every process.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import threading
import types
import weakref
from collections import deque
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from .library import Standing
from .members import MISSING, attribute, is_a, stored


ATOMS = (type(None), bool, int, str, bytes, complex, type(Ellipsis), type(NotImplemented), range, slice)
"""Types whose text is the form of a value."""
TORCH_ATOMS: tuple[type, ...] = (torch.dtype, torch.device, torch.layout, torch.memory_format)
# These decide when code runs, or hold what belongs to other objects of this process, so their content differs between
# processes.
RUNTIME = (
    *(type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Semaphore),
    *(threading.local, weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
    *(logging.Logger, type(os.environ)),
)
CONTENT: tuple[Any, ...] = (dict, list, tuple, deque, set, frozenset, str, int, float, bytes)
"""Types of Python whose subclasses have a content besides attributes."""
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


def content_of_variable(variable: ContextVar[Any]) -> tuple[Any, ...]:
    """The value of *variable* here, as a tuple of one; an empty tuple if it has none."""
    try:
        return (variable.get(),)
    except LookupError:
        return ()


def is_of_dict(proxy: types.MappingProxyType[Any, Any]) -> bool:
    """Whether a read-only view shows a dict of Python's own. A mapping of the author's would run his methods."""
    return all(type(mapping) is dict for mapping in gc.get_referents(proxy))


def has_dict(value: Any) -> bool:
    """Whether *value* keeps attributes in a ``__dict__``."""
    return any("__dict__" in vars(one) for one in type(value).__mro__)


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
