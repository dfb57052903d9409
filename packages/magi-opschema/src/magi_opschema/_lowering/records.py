# SPDX-License-Identifier: Apache-2.0
"""The fields of a record class: a frozen dataclass, a named tuple or a TypedDict."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import TYPE_CHECKING, Any

from magi_opschema._handles.declared import AnnotatedField, declared_fields, is_declared


if TYPE_CHECKING:
    from .place import Place


_ITEM = type(inspect.getattr_static(inspect.ArgInfo, "args"))
"""The class of what reads a field of a named tuple."""
RecordKind = typing.Literal["dataclass", "namedtuple", "typeddict", "object"]


def is_record(cls: type) -> bool:
    """Whether *cls* is a dataclass, a named tuple or a TypedDict, or declares the fields of its objects."""
    return is_declared(cls) or dataclasses.is_dataclass(cls) or typing.is_typeddict(cls) or _is_namedtuple(cls)


def _is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def fields_of(annotation: object, cls: Any, inside: Place) -> tuple[RecordKind, list[AnnotatedField]]:
    """The kind of a record class and the fields that are part of its value.

    Args:
        annotation: What the user wrote, `Config[int]` for example.
        cls: Its class.
        inside: The place of the record, with the type variables of *annotation* bound.

    Raises:
        Refused: instances cannot be taken apart and rebuilt.
    """
    if is_declared(cls):
        return "object", _object_fields(annotation, cls, inside)
    if dataclasses.is_dataclass(cls):
        return "dataclass", _dataclass_fields(annotation, cls, inside)
    if typing.is_typeddict(cls):
        return "typeddict", _typeddict_fields(annotation, cls, inside)
    return "namedtuple", _namedtuple_fields(annotation, cls, inside)


def _object_fields(annotation: object, cls: Any, place: Place) -> list[AnnotatedField]:
    if place.subject != "parameter":
        raise place.refuse(annotation, "and an op returns no objects", "Return Tensors or numbers.")
    return [part for part in declared_fields(cls) if not _is_class_variable(*part, place)]


def _is_class_variable(name: str, hint: object, owner: type, inside: Place) -> bool:
    evaluated = inside.below(name, scope=inside.scope.of_class(owner)).evaluated(hint)
    return typing.ClassVar in {evaluated, typing.get_origin(evaluated)}


def _typeddict_fields(annotation: object, cls: Any, place: Place) -> list[AnnotatedField]:
    hints = cls.__annotations__
    if missing := sorted(name for name, hint in hints.items() if _may_be_missing(cls, name, hint, place)):
        why = f"a TypedDict whose key {missing[0]!r} may be missing"
        raise place.refuse(annotation, why, "Make it total, with T | None where there may be no value.")
    return [(name, hint, cls) for name, hint in hints.items()]


def _namedtuple_fields(annotation: object, cls: Any, place: Place) -> list[AnnotatedField]:
    hints = {
        name: hint for base in reversed(cls.__mro__) for name, hint in vars(base).get("__annotations__", {}).items()
    }
    if unknown := [name for name in cls._fields if name not in hints]:
        why = f"a namedtuple whose field {unknown[0]!r} has no annotation"
        raise place.refuse(annotation, why, "Use typing.NamedTuple.")
    _check_own_methods(annotation, cls, place, cls._fields, {})
    return [(name, hints[name], cls) for name in cls._fields]


def _may_be_missing(cls: Any, name: str, hint: object, inside: Place) -> bool:
    """True for a key that is not required; in a string, TypedDict itself does not see what marks it."""
    evaluated = inside.below(name, scope=inside.scope.of_class(cls)).evaluated(hint)
    mark = getattr(typing.get_origin(evaluated), "_name", "")
    return mark == "NotRequired" or (name in cls.__optional_keys__ and mark != "Required")


def _dataclass_fields(annotation: object, cls: Any, place: Place) -> list[AnnotatedField]:
    if not cls.__dataclass_params__.frozen:
        why = "a mutable dataclass, whose changes an op could not give back"
        raise place.refuse(annotation, why, f"Declare it @dataclass(frozen=True) class {cls.__name__}.")
    for name, pseudo_field in cls.__dataclass_fields__.items():
        if pseudo_field._field_type.name == "_FIELD_INITVAR":  # noqa: SLF001
            why = f"whose InitVar {name!r} cannot be read back from an instance"
            raise place.refuse(annotation, why, "Make it a field.")
    fields = [part for part in dataclasses.fields(cls) if part.init]
    _check_own_methods(annotation, cls, place, (), {part.name: None for part in fields})
    return [(part.name, part.type, _owner(cls, part.name)) for part in fields]


def _check_own_methods(
    annotation: object, cls: type, place: Place, args: tuple[str, ...], kwargs: dict[str, None]
) -> None:
    """Raise for a hand-written `__new__` or `__init__` that cannot be called with the fields."""
    for method in sorted({"__new__", "__init__"} & _defined(cls)):
        signature = inspect.signature(getattr(cls, method))
        try:
            signature.bind(cls, *args, **kwargs)
        except TypeError:
            taken, fields = ", ".join([*signature.parameters][1:]), ", ".join([*args, *kwargs])
            why = f"whose {method} takes ({taken}) where its fields are ({fields})"
            kind = "dataclass" if dataclasses.is_dataclass(cls) else "NamedTuple"
            fix = f"Let the {kind} write {method}, or give it the fields as parameters."
            raise place.refuse(annotation, why, fix) from None


def is_plain(cls: Any) -> bool:
    """True if making an instance of a dataclass or a named tuple only stores its fields, and reading one returns it.

    A dataclass stores them in its `__dict__`.
    """
    if "__call__" in _defined(type(cls)) or "__getattribute__" in _defined(cls):
        return False
    if issubclass(cls, tuple):
        are_items = all(isinstance(inspect.getattr_static(cls, name), _ITEM) for name in cls._fields)
        made_by = getattr(cls.__new__, "__globals__", {}).get("__name__", "")
        return are_items and made_by.startswith("namedtuple_") and "__init__" not in _defined(cls)
    return (
        _has_generated_init(cls)
        and not hasattr(cls, "__post_init__")
        and "__new__" not in _defined(cls)
        and cls.__dictoffset__ != 0
        and all(part.init and not _is_descriptor(cls, part.name) for part in dataclasses.fields(cls))
    )


def _has_generated_init(cls: type) -> bool:
    """True if the dataclass decorator wrote the `__init__`, whose file name is then `<string>`."""
    code = getattr(vars(cls).get("__init__"), "__code__", None)
    # A class of a `python -c` program has the file name <string> too, but not a qualified name in dataclasses.
    return code is not None and code.co_filename == "<string>" and code.co_qualname.startswith("__create_fn__.")


def _defined(cls: type) -> set[str]:
    """The names that *cls* and its bases define, without those of builtin classes."""
    return {name for base in cls.__mro__ if base.__module__ != "builtins" for name in vars(base)}


def _is_descriptor(cls: type, name: str) -> bool:
    """True if instances do not keep the field in their `__dict__`, but in a slot for example."""
    return hasattr(inspect.getattr_static(cls, name, None), "__set__")


def _owner(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))
