# SPDX-License-Identifier: Apache-2.0
"""What the author of a pass declares and its user gives, checked; passes that are switched off; and the uuid of a pass.

A pass is made long before it runs, and its fields are part of a cache key. ``True`` instead of ``1`` would compile
everything again, and a string instead of a number would fail inside a compilation.

Inductor puts a pass's uuid into its cache keys and skips the pass if an entry is found. Everything that changes the
graph that a pass produces must change the uuid, or a cache returns code that another pass produced. A pass may be asked
for its uuid while its module is being loaded, before the functions below it exist; a notebook defines a function again;
a test puts another method into a class. So a uuid is computed once, and again after something that it was computed from
was replaced.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import os
import types
import typing
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from typing import Any

import torch

from magi_passes import _torch_compat
from magi_passes._identity.code import digest
from magi_passes._identity.library import Standing, root_of, standing_of
from magi_passes._identity.members import MISSING, REMEMBERED
from magi_passes._identity.walk import Place, Walk, is_frozen, state_of, type_name
from magi_passes.errors import (
    PassArgumentError,
    PassArgumentTypeError,
    PassDefinitionError,
    PassIdentityError,
    UnknownConfigKeyError,
    UnknownPassNameError,
    UnknownVariableWarning,
)


DISABLE_VARIABLE = "MAGI_PASSES_DISABLE"
_ALL = "all"
classes_of_passes: weakref.WeakSet[type] = weakref.WeakSet()
"""What the environment variable may name. A pass of a test or a notebook is forgotten together with its class."""


def nearest(name: str, known: Iterable[str], n: int = 1) -> str:
    """The question whether one of the *n* names of *known* that are most like *name* is meant; empty if none is."""
    close = get_close_matches(name, sorted(known), n)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def disabled_passes() -> frozenset[str]:
    """The class names in the environment variable MAGI_PASSES_DISABLE, separated by commas; ``all`` is every pass.

    Raises:
        UnknownPassNameError: A name is not the class of a pass that is loaded.
    """
    for variable in os.environ:
        _warn_if_misspelt(variable)
    names = frozenset(name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",") if name.strip())
    if names:
        known = {_ALL, *(cls.__name__ for cls in list(classes_of_passes))}
        for name in sorted(names - known):
            raise UnknownPassNameError(
                f"{DISABLE_VARIABLE} names {name!r}, which is not a pass.{nearest(name, known)} Give the names of "
                f"classes, separated by commas, or 'all'. Loaded are {', '.join(sorted(known - {_ALL}))}."
            )
    return names


@functools.cache
def _warn_if_misspelt(variable: str) -> None:
    """Warn, once in a process, that nobody reads *variable* of the environment if its name is like that of ours."""
    name = variable.upper()
    is_like_ours = name.startswith("MAGI_PASSES_") or get_close_matches(name, [DISABLE_VARIABLE], cutoff=0.85)
    if is_like_ours and variable != DISABLE_VARIABLE:
        meant = nearest(name, [DISABLE_VARIABLE])
        msg = f"The environment variable {variable} is not read by magi-passes.{meant} The variables are: "
        warnings.warn(msg + DISABLE_VARIABLE, UnknownVariableWarning, stacklevel=3)


def is_disabled(graph_pass: object) -> bool:
    """Whether the environment switches *graph_pass* off."""
    return not disabled_passes().isdisjoint({_ALL, type(graph_pass).__name__})


def check_declarations(cls: Any) -> None:
    """Raise `PassDefinitionError` if the keys, the hook or the ``__call__`` of *cls* cannot work."""
    keys = cls.inductor_config_keys_potentially_mutated_by_this_pass
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise PassDefinitionError(
            f"{cls.__qualname__}.inductor_config_keys_potentially_mutated_by_this_pass must be a tuple of strings, "
            f"such as ('triton.max_tiles',); got {keys!r}."
        )
    if cls.hook not in _torch_compat.config.HOOKS:
        hooks = _torch_compat.config.HOOKS
        raise PassDefinitionError(
            f"{cls.__qualname__}.hook is {cls.hook!r}; Inductor has {', '.join(hooks)}.{nearest(str(cls.hook), hooks)}"
        )
    if keys and cls.hook in _torch_compat.config.EARLY_HOOKS:
        raise PassDefinitionError(
            f"{cls.__qualname__} declares configuration keys but runs at {cls.hook}, long before the code generation "
            f"that reads them. Run it at {' or '.join(_torch_compat.config.POST_GRAD_HOOKS)}."
        )
    body = vars(cls).get("__call__")
    if body is not None and not isinstance(body, types.FunctionType):
        raise PassDefinitionError(f"{cls.__qualname__}.__call__ is a {type(body).__name__}; define it with def.")
    for name in vars(cls):
        plain = name.removeprefix(f"_{cls.__name__.lstrip('_')}")  # __call_ is a private name to Python
        for meant, (likeness, is_one) in _AUTHORS.items():
            is_like = SequenceMatcher(None, plain.lower(), meant).ratio() >= likeness
            is_longer = plain.startswith(f"{meant}_")  # is_applicable_to is a name of its own
            if is_like and not is_longer and meant not in vars(cls) and is_one(vars(cls)[name]):
                raise PassDefinitionError(
                    f"{cls.__qualname__}.{plain} is almost {meant!r}, which {cls.__qualname__} does not define. "
                    f"Rename it, or give what is not meant as {meant!r} another name. ({cls.__module__})"
                )


# What the author of a pass defines -> how alike another name may be, from 0 to 1, and which values count.
_AUTHORS: dict[str, tuple[float, Callable[[Any], bool]]] = {
    "is_applicable": (0.88, inspect.isroutine),
    "__call__": (0.9, inspect.isroutine),
    "uuid": (0.88, inspect.isroutine),
    "hook": (0.7, lambda value: isinstance(value, str) and value in _torch_compat.config.HOOKS),
    "inductor_config_keys_potentially_mutated_by_this_pass": (0.8, lambda value: isinstance(value, (tuple, list, str))),
}


def check_class_keywords(cls: type, keywords: Iterable[str]) -> None:
    """Raise `PassDefinitionError` for the first of *keywords*, which the definition of *cls* has after its bases."""
    for name in keywords:
        raise PassDefinitionError(
            f"class {cls.__qualname__}: {name!r} is not a keyword of the class of a pass. Write it into the body of "
            f"the class.{nearest(name, _AUTHORS)}"
        )


def check_keywords(cls: Any, keywords: Iterable[str]) -> None:
    """Raise `PassArgumentTypeError` for one of *keywords* that is not a parameter of *cls*, a dataclass."""
    parameters = inspect.signature(cls.__init__).parameters if keywords else {}
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        for name in keywords:
            if name not in parameters:
                known = [each for each in parameters if each != "self"]
                raise PassArgumentTypeError(
                    f"{cls.__qualname__} has no field {name!r}.{nearest(name, known)} Its fields are "
                    f"{', '.join(known) or 'none'}."
                )


def check_is_frozen(cls: type) -> None:
    """Raise `PassDefinitionError` unless *cls* is itself decorated as a frozen dataclass.

    A subclass that adds a field without the decorator would be missing that field in its uuid.
    """
    undecorated = "__dataclass_fields__" not in vars(cls) and any(
        "ClassVar" not in str(annotation) for annotation in inspect.get_annotations(cls).values()
    )
    if undecorated or not is_frozen(cls):
        raise PassDefinitionError(
            f"{cls.__qualname__} is not a frozen dataclass, so its parameters would be missing from the cache key. "
            f"Decorate it with @dataclass(frozen=True). ({cls.__module__})"
        )
    if "__slots__" in vars(cls):
        msg = f"{cls.__qualname__} is a dataclass with slots=True; the base class needs a __dict__. Leave slots out."
        raise PassDefinitionError(msg)


def check_keys_exist(cls: Any) -> None:
    """Raise `UnknownConfigKeyError` when *cls* declares a key that the running torch does not have."""
    known = _torch_compat.config.config_keys()
    for key in cls.inductor_config_keys_potentially_mutated_by_this_pass:
        if key not in known:
            release = _torch_compat.config.torch_version()
            msg = f"{cls.__qualname__} declares the Inductor key {key!r}, which torch {release} does not have."
            msg += nearest(key, known, n=2)
            raise UnknownConfigKeyError(msg)


def check_types(instance: Any) -> None:
    """Raise `PassArgumentTypeError` for a field of *instance* that holds another type than it is annotated with.

    Fields have plain types: bool, int, float, str, None and unions of them. An int is accepted as a float; a bool is
    not accepted as an int.
    """
    cls: type = type(instance)
    for name, kinds in _kinds_of(cls).items():
        value = getattr(instance, name)
        if type(value) not in kinds and not (type(value) is int and float in kinds):
            wanted = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in kinds)
            raise PassArgumentTypeError(
                f"{type(instance).__name__}: {name} must be {wanted}, not {value!r} of type "
                f"{type(value).__name__}.{_advice(value, kinds)}"
            )


# What else holds for a field of the passes of this package, by its name.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_tiles": (lambda n: n in (2, 3), "a Triton grid has up to three dimensions; use 2 or 3"),
    "nodes_per_conv": (lambda n: n >= 1, "it is a number of nodes for each convolution; use 1 or more"),
    "max_taps": (lambda n: n >= 1, "a kernel has at least one tap; use 1 or more"),
    "tune_seconds": (lambda n: n is None or n > 0, "it is a time; use a number of seconds, or None for no end"),
    "min_skipped": (lambda n: n >= 0, "it is a share of the arithmetic; use 0 or more, above 1 for never"),
    "min_share": (lambda n: 0 <= n <= 1, "it is a share of the arithmetic; use a number from 0 to 1"),
}


def check_fields(instance: Any) -> None:
    """Raise `PassArgumentTypeError` or `PassArgumentError` for a field of *instance* that cannot be used."""
    check_types(instance)
    for name, (holds, rule) in _RULES.items():
        if hasattr(instance, name) and not holds(getattr(instance, name)):
            raise PassArgumentError(f"{type(instance).__name__}: {name}={getattr(instance, name)!r}: {rule}")


@functools.cache
def _kinds_of(cls: type) -> dict[str, tuple[type, ...]]:
    hints = typing.get_type_hints(cls)
    return {field.name: typing.get_args(hints[field.name]) or (hints[field.name],) for field in dataclasses.fields(cls)}


def _advice(value: object, kinds: tuple[type, ...]) -> str:
    if isinstance(value, type):
        return " Give an instance, not the class."
    if isinstance(value, os.PathLike) and str in kinds:
        return " Write str(...) around it."
    number = next((kind for kind in (bool, int, float) if kind in kinds), None)
    is_scalar = hasattr(value, "item") or hasattr(value, "__index__") or isinstance(value, float)
    if number is not None and is_scalar:
        return f" Write {number.__name__}(...) around it."
    return ""


# Types of values that never change.
_FIXED = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, type, types.ModuleType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),  # noqa: SLF001
)
_UUID = "_uuid"


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
        return digest("operator", str(value)) if isinstance(value, _torch_compat.compiling.OPERATOR_TYPES) else None


def describe(roots: Iterable[tuple[Any, str]], own: frozenset[str], earlier: Walk | None = None) -> Walk:
    """A walk from *roots*, which have names for errors, such as ``MyPass.threshold``, after the walk *earlier*.

    The code of the top-level packages *own* is read as the author's, installed or not.
    """
    walk = _PassWalk(own, earlier=earlier)
    walk.result((value, Place(where)) for value, where in roots)
    return walk


@dataclass(frozen=True)
class _Remembered:
    """A walk with its result, and what it was for. A copy of its owner, or another process, does not get it."""

    digest: str = ""
    walk: Walk | None = None
    of: tuple[object, ...] = ()

    def holds_for(self, *of: object) -> bool:
        """Whether *of* are the objects that this was made for, and nothing that they reach was replaced."""
        is_same = len(of) == len(self.of) and all(map(_is_same, of, self.of))
        return is_same and self.walk is not None and self.walk.footprint.is_unchanged()

    def __reduce__(self) -> tuple[object, ...]:
        return (_Remembered, ())


def uuid_of(instance: Any) -> str:
    """A digest of the class and fields of *instance*, a frozen dataclass, of all code that they reach, and of torch."""
    cls = type(instance)
    of_class = _of_class(cls).digest
    fields = state_of(instance)
    release = _torch_compat.config.torch_version()
    known = vars(instance).get(_UUID)
    if not isinstance(known, _Remembered) or not known.holds_for(of_class, release, *fields.values()):
        roots = [(value, f"{cls.__name__}.{name}") for name, value in fields.items()]
        for value, where in roots:
            _refuse_mutable(value, where)
        walk = describe(roots, _own(cls))
        found = digest("uuid", of_class, *fields, walk.digest, release)
        known = _Remembered(f"{cls.__name__}-{found}", walk, (of_class, release, *fields.values()))
        object.__setattr__(instance, _UUID, known)
    return known.digest


def _is_same(one: object, other: object) -> bool:
    # 1, True and 1.0 are equal, and two passes with them are not.
    return one is other or (type(one) is type(other) is str and one == other)


def _of_class(cls: type) -> _Remembered:
    """The walk from *cls*. The walk from a class of ours beneath it, which has how passes are run, goes before."""
    ours = next((base for base in cls.__mro__[1:] if standing_of(base) is Standing.OURS), None)
    earlier = None if ours is None else _of_class(ours).walk
    known: _Remembered = vars(cls).get(REMEMBERED, _Remembered())
    if not known.holds_for(cls, earlier):
        walk = describe([(cls, cls.__name__)], _own(cls), earlier)
        setattr(cls, REMEMBERED, known := _Remembered(walk.digest, walk, (cls, earlier)))
    return known


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
    elif not (isinstance(value, _FIXED) or inspect.isroutine(value) or hasattr(value, "__wrapped__")):
        raise PassIdentityError(_no_stable_form(value, where))


def _no_stable_form(value: object, where: str) -> str:
    """The sentence of the error for a value that cannot be part of a uuid."""
    if isinstance(value, list | dict | set):
        fix = "Use a tuple or a frozenset: a value that can change later cannot be part of a cache key."
    else:
        fix = "Use plain values, tuples, enums, functions or frozen dataclasses; look the object up when the pass runs."
    return f"{where} is a {type(value).__qualname__}, which cannot be part of a pass's uuid. {fix}"
