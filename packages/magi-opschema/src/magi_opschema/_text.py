# SPDX-License-Identifier: Apache-2.0
"""Values, names, types and places as errors show them."""

from __future__ import annotations

import difflib
import enum
import inspect
import linecache
import reprlib
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeGuard


class _Short(reprlib.Repr):
    """The Repr of reprlib, without the address of an object whose repr fails, and for all errors."""

    def __init__(self) -> None:
        super().__init__()
        self.maxother = 60

    def repr_instance(self, x: object, level: int) -> str:
        del level
        text = repr(x)
        if len(text) <= self.maxother:
            return text
        kept = self.maxother // 2 - 2
        return f"{text[:kept]}...{text[-kept:]}"

    def repr1(self, x: object, level: int) -> str:
        try:
            return super().repr1(x, level)
        except Exception:  # noqa: BLE001  (an error about a value must not be lost in the error of its repr)
            return _without_repr(x)


_SHORT = _Short()


def full_repr(value: object) -> str:
    """The repr of *value*; for an object whose repr fails, its class."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001
        return _without_repr(value)


def _without_repr(value: object) -> str:
    return f"<a {type(value).__name__} whose __repr__ fails>"


def show_value(value: object) -> str:
    """The shortened repr of *value*; for an object whose repr fails, its class."""
    if value is None or isinstance(value, bool | float) or (type(value) is int and abs(value) < 10**30):
        # In compiled code Dynamo traces this, and that of torch 2.10 to 2.12 cannot trace reprlib of Python 3.12.
        return repr(value)
    return _SHORT.repr(value)


def show_with_type(value: object) -> str:
    """`'three' (str)`. A list in a graph of torch 2.15, an `immutable_list`, was a list in the user's call."""
    return f"{show_value(value)} ({type(value).__name__.removeprefix('immutable_')})"


def closest(name: object, names: Iterable[str]) -> str:
    """The one of *names* that is close to *name*; otherwise an empty string."""
    close = difflib.get_close_matches(name, names, 1) if isinstance(name, str) else []
    return close[0] if close else ""


def nearest(name: object, names: Iterable[str]) -> str:
    """` Did you mean 'eps'?` if one of *names* is close to *name*; otherwise an empty string."""
    close = closest(name, names)
    return f" Did you mean '{close}'?" if close else ""


def is_class(annotation: object) -> TypeGuard[type]:
    """True for a class, but not for `list[int]`, which claims to be one."""
    return isinstance(annotation, type) and typing.get_origin(annotation) is None


def show_type(annotation: object) -> str:
    """*annotation* as a reader would write it: `dict[str, float]`, `NormCfg`, `int | None`."""
    if annotation is None or annotation is type(None):
        return "None"
    if isinstance(annotation, str):
        return annotation
    if is_class(annotation):
        return annotation.__name__
    if isinstance(annotation, (typing.TypeVar, typing.NewType)):
        return annotation.__name__
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in {typing.Union, types.UnionType}:
        return " | ".join(show_type(argument) for argument in arguments)
    if origin is typing.Literal:
        return f"Literal[{', '.join(show_literal(value) for value in arguments)}]"
    if origin is typing.Annotated:
        return show_type(arguments[0])
    name = (
        getattr(origin, "__name__", None)
        or getattr(annotation, "_name", None)
        or getattr(annotation, "__qualname__", None)
        or full_repr(annotation).removeprefix("typing.")
    )
    if arguments:
        return f"{name}[{', '.join('...' if a is ... else _show_argument(a) for a in arguments)}]"
    return name


def _show_argument(argument: object) -> str:
    return f"[{', '.join(map(show_type, argument))}]" if isinstance(argument, list) else show_type(argument)


def show_literal(value: object) -> str:
    """A value of a Literal: `Mode.RMS`, `'rms'`."""
    return f"{type(value).__name__}.{value._name_}" if isinstance(value, enum.Enum) else full_repr(value)


def location_of_class(cls: type) -> str:
    """Where a class is defined, read from its methods: `runners.py:41`; otherwise its module and name."""
    methods = [found for found in vars(cls).values() if hasattr(found, "__code__")]
    return location(methods[0]) if methods else f"{cls.__module__}.{cls.__qualname__}"


def location(fn: Callable[..., Any]) -> str:
    """File and line of the `def` of *fn*, or of the function that it wraps: `ops.py:41`."""
    fn = inspect.unwrap(fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', show_value(fn))}"
    line = code.co_firstlineno  # the line of the first decorator, if there is one
    lines = linecache.getlines(code.co_filename)
    starts = (i for i in range(line - 1, len(lines)) if lines[i].lstrip().startswith(("def ", "async def ")))
    if code.co_name != "<lambda>":
        line = next(starts, line - 1) + 1
    return f"{Path(code.co_filename).name}:{line}"
