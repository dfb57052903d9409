# SPDX-License-Identifier: Apache-2.0
"""What an expression in an op's body can stand for, before the body has run."""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .source import FunctionNode


@dataclass(frozen=True, eq=False)
class Known:
    """An object that exists already; *how* is the way that leads to it."""

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
    """A value that only a run can tell, and why; *unread* where code may hide behind it that has not been read."""

    reason: str
    unread: bool = False


Value = Known | Local | Launcher | Partial | Group | New | Unknown


def identity_of(value: Value) -> object:
    """What tells a value from others: equal for two of which nothing different can come."""
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
    """What tells two calls of one function apart."""
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

    def __post_init__(self) -> None:
        self.bindings = {}
        for name, binding in _bindings(self.node):
            self.bindings.setdefault(name, []).append(binding)

    def outside(self, name: str) -> tuple[Value, ...]:
        """The value of a name that this function does not bind itself."""
        if name in self.globals:
            return (Known(self.globals[name], f"global '{name}'"),)
        if hasattr(builtins, name):
            return (Known(getattr(builtins, name), f"builtin '{name}'"),)
        return (Unknown(f"'{name}' is not defined yet", unread=True),)


@dataclass(frozen=True, eq=False)
class Binding:
    """One statement that gives a name its value.

    `kind` is `value` (the expression itself), `item` (an item of it), `import`, `define` or `opaque` (a `with` or an
    `except` target).
    """

    kind: str
    node: ast.AST
    detail: Any = None


def _bindings(function: FunctionNode) -> Iterator[tuple[str, Binding]]:
    body = [function.body] if isinstance(function, ast.Lambda) else function.body
    for statement in body:
        for node in walk_own(statement):
            yield from _bindings_of(node)


def walk_own(node: ast.AST) -> Iterator[ast.AST]:
    """Like `ast.walk`, but stays out of the bodies of nested functions and classes."""
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
        return
    for child in ast.iter_child_nodes(node):
        yield from walk_own(child)


def _bindings_of(node: ast.AST) -> Iterator[tuple[str, Binding]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _targets(target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield from _targets(target, value)
        case ast.NamedExpr(target=target, value=value):
            yield from _targets(target, value)
        case _:
            yield from _statement_bindings(node)


def _statement_bindings(node: ast.AST) -> Iterator[tuple[str, Binding]]:
    match node:
        case ast.For(target=ast.Name(id=name), iter=source) | ast.comprehension(target=ast.Name(id=name), iter=source):
            yield name, Binding("item", source)
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name, Binding("define", node)
        case ast.Import(names=names):
            for alias in names:
                yield alias.asname or alias.name.split(".")[0], Binding("import", node, alias)
        case ast.ImportFrom(names=names):
            for alias in names:
                yield alias.asname or alias.name, Binding("import", node, alias)
        case ast.withitem(optional_vars=ast.Name(id=name)) | ast.ExceptHandler(name=str(name)):
            yield name, Binding("opaque", node)


def _targets(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, Binding]]:
    match target, value:
        case ast.Name(id=name), _:
            yield name, Binding("value", value)
        case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), (ast.Tuple(elts=values) | ast.List(elts=values))) if (
            len(targets) == len(values)
        ):
            for one_target, one_value in zip(targets, values, strict=True):
                yield from _targets(one_target, one_value)
        case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), _):
            for one_target in targets:
                if isinstance(one_target, ast.Name):
                    yield one_target.id, Binding("item", value)
