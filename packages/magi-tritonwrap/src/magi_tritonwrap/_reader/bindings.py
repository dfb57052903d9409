# SPDX-License-Identifier: Apache-2.0
"""Which names a function binds, and what each statement gives them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .source import FunctionNode


@dataclass(frozen=True, eq=False)
class Binding:
    """One statement that gives a name its value.

    `kind` is `value` (the expression itself), `item` (an item of it), `entry` (the part at *detail* of an item, as in
    `for name, kernel in pairs`), `import`, `define` or `opaque` (what only a run can tell, as the target of a `with`).
    """

    kind: str
    node: ast.AST
    detail: Any = None


@functools.lru_cache(maxsize=4096)
def bindings(function: FunctionNode) -> dict[str, list[Binding]]:
    """Every name that *function* binds in its body, with the statements that bind it."""
    found: dict[str, list[Binding]] = {}
    for node in _own_nodes(function):
        for name, binding in _bindings_of(node):
            found.setdefault(name, []).append(binding)
    return found


@functools.lru_cache(maxsize=4096)
def declared_outside(function: FunctionNode) -> frozenset[str]:
    """The names that *function* declares `global` or `nonlocal`."""
    nodes = _own_nodes(function)
    return frozenset(name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names)


def walk_own(node: ast.AST) -> Iterator[ast.AST]:
    """Like `ast.walk`, but stays out of the bodies of nested functions and classes."""
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
        return
    for child in ast.iter_child_nodes(node):
        yield from walk_own(child)


def _own_nodes(function: FunctionNode) -> Iterator[ast.AST]:
    body = [function.body] if isinstance(function, ast.Lambda) else function.body
    for statement in body:
        yield from walk_own(statement)


def _bindings_of(node: ast.AST) -> Iterator[tuple[str, Binding]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _assigned(target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            yield from _assigned(target, value)
        case ast.For(target=target, iter=source) | ast.AsyncFor(target=target, iter=source):
            yield from _items(target, source)
        case ast.comprehension(target=target, iter=source):
            yield from _items(target, source)
        case ast.AugAssign(target=ast.expr() as target) | ast.withitem(optional_vars=ast.expr() as target):
            yield from _opaque(target, node)
        case _:
            yield from _statement_bindings(node)


def _statement_bindings(node: ast.AST) -> Iterator[tuple[str, Binding]]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name, Binding("define", node)
        case ast.Import(names=names):
            for alias in names:
                yield alias.asname or alias.name.split(".")[0], Binding("import", node, alias)
        case ast.ImportFrom(names=names):
            for alias in names:
                yield alias.asname or alias.name, Binding("import", node, alias)
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name, Binding("opaque", node)
        case ast.MatchMapping(rest=str(name)):
            yield name, Binding("opaque", node)


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, Binding]]:
    match target, value:
        case ast.Name(id=name), _:
            yield name, Binding("value", value)
        case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), (ast.Tuple(elts=values) | ast.List(elts=values))) if (
            len(targets) == len(values)
        ):
            for one_target, one_value in zip(targets, values, strict=True):
                yield from _assigned(one_target, one_value)
        case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), _):
            for one_target in targets:
                if isinstance(one_target, ast.Name):
                    yield one_target.id, Binding("item", value)
                else:
                    yield from _opaque(one_target, value)


def _items(target: ast.expr, source: ast.expr) -> Iterator[tuple[str, Binding]]:
    match target:
        case ast.Name(id=name):
            yield name, Binding("item", source)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for at, part in enumerate(parts):
                if isinstance(part, ast.Name):
                    yield part.id, Binding("entry", source, at)
                else:
                    yield from _opaque(part, source)


def _opaque(target: ast.expr, node: ast.AST) -> Iterator[tuple[str, Binding]]:
    for name in ast.walk(target):
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
            yield name.id, Binding("opaque", node)
