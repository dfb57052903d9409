# SPDX-License-Identifier: Apache-2.0
"""The class of an object that is rebuilt for a body: a subclass that refuses writes that would be lost."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NoReturn

from magi_opschema._torch_compat import answer_class, run_at_trace_time
from magi_opschema.errors import ObjectFieldError, OptionError


ORIGINAL = "_magi_rebuilt_of"
"""Attribute of such a subclass: the class of the objects that are taken apart."""


@functools.cache
def rebuilt_class(cls: Any, names: tuple[str, ...], path: str, title: str, location: str) -> type:
    """The class of objects that are rebuilt from the fields *names* of a *cls*, at *path* of the op *title*.

    Raises:
        OptionError: *cls* cannot be subclassed.
    """
    listed = ", ".join(names)

    def refuse_write(_: object, name: str, *__: object) -> NoReturn:
        text = f"{title}: the body writes '{path}.{name}', and its {cls.__name__} was rebuilt for this one call, so "
        write = f"that would be lost. Write into a Tensor in place and name it, as in mutates_args=('{path}.{name}',)"
        fix = f"{write}; return what is new; or pass the handle of register_object(), which leaves the object whole."
        raise ObjectFieldError(f"{text}{fix} ({location})")

    inherited = getattr(cls, "__getattr__", None)

    def missing(self: object, name: str) -> Any:
        if inherited is not None:
            try:
                return inherited(self, name)
            except AttributeError:
                pass
        if name.startswith("__"):
            raise AttributeError(name)
        text = f"{title}: the body reads '{path}.{name}', and its {cls.__name__} was rebuilt only from ({listed}). "
        fix = f"Declare '{name}' among the fields of {cls.__name__}, or make it an attribute of the class."
        raise ObjectFieldError(f"{text}{fix} ({location})")

    namespace = {
        ORIGINAL: cls,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__setattr__": refuse_write,
        "__delattr__": refuse_write,
        "__getattr__": missing,
    }
    try:
        return types.new_class(cls.__name__, (cls,), {}, lambda target: target.update(namespace))
    except Exception as error:
        text = f"{title}: '{path}' is a {cls.__name__}, and the body gets an instance of a subclass, which the class "
        fix = f"refuses: {error}. Use a frozen dataclass, or annotate Tensors and constants as parameters of their own."
        raise OptionError(f"{text}{fix} ({location})") from error


@functools.cache
def class_question(cls: type) -> Callable[[object], bool]:
    """A function that says, while Dynamo traces, whether an object is exactly a *cls*.

    Its guard on the type is in C++.
    """

    def look(context: Any) -> None:
        answer_class(context, "value", "answer", cls)

    def is_one(value: object) -> bool:
        answer = isinstance(value, cls)
        run_at_trace_time(look)
        return answer

    return is_one


def original_class(value: object) -> type:
    """The class of *value*, or of the object that *value* was rebuilt from."""
    cls = type(value)
    return getattr(cls, ORIGINAL, cls)
