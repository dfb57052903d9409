# SPDX-License-Identifier: Apache-2.0
"""Classes that say which of their attributes are Tensors and which are constants, so that ops take objects apart."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, overload

import torch

from magi_opschema._text import location_of_class, show_value, show_with_type
from magi_opschema.errors import OptionError


C = TypeVar("C", bound=type)
Names = Iterable[str] | Mapping[str, object] | None
AnnotatedField = tuple[str, object, type]
"""Name, annotation and defining class."""

_ATTRIBUTE = "_magi_see_through"
_NOT_OBJECTS = (torch.Tensor, int, float, str, tuple, list, dict, enum.Enum)


@dataclass(frozen=True)
class Declaration:
    """The arguments of `see_through_object`: fields by name with their annotations; None for all annotated ones."""

    fields: Mapping[str, object] | None


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
    setattr(cls, _ATTRIBUTE, Declaration(fields))
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
    return isinstance(getattr(cls, _ATTRIBUTE, None), Declaration)


def declared_fields(cls: Any) -> list[AnnotatedField]:
    """The attributes that a declared class names, with their annotations; class variables are included."""
    declaration: Declaration = getattr(cls, _ATTRIBUTE)
    if declaration.fields is None:
        return annotated_fields(cls)
    owners = {name: owner for name, _, owner in annotated_fields(cls)}
    return [(name, hint, owners.get(name, cls)) for name, hint in declaration.fields.items()]
