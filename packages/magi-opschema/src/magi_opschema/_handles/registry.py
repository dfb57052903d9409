# SPDX-License-Identifier: Apache-2.0
"""The objects of this process that have a handle, an int by which an op's schema can name them.

A handle is 63 bits that are never given twice:

    epoch (23 random bits of this process) | type (8 bits) | number (32 bits)

The epoch distinguishes a handle of this process from any other int, such as a handle of another process. A forked child
knows its parent's epochs and draws an epoch of its own. The type names the class of an object that no longer exists.

An object also carries its handle, in the attribute `_magi_handle`, because Dynamo can read that and guard on it. The
guard checks that the attribute exists and belongs to the object, so one graph serves different objects. Nothing here is
an op. Nothing is kept of an object that is released or collected.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

from magi_opschema._text import show_value, show_with_type
from magi_opschema._torch_compat import symbolic_when_traced
from magi_opschema.errors import ArgumentError, HandleError


T = TypeVar("T")
State = Literal["alive", "gone", "foreign"]

ATTRIBUTE = "_magi_handle"
_NUMBER_BITS, _TYPE_BITS, _EPOCH_BITS = 32, 8, 23
_UNNAMED = "object"


class Ticket:
    """An object's handle, carried by the object; void in a copy of the object, which has no handle yet."""

    __slots__ = ("handle", "owner")

    def __init__(self, owner: weakref.ref[Any] | _Forever | None = None, handle: int | None = None) -> None:
        self.owner = owner
        self.handle = handle

    def __reduce__(self) -> tuple[type[Ticket], tuple[()]]:
        """Pickle or deepcopy as a void ticket."""
        return Ticket, ()


class _Forever:
    """A replacement for a weak reference, for an object that supports none."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __call__(self) -> object:
        return self.value


class _Reference(weakref.ref[Any]):
    """A weak reference with the keys that are removed together with its object."""

    __slots__ = ("address", "handle")
    address: int
    handle: int


class HandleRegistry:
    """Objects by handle and handles by object. Reading takes no lock; writing takes one."""

    def __init__(self) -> None:
        self.by_address: dict[int, int] = {}
        """Handles by `id(obj)`. An entry is removed before its object, so an address never stands for another
        object."""
        self._strong: dict[int, object] = {}
        self._weak: dict[int, _Reference] = {}
        self._type_numbers: dict[str, int] = {_UNNAMED: 0}
        self._epochs: set[int] = set()
        self._numbers: Iterator[int] = iter(())
        self._epoch = 0
        self._lock = threading.Lock()

    def find(self, handle: int) -> Any:
        """The object of *handle*; None if there is none."""
        found = self._strong.get(handle)
        if found is None and (reference := self._weak.get(handle)) is not None:
            return reference()
        return found

    def register(self, obj: object, *, weak: bool) -> int:
        """The handle of *obj*, a new one unless it has one.

        With *weak* False, an object that was held weakly is now kept alive.

        Raises:
            ArgumentError: *obj* cannot be held weakly, or is an int or None.
        """
        if obj is None or isinstance(obj, int):
            text = f"{show_value(obj)} cannot have a handle: a schema takes an int or None as it is. Pass it as that."
            raise ArgumentError(f"register_object(): {text}")
        with self._lock:
            address = id(obj)
            known = self.by_address.get(address)
            handle = self._draw(obj) if known is None else known
            if not weak:
                self._strong[handle] = obj
            elif known is None:
                self._weak[handle] = self._refer(obj, handle)
            if known is None:
                self.by_address[address] = handle
                attach(obj, handle)
            elif not weak:
                self._weak.pop(handle, None)
        return handle

    def release(self, handle: int) -> bool:
        """Forget the object of *handle*; return False if there was none."""
        with self._lock:
            obj = self.find(handle)
            self._strong.pop(handle, None)
            self._weak.pop(handle, None)
            if obj is None:
                return False
            self.by_address.pop(id(obj), None)
        ticket = ticket_of(obj)
        if ticket is not None and ticket.handle == handle:
            ticket.owner = ticket.handle = None
        return True

    def state(self, handle: int) -> State:
        """Whether *handle* names an object, named one, or was never given here."""
        if self.find(handle) is not None:
            return "alive"
        return "gone" if handle >> (_TYPE_BITS + _NUMBER_BITS) in self._epochs else "foreign"

    def type_name(self, handle: int) -> str:
        """The class of the object that a handle of this process names or named."""
        number = (handle >> _NUMBER_BITS) % (1 << _TYPE_BITS)
        return next((name for name, known in self._type_numbers.items() if known == number), _UNNAMED)

    def __len__(self) -> int:
        return len(self._strong) + len(self._weak)

    def _draw(self, obj: object) -> int:
        number = next(self._numbers, None)
        if number is None:
            number = self._begin_epoch()
        return (self._epoch << _TYPE_BITS | self._type_number(type(obj).__qualname__)) << _NUMBER_BITS | number

    def _begin_epoch(self) -> int:
        """Draw a new epoch, for the first object, in a forked child, and after 2**32 objects."""
        if not self._epochs:
            os.register_at_fork(after_in_child=self._after_fork)
        import secrets  # imported here, because it loads hashes and more for a single number

        while (epoch := secrets.randbits(_EPOCH_BITS)) in {0, *self._epochs}:
            pass
        self._epochs.add(epoch)
        self._epoch = epoch
        self._numbers = itertools.islice(itertools.count(), 1, 1 << _NUMBER_BITS)
        return 0

    def _after_fork(self) -> None:
        """Prepare a forked child: objects keep their handles, and the lock, which a thread may hold, is replaced."""
        self._lock = threading.Lock()
        self._numbers = iter(())

    def _type_number(self, name: str) -> int:
        if len(self._type_numbers) < 1 << _TYPE_BITS:
            return self._type_numbers.setdefault(name, len(self._type_numbers))
        return self._type_numbers.get(name, 0)

    def _refer(self, obj: object, handle: int) -> _Reference:
        try:
            reference = _Reference(obj, self._forget)
        except TypeError:
            name = type(obj).__name__
            text = f"a {name} takes no weak reference, so it must be held until release_object()."
            raise ArgumentError(f"{text} Call register_object(obj) once, and keep the handle.") from None
        reference.address, reference.handle = id(obj), handle
        return reference

    def _forget(self, reference: _Reference) -> None:
        # It may run at any time, so it takes no lock; each line is atomic for other threads.
        if self._weak.pop(reference.handle, None) is not None:
            self.by_address.pop(reference.address, None)


def ticket_of(obj: object) -> Ticket | None:
    """The ticket that *obj* carries, read without its `__getattr__`, which may return anything; None if it has none."""
    try:
        ticket = object.__getattribute__(obj, ATTRIBUTE)
    except AttributeError:
        return None
    return ticket if isinstance(ticket, Ticket) else None


def attach(obj: object, handle: int) -> None:
    """Set the ticket of *obj* if it can hold one. Dynamo needs it; eager calls do not."""
    owner: weakref.ref[Any] | _Forever
    try:
        owner = weakref.ref(obj)
    except TypeError:
        owner = _Forever(obj)
    try:
        # A frozen dataclass and an nn.Module define __setattr__.
        object.__setattr__(obj, ATTRIBUTE, Ticket(owner, symbolic_when_traced(handle)))
    except (AttributeError, TypeError):
        return


REGISTRY = HandleRegistry()


def register_object(obj: object, *, weak: bool = False) -> int:
    """Give *obj* a handle, by which an op with an `ObjectHandle[T]` parameter finds it in this process.

    Registering an object again returns the same handle. Register in `__init__`, before the first compiled call; then
    modules that differ only in their objects share one compiled graph.

    Args:
        obj: any object but an int or None.
        weak: do not keep *obj* alive. The default keeps it until `release_object`.

    Returns:
        The handle: a positive int of 63 bits that is never used twice. It is valid only in this process, and in a child
        forked after the registration.

    Raises:
        ArgumentError: *obj* is an int or None; *weak* is True for an object that supports no weak reference; or *weak*
            is not a bool.

    Example:
        >>> class Runner: ...
        >>> runner = Runner()
        >>> handle = register_object(runner)
        >>> get_object(handle) is runner
        True
        >>> release_object(handle)
    """
    if not isinstance(weak, bool):
        raise ArgumentError(f"register_object(): weak is {show_with_type(weak)}, expected True or False.")
    return symbolic_when_traced(REGISTRY.register(obj, weak=weak))


def get_object(handle: int) -> Any:
    """The object that *handle* names.

    Raises:
        HandleError: it was released or collected, or this process never gave this handle.
    """
    found = REGISTRY.find(_checked(handle, "get_object"))
    if found is None:
        raise HandleError(f"get_object(): {why_missing(handle)}")
    return found


def release_object(handle: int) -> None:
    """Forget the object that *handle* names. The handle is stale from now on, and is never used again.

    Raises:
        HandleError: it is stale already, or this process never gave it.
    """
    if not REGISTRY.release(_checked(handle, "release_object")):
        raise HandleError(f"release_object(): {why_missing(handle)}")


def _checked(handle: object, function: str) -> int:
    if not isinstance(handle, int) or isinstance(handle, bool):
        shown = f"{type(handle).__name__}"
        raise ArgumentError(f"{function}() takes the int that register_object() returned, and got a {shown}.")
    return int(handle)


def why_missing(handle: int) -> str:
    """The error message about a handle that names no object."""
    if REGISTRY.state(handle) == "gone":
        name = REGISTRY.type_name(handle)
        return (
            f"{int(handle)} is a stale handle: its {name} was released or collected. "
            f"Keep the {name} alive, or hold it with register_object(obj) for as long as the handle is used."
        )
    return (
        f"{int(handle)} is not a handle of this process. A handle means something only in the process that "
        "register_object() gave it in, and in children forked afterwards: not in a spawned worker, another rank, or a "
        "program that loads what this one pickled or exported. Register the object here, and pass it or its new handle."
    )
