# SPDX-License-Identifier: Apache-2.0
"""Where a tensor is among the arguments of a call: ``x``, ``cfg.inner.scale``, ``xs[0]``, ``opts['mask']``."""

from __future__ import annotations

import ast
import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ._verify.trees import leaves_of


@dataclass(frozen=True)
class Field:
    """A step into a record by the name of a field, or into a mapping by a key."""

    name: str

    def __str__(self) -> str:
        return f".{self.name}"


@dataclass(frozen=True)
class Item:
    """A step into a list, tuple or mapping by an index or key."""

    key: Any

    def __str__(self) -> str:
        return f"[{self.key!r}]"


Step = Field | Item


@dataclass(frozen=True)
class UnknownField:
    """A name that no field of *cls* has, and the fields that it has."""

    name: str
    cls: type
    fields: tuple[str, ...]


@dataclass(frozen=True)
class ArgumentPath:
    """A parameter, and the steps from its argument to a value in it."""

    parameter: str
    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return self.parameter + "".join(map(str, self.steps))

    @staticmethod
    def parse(text: str) -> ArgumentPath | None:
        """The path that *text* spells in Python's syntax; None if it spells none."""
        try:
            expression = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError):
            return None
        steps: list[Step] = []
        while not isinstance(expression, ast.Name):
            match expression:
                case ast.Attribute(value=inner, attr=name):
                    steps.append(Field(name))
                case ast.Subscript(value=inner, slice=index):
                    try:
                        steps.append(Item(ast.literal_eval(index)))
                    except ValueError:
                        return None
                case _:
                    return None
            expression = inner
        return ArgumentPath(expression.id, tuple(reversed(steps)))

    def find(self, argument: object) -> object:
        """The value at this path in *argument*, the value of the parameter; None if an optional part is None.

        Raises:
            LookupError: There is no such field, index or key.
        """
        value: Any = argument
        for step in self.steps:
            if value is None:
                return None
            value = _enter(value, step)
        return value

    def unknown_field(self, annotation: object) -> UnknownField | None:
        """The first step for which the classes in *annotation*, the parameter's, have no field.

        None if all have one.
        """
        for step in self.steps:
            cls = _record_class(annotation)
            if cls is None or not isinstance(step, Field):
                return None
            hints = _hints(cls)
            if step.name not in hints:
                return UnknownField(step.name, cls, tuple(hints))
            annotation = hints[step.name]
        return None


def _record_class(annotation: object) -> type | None:
    """The dataclass, named tuple or typed dict in *annotation*, which may be optional.

    None for any other annotation.
    """
    kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    if typing.get_origin(annotation) in {typing.Union, types.UnionType} and len(kinds) == 1:
        annotation = kinds[0]
    cls = typing.get_origin(annotation) or annotation
    if not isinstance(cls, type):
        return None
    is_record = dataclasses.is_dataclass(cls) or hasattr(cls, "_fields") or typing.is_typeddict(cls)
    return cls if is_record else None


def _hints(cls: type) -> dict[str, object]:
    """The fields of a record class with their annotations; those that cannot be resolved stay strings."""
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
    else:
        names = list(getattr(cls, "_fields", cls.__annotations__))
    try:
        resolved = typing.get_type_hints(cls)
    except (NameError, TypeError, AttributeError):
        resolved = {}
    return {name: resolved.get(name) for name in names}


def _enter(value: Any, step: Step) -> object:
    if isinstance(step, Item):
        items = value if isinstance(value, list | tuple | Mapping) else ()
        try:
            return items[step.key]
        except TypeError as unfit:  # a list indexed by a key
            raise LookupError(step) from unfit
    if isinstance(value, Mapping):
        return value[step.name]
    if step.name not in dict(_parts(value)):
        raise LookupError(step)
    return getattr(value, step.name)


def tensors_in(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that *value*, found at *path*, is or holds, each with its own path."""
    return ((name, leaf) for name, leaf in leaves_of(value, path) if isinstance(leaf, torch.Tensor))


def holds_anything(value: object) -> bool:
    """Whether *value* is neither None nor an empty list, tuple or mapping."""
    return value is not None and not (isinstance(value, list | tuple | Mapping) and not value)


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """The names and values of the fields of a dataclass or a named tuple; empty for any other value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
    elif isinstance(value, tuple):
        names = list(getattr(value, "_fields", ()))
    else:
        names = []
    return ((name, getattr(value, name)) for name in names if hasattr(value, name))
