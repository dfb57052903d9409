# SPDX-License-Identifier: Apache-2.0
"""The uuid of a pass: computed once, and again after something that it was computed from was replaced.

Inductor puts a pass's uuid into its cache keys and skips the pass if an entry is found. Everything that changes the
graph that a pass produces must change the uuid, or a cache returns code that another pass produced.

A pass may be asked for its uuid while its module is being loaded, before the functions below it exist; a notebook
defines a function again; a test puts another method into a class. Neither may leave an old uuid behind.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from . import _torch_compat
from ._identity.code import digest
from ._identity.library import Standing, root_of, standing_of
from ._identity.members import MISSING, REMEMBERED, Footprint
from ._identity.value_forms import Place, is_frozen, state_of, type_name
from ._identity.walk import Walk
from .errors import PassIdentityError


_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_CODE = (type, types.ModuleType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)  # noqa: SLF001
_UUID = "_uuid"
_OPERATORS = _torch_compat.graphs.operator_types()


class _PassWalk(Walk):
    """A walk from a pass, which may import modules and read modules as values, and may be one of our own."""

    def unstable(self, value: Any, place: Place, why: str) -> str:  # noqa: ARG002 - as in Walk
        if place.is_lenient:
            return digest("unstable", type_name(type(value)))
        raise PassIdentityError(_no_stable_form(value, place.text))

    def loaded(self, name: str) -> Any:
        # It is imported here if the pass would import it when it runs.
        if super().loaded(name) is MISSING:
            try:
                return importlib.import_module(name)
            except ImportError:
                return MISSING
        return super().loaded(name)

    def unloaded(self, place: Place, names: list[str]) -> str:  # noqa: ARG002 - as in Walk
        return digest("absent", *names)

    def special_form(self, value: Any, place: Place) -> str | None:  # noqa: ARG002 - as in Walk
        return digest("operator", str(value)) if isinstance(value, _OPERATORS) else None


def describe(roots: Iterable[tuple[Any, str]], own: frozenset[str]) -> tuple[str, Footprint]:
    """A digest of *roots* and all they reach, and what it was made from.

    Args:
        roots: Functions, classes or values, each with its name in errors, such as ``MyPass.threshold``.
        own: Top-level packages whose code is the author's own, installed or not.

    Raises:
        PassIdentityError: Code of the author reads a value without a stable form.
    """
    walk = _PassWalk(own)
    return walk.result((value, Place(where)) for value, where in roots), walk.footprint


@dataclass(frozen=True)
class _Remembered:
    """A digest, and what it was made from. A copy of its owner, or another process, does not get it."""

    digest: str = ""
    footprint: Footprint | None = None
    of: tuple[object, ...] = ()

    def holds_for(self, *of: object) -> bool:
        """Whether *of* are the objects that this was made for, and nothing that they reach was replaced."""
        is_same = len(of) == len(self.of) and all(map(_is_same, of, self.of))
        return is_same and self.footprint is not None and self.footprint.is_unchanged()

    def __reduce__(self) -> tuple[object, ...]:
        return (_Remembered, ())


def uuid_of(instance: Any, *, besides: tuple[type, ...] = ()) -> str:
    """A digest of the class, the fields and all code that *instance*, a frozen dataclass, reaches, and torch's release.

    Args:
        instance: The pass.
        besides: Classes whose instances it gets as arguments, so that it reaches their code without naming it.

    Raises:
        PassIdentityError: A field holds a mutable value, or a value without a stable form is read.
    """
    cls = type(instance)
    of_class = _of_class(cls, besides)
    fields = state_of(instance)
    release = _torch_compat.machine.torch_version()
    known = vars(instance).get(_UUID)
    if not isinstance(known, _Remembered) or not known.holds_for(of_class, release, *fields.values()):
        roots = [(value, f"{cls.__name__}.{name}") for name, value in fields.items()]
        for value, where in roots:
            _refuse_mutable(value, where)
        of_fields, footprint = describe(roots, _own(cls))
        found = digest("uuid", of_class, *fields, of_fields, release)
        known = _Remembered(f"{cls.__name__}-{found}", footprint, (of_class, release, *fields.values()))
        object.__setattr__(instance, _UUID, known)
    return known.digest


def _is_same(one: object, other: object) -> bool:
    # 1, True and 1.0 are equal, and two passes with them are not.
    return one is other or (type(one) is type(other) is str and one == other)


def _of_class(cls: type, besides: tuple[type, ...]) -> str:
    if REMEMBERED not in vars(cls):
        # It is a list, so that what a class is compared with does not change each time it is described.
        setattr(cls, REMEMBERED, [_Remembered()])
    memory = vars(cls)[REMEMBERED]
    if not memory[0].holds_for(cls):
        roots = [(one, one.__name__) for one in (cls, *besides)]
        memory[0] = _Remembered(*describe(roots, _own(cls)), (cls,))
    return str(memory[0].digest)


def _own(cls: type) -> frozenset[str]:
    """Top-level packages of *cls* and of its base classes."""
    return frozenset(root_of(base) for base in cls.__mro__ if standing_of(base) is not Standing.LIBRARY)


def _refuse_mutable(value: Any, where: str) -> None:
    """Raise `PassIdentityError` if *value*, a field of a pass, can change after the pass is made."""
    if isinstance(value, tuple | frozenset):
        for item in value:
            _refuse_mutable(item, where)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type) and is_frozen(type(value)):
        for name, held in state_of(value).items():
            _refuse_mutable(held, f"{where}.{name}")
    elif isinstance(value, functools.partial):
        _refuse_mutable((*value.args, *value.keywords.values()), where)
    elif isinstance(value, types.MethodType):
        _refuse_mutable(value.__self__, where)
    elif not _is_fixed(value):
        raise PassIdentityError(_no_stable_form(value, where))


def _is_fixed(value: Any) -> bool:
    is_plain = isinstance(value, (*_PLAIN, *_TORCH_VALUES, *_CODE, enum.Enum))
    return is_plain or inspect.isroutine(value) or hasattr(value, "__wrapped__")


def _no_stable_form(value: object, where: str) -> str:
    """The sentence of the error for a value that cannot be part of a uuid."""
    if isinstance(value, list | dict | set):
        fix = "Use a tuple or a frozenset: a value that can change later cannot be part of a cache key."
    else:
        fix = "Use plain values, tuples, enums, functions or frozen dataclasses; look the object up when the pass runs."
    return f"{where} is a {type(value).__qualname__}, which cannot be part of a pass's uuid. {fix}"
