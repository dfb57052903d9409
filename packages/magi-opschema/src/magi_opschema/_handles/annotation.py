# SPDX-License-Identifier: Apache-2.0
"""`ObjectHandle[T]`: a parameter that is an object in Python and an int in the schema.

    caller          runner or its handle
    schema          SymInt runner
    body            runner
    fake, gradients a stand-in, because they are traced once for all runners

To type checkers `ObjectHandle[Runner]` is `Runner`.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Generic, NoReturn, TypeVar

import torch

from magi_opschema._model.tree import Codec
from magi_opschema._text import show_type
from magi_opschema._torch_compat import fix_local, guard_type, is_dynamo_compiling, run_at_trace_time, traced_object
from magi_opschema.errors import ArgumentError, HandleError, OpSchemaError

from .registry import ATTRIBUTE, REGISTRY, attach, ticket_of, why_missing


T = TypeVar("T")

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
            """Raise an error, because this is an annotation."""
            raise ArgumentError("ObjectHandle[T] is an annotation. register_object(obj) gives a handle.")


_INTS = (int, torch.SymInt)


class StandIn:
    """What a fake, `setup_context_fn` and the rules get for an object. Ops accept it like a handle."""

    __slots__ = ("_handle", "_title", "_type")
    _handle: int
    _title: str
    _type: str

    def __init__(self, handle: int, type_name: str, title: str) -> None:
        self._handle = handle
        self._type = type_name
        self._title = title

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an error, because the object is not available here."""
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


def _classes(annotation: object) -> tuple[type, ...]:
    """The classes that *annotation* accepts, for isinstance."""
    if annotation is Any:
        return (object,)
    origin = typing.get_origin(annotation)
    if origin in {typing.Union, types.UnionType}:
        return tuple(cls for member in typing.get_args(annotation) for cls in _classes(member))
    cls = origin or annotation
    assert isinstance(cls, type)
    return (cls,)


def handle(annotation: object) -> Codec:
    """The codec of `ObjectHandle[annotation]`."""
    name, classes = show_type(annotation), _classes(annotation)
    expected = f"a {name}, or the handle that register_object() gave for one"
    constants = {
        "isinstance": isinstance,
        "accepted": (*_INTS, *classes, StandIn),
        "int": int,
        "ints": _INTS,
        "handles": (*_INTS, StandIn),
        "handle_of": handle_of,
        "is_dynamo_compiling": is_dynamo_compiling,
        "find": _finder(classes),
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
        expected=expected,
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
    return REGISTRY.register(obj, weak=True)


def _traced_handle_of(obj: Any) -> Any:
    """The handle of *obj* while Dynamo traces.

    Graphs have a guard on the type of what was passed. The comparison becomes a guard too, so that a shallow copy,
    which shares the ticket of its original, is traced again.
    """
    if isinstance(obj, int):  # Dynamo sees a symbolic int as an int too
        run_at_trace_time(_guard_type)
        return obj
    run_at_trace_time(_give_ticket)
    ticket = obj._magi_handle  # noqa: SLF001
    if ticket.owner() is not obj:
        raise HandleError("the attribute _magi_handle is not the object's own")
    return ticket.handle


def _guard_type(context: Any) -> None:
    guard_type(context, "obj")


def _give_ticket(context: Any) -> None:
    """Register, while Dynamo traces, the object that the local variable `obj` stands for."""
    obj = traced_object(context, "obj")
    if obj is None:
        text = "an object made inside a compiled function has no handle before the function runs."
        raise HandleError(f"{text} Make it outside, for example in __init__.")
    known = REGISTRY.by_address.get(id(obj))
    ticket = ticket_of(obj)
    if known is None:
        REGISTRY.register(obj, weak=True)
    elif ticket is None or ticket.handle != known:
        attach(obj, known)
    if ticket_of(obj) is None:
        name = type(obj).__name__
        text = f"a {name} has no place for its handle, and torch.compile can read it nowhere else. "
        fix = f"Pass the handle that register_object() returns, or add '{ATTRIBUTE}' to the __slots__ of {name}."
        raise HandleError(text + fix)


def _finder(classes: tuple[type, ...]) -> Callable[[int, Callable[[object], None]], Any]:
    find = REGISTRY.find

    def find_checked(handle: int, reject: Callable[[object], None]) -> Any:
        try:
            found = find(handle)
        except TypeError:  # a SymInt has no hash
            found = None
        if found is None or not isinstance(found, classes):
            reject(handle)
        return found

    return find_checked


def _refusal(value: object, name: str, expected: str) -> tuple[type[OpSchemaError], str]:
    """The error about a value that is not a *name*: its class, and the message after the name of the parameter."""
    if isinstance(value, torch.SymInt):
        text = f"stands for any {name} while the op is traced, and its body was run. A body that uses an object cannot"
        return HandleError, f"{text} be seen through: register it with magi_opschema, which keeps the op opaque."
    if not isinstance(value, int):
        return ArgumentError, f"is a {type(value).__name__}, expected {expected}."
    if (found := REGISTRY.find(value)) is not None:
        return ArgumentError, f"is the handle of a {type(found).__name__}, expected {expected}."
    return HandleError, f"names no {name}: {why_missing(value)}"


def fixed(value: Any) -> Any:
    """*value*, a part of an object, marked as fixed while Dynamo traces.

    A number of an object would become symbolic when a second object has another value, but a body may need a constant,
    for example for the block size of a kernel. A CUDA graph would copy a Tensor to memory of its own at each replay,
    but the weights of a layer stay where they are, like parameters.
    """
    if isinstance(value, (list, tuple)):
        return [fixed(item) for item in value]
    run_at_trace_time(_fix)
    return value


def _fix(context: Any) -> None:
    fix_local(context, "value")
