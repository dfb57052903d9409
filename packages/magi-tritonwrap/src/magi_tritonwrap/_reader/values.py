# SPDX-License-Identifier: Apache-2.0
"""What an expression in an op's body can stand for, before the body has run."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .bindings import Binding, bindings, declared_outside
from .source import FunctionNode


@dataclass(frozen=True, eq=False)
class Known:
    """An object that exists already; *how* says how the code reaches it."""

    obj: Any
    how: str
    wrapped: bool = False


@dataclass(frozen=True, eq=False)
class Local:
    """A function, a lambda or a kernel that the analysed code defines when it runs."""

    node: FunctionNode
    scope: Scope
    how: str
    wrapped: bool = False


@dataclass(frozen=True, eq=False)
class Launcher:
    """`kernel[grid]`, not called yet."""

    kernel: Known | Local


@dataclass(frozen=True, eq=False)
class Partial:
    """`functools.partial(function, *args, **kwargs)`, also a method bound to its object."""

    function: Value
    args: tuple[tuple[Value, ...], ...]
    kwargs: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Group:
    """A tuple, list or dict display; keys are None where only the order is known."""

    items: tuple[tuple[object, tuple[Value, ...]], ...]


@dataclass(frozen=True, eq=False)
class New:
    """An instance that the analysed code makes: its class, and its `__init__` with the arguments bound."""

    cls: type
    init: Scope | None


@dataclass(frozen=True, eq=False)
class Unknown:
    """A value known only at run time, with the reason; *unread* is True if it may lead to code that was not read."""

    reason: str
    unread: bool = False


Value = Known | Local | Launcher | Partial | Group | New | Unknown


def identity_of(value: Value) -> object:
    """A key that is equal for two values from which the same follows."""
    match value:
        case Known(obj=obj, wrapped=wrapped):
            return ("known", id(obj), wrapped)
        case Local(node=node, scope=scope, wrapped=wrapped):
            return ("local", id(node), id(scope), wrapped)
        case Launcher(kernel=kernel):
            return ("launcher", identity_of(kernel))
        case Partial(function=function, args=args, kwargs=kwargs):
            return ("partial", identity_of(function), identity_of_arguments(args, kwargs))
        case Group(items=items):
            return ("group", tuple((repr(key), *map(identity_of, values)) for key, values in items))
        case New(cls=cls, init=init):
            return ("new", id(cls), id(init))
        case Unknown(unread=unread):
            return ("unknown", unread)


def identity_of_arguments(args: tuple[tuple[Value, ...], ...], kwargs: Mapping[str, tuple[Value, ...]]) -> object:
    """A key that is equal for two calls of one function with equal arguments."""
    named = tuple((name, *map(identity_of, values)) for name, values in sorted(kwargs.items()))
    return tuple(tuple(map(identity_of, values)) for values in args), named


@dataclass(eq=False)
class Scope:
    """The names that an expression can use: a function's locals, its closure or enclosing function, its globals."""

    node: FunctionNode
    file: str
    globals: Mapping[str, Any]
    names: dict[str, tuple[Value, ...]]
    parent: Scope | None = None
    bindings: dict[str, list[Binding]] = field(init=False)
    from_outside: frozenset[str] = field(init=False)
    """Names declared `global` or `nonlocal`, which can also stand for their values outside the function."""

    def __post_init__(self) -> None:
        self.bindings = bindings(self.node)
        self.from_outside = declared_outside(self.node)

    def outside(self, name: str) -> tuple[Value, ...]:
        """The value of a name that this function does not bind itself."""
        if name in self.globals:
            if self.globals[name] is None:
                return (Unknown(f"the global '{name}' is None until something sets it", unread=True),)
            return (Known(self.globals[name], f"global '{name}'"),)
        if hasattr(builtins, name):
            return (Known(getattr(builtins, name), f"builtin '{name}'"),)
        return (Unknown(f"'{name}' is not defined yet", unread=True),)
