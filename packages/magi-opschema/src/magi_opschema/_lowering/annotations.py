# SPDX-License-Identifier: Apache-2.0
"""Annotations as objects: strings are evaluated, aliases and wrappers removed, type variables replaced."""

from __future__ import annotations

import builtins
import functools
import inspect
import sys
import types
import typing
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from magi_opschema._text import is_class


_SYMBOLIC: dict[object, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
"""What a symbolic number is in an annotation: every number of a schema may be symbolic."""


@dataclass(frozen=True)
class Scope:
    """Where the names in string annotations are looked up: a module's globals, then names local to a function."""

    globals: dict[str, Any]
    locals: MutableMapping[str, Any]

    def of_class(self, cls: type) -> Scope:
        """The scope of the annotations in *cls*: its module, *cls* itself, then the names around the op.

        The names around the op come first for a class that is local to a function there, and last for any other class:
        `Mode` in a class of another module is that module's `Mode`, not the op's.
        """
        module: dict[str, Any] = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
        itself: dict[str, Any] = {cls.__name__: cls}
        # Builtins come before the attributes of the class: in a class with slots, a field `float` is a descriptor.
        own = [module, vars(builtins), dict(vars(cls))]
        if "<locals>" in cls.__qualname__ and cls.__module__ == self.globals.get("__name__"):
            return Scope(module, ChainMap(itself, self.locals, *own, self.globals))
        return Scope(module, ChainMap(*own, itself, self.locals, self.globals))


def scope_of(fn: Callable[..., Any], frame: types.FrameType | None) -> Scope:
    """The scope of *fn*'s annotations.

    *frame* is the frame of the decorator, or of a function that it called. The locals of functions around *fn* are
    searched, so that `from __future__ import annotations` works with classes that are local to a function.
    For a wrapper, the wrapped function counts, as for `inspect.signature`.
    """
    fn = inspect.unwrap(fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        return Scope({}, {})
    closure = {}
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            closure[name] = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    return Scope(fn.__globals__, ChainMap(closure, *_locals_around(code, fn.__module__, frame)))


def _locals_around(code: types.CodeType, module: str, frame: types.FrameType | None) -> Iterator[dict[str, Any]]:
    """The locals of the running functions and classes around *code*, innermost first.

    They may be apart on the stack, because a helper, or another package, may have called the decorator.
    """
    outermost = code.co_qualname.partition(".")[0]
    while frame is not None:
        name = frame.f_code.co_qualname
        if name.partition(".")[0] in {outermost, "<module>"} and frame.f_globals.get("__name__") == module:
            if frame.f_locals is not frame.f_globals:
                yield dict(frame.f_locals)
            if "." not in name:
                return
        frame = frame.f_back


def evaluate(annotation: object, scope: Scope) -> object:
    """*annotation* with every string in it evaluated.

    It raises what the evaluation raises: NameError, SyntaxError, AttributeError or TypeError.
    """
    if isinstance(annotation, str):
        annotation = eval(_compiled(annotation), scope.globals, scope.locals)  # noqa: S307
    if annotation is None or is_class(annotation):
        return annotation
    # get_type_hints resolves forward references at any depth, for any object with annotations.
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    return typing.get_type_hints(holder, scope.globals, scope.locals, include_extras=True)["it"]


@functools.cache
def _compiled(annotation: str) -> types.CodeType:
    # In brackets, as in typing, because an annotation may be indented or have several lines.
    return compile(f"(\n{annotation}\n)", "<annotation>", "eval", dont_inherit=True)


def unwrap(annotation: object) -> tuple[object, bool]:
    """*annotation* without NewType, Annotated, Final, Required, ReadOnly and aliases; and whether it had one.

    A symbolic number is a number: `int | torch.SymInt` is `int`.
    """
    wrapped = False
    while True:
        origin = typing.get_origin(annotation)
        if isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif origin is typing.Annotated:
            annotation = annotation.__origin__  # type: ignore[attr-defined]
        elif getattr(origin, "_name", getattr(origin, "__name__", "")) in {"Final", "Required", "ReadOnly"}:
            (annotation,) = typing.get_args(annotation)
        elif type(annotation).__name__ == "TypeAliasType":  # PEP 695 and typing_extensions; `type X = int`
            annotation = annotation.__value__  # type: ignore[attr-defined]
        elif type(origin).__name__ == "TypeAliasType":  # `type Pair[T] = tuple[T, T]`, as Pair[int]
            bound = dict(zip(origin.__type_params__, typing.get_args(annotation), strict=False))  # type: ignore[union-attr]
            annotation = substitute(origin.__value__, bound)  # type: ignore[union-attr]
        elif is_class(annotation) and annotation in _SYMBOLIC:
            annotation = _SYMBOLIC[annotation]
        elif origin in {typing.Union, types.UnionType} and not _SYMBOLIC.keys().isdisjoint(typing.get_args(annotation)):
            members = tuple(_SYMBOLIC.get(each, each) for each in typing.get_args(annotation))
            annotation = typing.Union[members]  # noqa: UP007  (there may be any number)
        else:
            return annotation, wrapped
        wrapped = True


def substitute(annotation: object, bound: Mapping[object, object]) -> object:
    """*annotation* with type variables replaced: `list[T]` with `{T: int}` is `list[int]`."""
    if not bound:
        return annotation
    if isinstance(annotation, typing.TypeVar):
        return bound.get(annotation, annotation)
    parameters = getattr(annotation, "__parameters__", ())
    if not parameters or is_class(annotation):
        return annotation
    return annotation[tuple(bound.get(parameter, parameter) for parameter in parameters)]  # type: ignore[index]


def type_arguments(annotation: object) -> dict[object, object]:
    """What each type variable of a generic class stands for in *annotation*, including inherited ones.

    For `class Child(Base[int], Generic[T])` and `Child[str]`: `{T of Base: int, T of Child: str}`.
    """
    origin = typing.get_origin(annotation) or annotation
    own = dict(zip(getattr(origin, "__parameters__", ()), typing.get_args(annotation), strict=False))
    bound: dict[object, object] = dict(own)
    for base in getattr(origin, "__orig_bases__", ()):
        if typing.get_origin(base) not in {None, typing.Generic, typing.Protocol}:
            bound = type_arguments(substitute(base, own)) | bound
    return bound
