# SPDX-License-Identifier: Apache-2.0
"""Objects as parameters, `ObjectHandle[T]`: behind an int by which a schema names them, or taken apart into fields.

    caller          runner or its handle
    schema          SymInt runner
    body            runner
    fake, gradients a stand-in, because they are traced once for all runners

To type checkers `ObjectHandle[Runner]` is `Runner`. A handle is 63 bits that are never given twice:

    epoch (23 random bits of this process) | type (8 bits) | number (32 bits)

The epoch distinguishes a handle of this process from any other int, such as a handle of another process. A forked child
knows its parent's epochs and draws an epoch of its own. The type names the class of an object that no longer exists.

An object also carries its handle, in the attribute `_magi_handle`, because Dynamo can read that and guard on it. The
guard checks that the attribute exists and belongs to the object, so one graph serves different objects. An object that
can carry none, such as a ProcessGroup, a Stream or a Generator, is guarded by its identity, so each has its own graph.
Nothing here is an op. Nothing is kept of an object that is released or collected.

An object that is taken apart has no handle: its class says which of its attributes are Tensors and which are constants,
by `see_through_object`, at the end of this module.
"""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import os
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Generic, NoReturn, TypeVar, overload

import torch

from magi_opschema._model.tree import Codec
from magi_opschema._text import location_of_class, show_type, show_value, show_with_type
from magi_opschema._torch_compat import (
    answer_for_one_object,
    fix_local,
    guard_type,
    is_dynamo_compiling,
    reads_attributes,
    run_at_trace_time,
    symbolic_when_traced,
    traced_object,
)
from magi_opschema.errors import ArgumentError, HandleError, OpSchemaError, OptionError


T = TypeVar("T")

ATTRIBUTE = "_magi_handle"
_NUMBER_BITS, _TYPE_BITS, _EPOCH_BITS = 32, 8, 23
_UNNAMED = "object"


class Ticket:
    """An object's handle, carried by the object; void in a copy of the object, which has no handle yet."""

    __slots__ = ("handle", "owner")

    def __init__(self, owner: Callable[[], object] | None = None, handle: int | None = None) -> None:
        self.owner = owner
        self.handle = handle

    def __reduce__(self) -> tuple[type[Ticket], tuple[()]]:
        """Pickle or deepcopy as a void ticket."""
        return Ticket, ()


class HandleRegistry:
    """Objects by handle and handles by object. Reading takes no lock; writing takes one."""

    def __init__(self) -> None:
        self.by_address: dict[int, int] = {}
        """Handles by `id(obj)`. An entry is removed before its object, so an address never stands for another
        object."""
        self._references: dict[int, Callable[[], Any]] = {}
        """What returns the object of a handle; of an object that is not kept alive, a weak reference."""
        self._type_numbers: dict[str, int] = {_UNNAMED: 0}
        self._epochs: set[int] = set()
        self._numbers: Iterator[int] = iter(())
        self._epoch = 0
        self._lock = threading.Lock()

    def find(self, handle: int) -> Any:
        """The object of *handle*; None if there is none."""
        reference = self._references.get(handle)
        return None if reference is None else reference()

    def register(self, obj: object, *, weak: bool) -> int:
        """The handle of *obj*, a new one unless it has one.

        With *weak* False, an object that was held weakly is now kept alive.
        """
        if obj is None or isinstance(obj, int):
            text = f"{show_value(obj)} cannot have a handle: a schema takes an int or None as it is. Pass it as that."
            raise ArgumentError(f"register_object(): {text}")
        with self._lock:
            address = id(obj)
            known = self.by_address.get(address)
            handle = self._draw(obj) if known is None else known
            if not weak:
                self._references[handle] = lambda: obj
            elif known is None:
                self._references[handle] = self._refer(obj, handle)
            if known is None:
                self.by_address[address] = handle
                attach(obj, handle)
        return handle

    def release(self, handle: int) -> bool:
        """Forget the object of *handle*; return False if there was none."""
        with self._lock:
            obj = self.find(handle)
            self._references.pop(handle, None)
            if obj is None:
                return False
            self.by_address.pop(id(obj), None)
        ticket = ticket_of(obj)
        if ticket is not None and ticket.handle == handle:
            ticket.owner = ticket.handle = None
        return True

    def why_missing(self, handle: int) -> str:
        """The error message about *handle*, which names no object."""
        if handle >> (_TYPE_BITS + _NUMBER_BITS) in self._epochs:
            number = (handle >> _NUMBER_BITS) % (1 << _TYPE_BITS)
            name = next((name for name, known in self._type_numbers.items() if known == number), _UNNAMED)
            return (
                f"{int(handle)} is a stale handle: its {name} was released or collected. "
                f"Keep the {name} alive, or hold it with register_object(obj) for as long as the handle is used."
            )
        return (
            f"{int(handle)} is not a handle of this process. A handle means something only in the process that "
            "register_object() gave it in, and in children forked afterwards: not in a spawned worker, another rank, "
            "or a program that loads what this one pickled or exported. "
            "Register the object here, and pass it or its new handle."
        )

    def _draw(self, obj: object) -> int:
        number = next(self._numbers, None) or self._begin_epoch()
        name = type(obj).__qualname__
        if len(self._type_numbers) < 1 << _TYPE_BITS:
            self._type_numbers.setdefault(name, len(self._type_numbers))
        return (self._epoch << _TYPE_BITS | self._type_numbers.get(name, 0)) << _NUMBER_BITS | number

    def _begin_epoch(self) -> int:
        """Draw a new epoch, for the first object, in a forked child, and after 2**32 objects."""
        if not self._epochs:
            os.register_at_fork(after_in_child=self._after_fork)
        while (epoch := int.from_bytes(os.urandom(4), "big") >> (32 - _EPOCH_BITS)) in {0, *self._epochs}:
            pass
        self._epochs.add(epoch)
        self._epoch = epoch
        self._numbers = itertools.islice(itertools.count(), 1, 1 << _NUMBER_BITS)
        return 0

    def _after_fork(self) -> None:
        """Prepare a forked child: objects keep their handles, and the lock, which a thread may hold, is replaced."""
        self._lock = threading.Lock()
        self._numbers = iter(())

    def _refer(self, obj: object, handle: int) -> weakref.ref[Any]:
        try:
            return weakref.ref(obj, functools.partial(self._forget, handle, id(obj)))
        except TypeError:
            name = type(obj).__name__
            text = f"a {name} takes no weak reference, so it must be held until release_object()."
            raise ArgumentError(f"{text} Call register_object(obj) once, and keep the handle.") from None

    def _forget(self, handle: int, address: int, _: object) -> None:
        # It may run at any time, so it takes no lock; each line is atomic for other threads.
        if self._references.pop(handle, None) is not None:
            self.by_address.pop(address, None)


def ticket_of(obj: object) -> Ticket | None:
    """The ticket that *obj* carries, read without its `__getattr__`, which may return anything; None if it has none."""
    try:
        ticket = object.__getattribute__(obj, ATTRIBUTE)
    except AttributeError:
        return None
    return ticket if isinstance(ticket, Ticket) else None


def attach(obj: object, handle: int) -> None:
    """Set the ticket of *obj* if it can hold one. Dynamo needs it; eager calls do not."""
    owner: Callable[[], object]
    try:
        owner = weakref.ref(obj)
    except TypeError:
        owner = lambda: obj  # noqa: E731  # which keeps *obj* alive
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
        raise HandleError(f"get_object(): {REGISTRY.why_missing(handle)}")
    return found


def release_object(handle: int) -> None:
    """Forget the object that *handle* names. The handle is stale from now on, and is never used again.

    Raises:
        HandleError: it is stale already, or this process never gave it.
    """
    if not REGISTRY.release(_checked(handle, "release_object")):
        raise HandleError(f"release_object(): {REGISTRY.why_missing(handle)}")


def _checked(handle: object, function: str) -> int:
    if not isinstance(handle, int) or isinstance(handle, bool):
        name = type(handle).__name__
        raise ArgumentError(f"{function}() takes the int that register_object() returned, and got a {name}.")
    return int(handle)


if TYPE_CHECKING:
    ObjectHandle = Annotated[T, "handle"]
else:

    class ObjectHandle(Generic[T]):
        """Annotation of a parameter or field whose value is any object, or the handle of one.

        Example:
            >>> import torch
            >>> from torch import Tensor
            >>> from magi_opschema import ObjectHandle, magi_register_custom_op
            >>> class Runner:
            ...     def run(self, x: Tensor) -> Tensor:
            ...         return x + 1
            >>> @magi_register_custom_op("doc::run", infer_output_meta_fn=["x"])
            ... def run(x: Tensor, runner: ObjectHandle[Runner]) -> Tensor:
            ...     return runner.run(x)
            >>> run(torch.zeros(2), Runner())
            tensor([1., 1.])
        """

        def __new__(cls, *_: object) -> NoReturn:
            raise ArgumentError("ObjectHandle[T] is an annotation. register_object(obj) gives a handle.")


_INTS = (int, torch.SymInt)


class StandIn:
    """What a fake, `setup_context_fn` and the rules get for an object. Ops accept it like a handle."""

    __slots__ = ("_handle", "_title", "_type")

    def __init__(self, handle: int, type_name: str, title: str) -> None:
        self._handle = handle
        self._type = type_name
        self._title = title

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        text = f"{self._title}: '{name}' was read from a {self._type} where the op is described, not run. "
        why = "One description (fake, gradient or rule) serves every object, so it sees none. "
        fix = (
            f"Give what it needs of the {self._type} to the op as a parameter of its own; or let its class declare its "
        )
        more = "fields with see_through_object, and pass the object instead of its handle. In a backward, call an op."
        raise HandleError(f"{text}{why}{fix}{more}")

    def __repr__(self) -> str:
        return f"<stand-in for a {self._type}>"


def unfit(annotation: object) -> tuple[str, str] | None:
    """Why there can be no handles of *annotation*, and what to do; None if there can."""
    if annotation is Any:
        return None
    origin = typing.get_origin(annotation)
    if origin in {typing.Union, types.UnionType}:
        members = typing.get_args(annotation)
        if type(None) in members:
            return "a handle of something that may be None", "Write ObjectHandle[T] | None."
        return next((found for found in map(unfit, members) if found), None)
    cls = origin or annotation
    if not isinstance(cls, type):
        return "a handle of something that is not a class", "Name the class of the object."
    if issubclass(cls, (int, torch.Tensor)):
        return "a handle of something that a schema takes as it is", f"Annotate it {cls.__name__}."
    if getattr(cls, "_is_protocol", False) and not getattr(cls, "_is_runtime_protocol", False):
        return "a handle of a protocol that no object can be checked against", "Decorate it @runtime_checkable."
    return None


def handle(annotation: object) -> Codec:
    """The codec of `ObjectHandle[annotation]`."""
    name = show_type(annotation)
    is_union = typing.get_origin(annotation) in {typing.Union, types.UnionType}
    members = typing.get_args(annotation) if is_union else (annotation,)
    classes = tuple(object if member is Any else typing.get_origin(member) or member for member in members)

    def find(handle: int, reject: Callable[[object], None]) -> Any:
        try:
            found = REGISTRY.find(handle)
        except TypeError:  # a SymInt has no hash
            found = None
        if found is None or not isinstance(found, classes):
            reject(handle)
        return found

    constants = {
        "isinstance": isinstance,
        "accepted": (*_INTS, *classes, StandIn),
        "int": int,
        "ints": _INTS,
        "handles": (*_INTS, StandIn),
        "handle_of": handle_of,
        "is_dynamo_compiling": is_dynamo_compiling,
        "find": find,
        "StandIn": StandIn,
        "type_name": name,
    }
    return Codec(
        note=f"handle of a {name}",
        refuse="not {isinstance}({value}, {accepted})",
        encode=("({value} if not {is_dynamo_compiling}() and {isinstance}({value}, {ints}) else {handle_of}({value}))"),
        decode="{find}({value}, {reject})",
        described="{StandIn}({value}, {type_name}, {title})",
        constants=constants,
        expected=f"a {name}, or the handle that register_object() gave for one",
        refusal=lambda value, expected: _refusal(value, name, expected),
        is_process_bound=True,
    )


def handle_of(obj: Any) -> int:
    """The handle of *obj*, which a caller passed; an object without one is registered weakly."""
    if is_dynamo_compiling():
        traced: int = _traced_handle_of(obj)
        return traced
    known = REGISTRY.by_address.get(id(obj))
    if known is not None:
        return known
    if isinstance(obj, StandIn):
        held: int = obj._handle  # noqa: SLF001
        return held
    # Up to torch 2.12 a Generator takes no weak reference, and one may be a default or in a list.
    takes_none = isinstance(obj, torch.Generator) and type(obj).__weakrefoffset__ == 0
    return REGISTRY.register(obj, weak=not takes_none)


def _traced_handle_of(value: Any) -> Any:
    """The handle of the object *value* while Dynamo traces.

    Graphs have a guard on the type of what was passed. The comparison becomes a guard too, so that a shallow copy,
    which shares the ticket of its original, is traced again.
    """
    answer: Any = None
    if isinstance(value, int):  # Dynamo sees a symbolic int as an int too
        run_at_trace_time(guard_type)
        return value
    run_at_trace_time(_give_ticket)
    if answer is not None:
        return answer
    ticket = value._magi_handle  # noqa: SLF001
    if ticket.owner() is not value:
        raise HandleError("the attribute _magi_handle is not the object's own")
    return ticket.handle


def _give_ticket(context: Any) -> None:
    """Register, while Dynamo traces, the object that the local variable `value` stands for.

    If Dynamo can read no ticket of it, the local `answer` becomes its handle. Then the object is kept alive: the graph
    is guarded by its address, which must never be that of another.
    """
    obj = traced_object(context)
    if obj is None:
        text = "an object made inside a compiled function has no handle before the function runs."
        raise HandleError(f"{text} Make it outside, for example in __init__.")
    known = REGISTRY.by_address.get(id(obj))
    ticket = ticket_of(obj)
    if known is None:
        REGISTRY.register(obj, weak=type(obj).__weakrefoffset__ != 0)
    elif ticket is None or ticket.handle != known:
        attach(obj, known)
    if ticket_of(obj) is None or not reads_attributes(context):
        answer_for_one_object(context, REGISTRY.register(obj, weak=False))


def _refusal(value: object, name: str, expected: str) -> tuple[type[OpSchemaError], str]:
    """The error about a value that is not a *name*: its class, and the message after the name of the parameter."""
    if isinstance(value, torch.SymInt):
        text = f"stands for any {name} while the op is traced, and its body was run. A body that uses an object cannot"
        return HandleError, f"{text} be seen through: register it with magi_opschema, which keeps the op opaque."
    if type(value).__name__ == "FakeScriptObject":  # what Dynamo has for an object of a class that torch registered
        text = f"is of a class that torch passes to ops as it is, and Dynamo hides its attributes. Annotate it {name}"
        return ArgumentError, f"{text}, or pass the handle that register_object() returned."
    if not isinstance(value, int):
        cls = type(value)
        called = f"{cls.__module__}.{cls.__qualname__}" if cls.__name__ == name else cls.__name__
        return ArgumentError, f"is a {called}, expected {expected}."
    if (found := REGISTRY.find(value)) is not None:
        return ArgumentError, f"is the handle of a {type(found).__name__}, expected {expected}."
    return HandleError, f"names no {name}: {REGISTRY.why_missing(value)}"


def fixed(value: Any) -> Any:
    """*value*, a part of an object, marked as fixed while Dynamo traces.

    A number of an object would become symbolic when a second object has another value, but a body may need a constant,
    for example for the block size of a kernel. A CUDA graph would copy a Tensor to memory of its own at each replay,
    but the weights of a layer stay where they are, like parameters.
    """
    if isinstance(value, (list, tuple)):
        return [fixed(item) for item in value]
    run_at_trace_time(fix_local)
    return value


C = TypeVar("C", bound=type)
Names = Iterable[str] | Mapping[str, object] | None
AnnotatedField = tuple[str, object, type]
"""Name, annotation and defining class."""

_DECLARED = "_magi_see_through"
"""Attribute of a declared class: its fields by name, with their annotations; None for all annotated ones."""
_NOT_OBJECTS = (torch.Tensor, int, float, str, tuple, list, dict, enum.Enum)


@overload
def see_through_object(cls: C, /) -> C: ...
@overload
def see_through_object(
    cls: None = None, /, *, tensor_fields: Names = None, constant_fields: Names = None
) -> Callable[[C], C]: ...
@overload
def see_through_object(cls: C, /, *, tensor_fields: Names = None, constant_fields: Names = None) -> C: ...
def see_through_object(cls: Any = None, /, *, tensor_fields: Names = None, constant_fields: Names = None) -> Any:
    """Declare which attributes of a class are Tensors and constants; an op that is passed an instance takes it apart.

    In an op's signature, the class then stands for its fields. The Tensors are inputs of a compiled graph, so layers
    with different weights share the graph; a CUDA graph reads them in place. The constants are constants of the graph.
    The body gets an object of the class that is rebuilt from the fields. It has the methods of the class, but nothing
    else of the instance. A frozen dataclass needs no declaration.

    Args:
        cls: the class; without it, this is a decorator with arguments. Subclasses inherit the declaration.
        tensor_fields: names of attributes that hold Tensors, or a dict from the name to the annotation, such as
            `{"bias": Tensor | None}`. Without one, the annotation in the class body holds, or else `Tensor`.
        constant_fields: the same for constants: numbers, strings, Enums, dtypes, frozen dataclasses of these. Each
            needs an annotation. Without both arguments, every attribute that the class body annotates is a field.

    Returns:
        *cls*.

    Raises:
        OptionError: *cls* is not a class of objects, or declares no attributes; a constant has no annotation; a field
            is a property.

    Example:
        >>> import torch
        >>> from torch import Tensor
        >>> from magi_opschema import ObjectHandle, magi_register_custom_op
        >>> @see_through_object
        ... class Scaler:
        ...     weight: Tensor
        ...     shift: float
        ...     def __init__(self, weight, shift):
        ...         self.weight, self.shift = weight, shift
        ...     def run(self, x):
        ...         return x * self.weight + self.shift
        >>> @magi_register_custom_op("doc::scaled")
        ... def scaled(x: Tensor, scaler: ObjectHandle[Scaler]) -> Tensor:
        ...     return scaler.run(x)
        >>> scaled(torch.ones(2), Scaler(torch.full((2,), 3.0), 1.0))
        tensor([4., 4.])
        >>> print(scaled.torch_op._schema)
        doc::scaled(Tensor x, Tensor scaler__weight, float scaler__shift) -> Tensor
    """
    if cls is None:
        return lambda decorated: see_through_object(
            decorated, tensor_fields=tensor_fields, constant_fields=constant_fields
        )
    if not isinstance(cls, type):
        text = f"see_through_object takes a class, and got {show_with_type(cls)}."
        raise OptionError(f"{text} Decorate the class of the objects.")
    if issubclass(cls, _NOT_OBJECTS):
        base = next(base for base in _NOT_OBJECTS if issubclass(cls, base))
        _fail(cls, f"its instances are values of type {base.__name__}. Annotate a parameter with that.")
    fields: dict[str, object] | None = None
    if tensor_fields is not None or constant_fields is not None:
        fields = _named(cls, "tensor_fields", tensor_fields) | _named(cls, "constant_fields", constant_fields)
    names = [name for name, _, _ in annotated_fields(cls)] if fields is None else list(fields)
    if not names:
        fix = 'Annotate its Tensors and constants in the class body, or name them: tensor_fields=("weight",).'
        _fail(cls, f"it does not say which of its attributes are Tensors. {fix}")
    for name in names:
        if isinstance(inspect.getattr_static(cls, name, None), property):
            _fail(cls, f"'{name}' is a property, which a rebuilt object computes again. Name the attributes it reads.")
    setattr(cls, _DECLARED, fields)
    return cls


def _fail(cls: type, text: str) -> NoReturn:
    raise OptionError(f"see_through_object({cls.__name__}): {text} ({location_of_class(cls)})")


def _named(cls: type, option: str, names: Names) -> dict[str, object]:
    """The fields of one option, by name, with their annotations."""
    if isinstance(names, Mapping):
        return dict(names)
    if isinstance(names, str):
        _fail(cls, f"{option}={names!r} is one string. Write a tuple of names: ({names!r},).")
    found: dict[str, object] = {}
    annotated = {name: hint for name, hint, _ in annotated_fields(cls)}
    for name in names or ():
        if not str.isidentifier(str(name)) or type(name) is not str:
            _fail(cls, f"{option} names {show_value(name)}, which is not a name of an attribute.")
        if name not in annotated and option == "constant_fields":
            fix = f"Annotate it in the class body, or give a dict: constant_fields={{{name!r}: int}}."
            _fail(cls, f"constant_fields names '{name}', whose type the class does not say. {fix}")
        found[name] = annotated.get(name, torch.Tensor)
    return found


def annotated_fields(cls: type) -> list[AnnotatedField]:
    """Every attribute that a class body of *cls* or its bases annotates; the last annotation of a name is used.

    Those of torch's own classes, such as `_parameters` of a Module, are no fields.
    """
    found: dict[str, AnnotatedField] = {}
    for base in reversed([base for base in cls.__mro__ if base.__module__.partition(".")[0] != "torch"]):
        for name, hint in vars(base).get("__annotations__", {}).items():
            found[name] = (name, hint, base)
    return list(found.values())


def is_declared(cls: type) -> bool:
    """True if `see_through_object` declared *cls*, or a class that it inherits from."""
    return any(_DECLARED in vars(base) for base in cls.__mro__)


def declared_fields(cls: Any) -> list[AnnotatedField]:
    """The attributes that a declared class names, with their annotations; class variables are included."""
    declared: Mapping[str, object] | None = getattr(cls, _DECLARED)
    if declared is None:
        return annotated_fields(cls)
    owners = {name: owner for name, _, owner in annotated_fields(cls)}
    return [(name, hint, owners.get(name, cls)) for name, hint in declared.items()]
