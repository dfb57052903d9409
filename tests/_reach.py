# SPDX-License-Identifier: Apache-2.0
"""Which functions of some packages a class can reach, read from their syntax trees alone.

A second opinion on what a uuid covers, so it shares no code with magi_passes. Names are resolved as Python does: the
locals of a function and of those around it, then the module, through imports of the packages themselves. Attributes
are followed on modules only; of a class everything in its body counts. Annotations are never evaluated, so they count
for nothing.
"""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


NOT_IN_A_FUNCTION: frozenset[str] = frozenset({"<module>"})
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True)
class Place:
    """A function of a module, by the line on which its definition starts."""

    module: str
    name: str
    line: int


@dataclass
class Module:
    """A module's source, and what its top-level names are bound to."""

    name: str
    file: Path
    tree: ast.Module
    bound: dict[str, list[ast.AST]] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)


def read_packages(folders: Iterable[Path]) -> dict[str, Module]:
    """The modules of the packages in *folders*, by name."""
    modules = {}
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            parts = (folder.name, *file.relative_to(folder).with_suffix("").parts)
            name = ".".join(part for part in parts if part != "__init__")
            modules[name] = _module(name, file)
    return modules


def _module(name: str, file: Path) -> Module:
    module = Module(name, file, ast.parse(file.read_text()))
    for statement in _executed(module.tree.body):
        match statement:
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                module.bound.setdefault(statement.name, []).append(statement)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    for one in ast.walk(target):
                        if isinstance(one, ast.Name):
                            module.bound.setdefault(one.id, []).append(value)
            case ast.AnnAssign(target=ast.Name(id=target_name), value=ast.expr() as value):
                module.bound.setdefault(target_name, []).append(value)
            case ast.Import() | ast.ImportFrom():
                module.imported.update(_imports(module, statement))
    return module


def _executed(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module that run, also those under an `if`, but not those for type checkers."""
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from _executed([one for one in ast.iter_child_nodes(statement) if isinstance(one, ast.stmt)])


def _imports(module: Module, statement: ast.Import | ast.ImportFrom) -> dict[str, tuple[str, str]]:
    """What an import binds: (module, name in it), with an empty name for a module."""
    if isinstance(statement, ast.Import):
        return {alias.asname or alias.name.partition(".")[0]: (alias.name, "") for alias in statement.names}
    base = statement.module or ""
    if statement.level:
        is_package = module.file.name == "__init__.py"
        parts = module.name.split(".")
        parts = parts[: len(parts) - statement.level + is_package]
        base = ".".join([*parts, base] if base else parts)
    return {alias.asname or alias.name: (base, alias.name) for alias in statement.names}


class Reach:
    """Walks from definitions to definitions."""

    def __init__(self, modules: dict[str, Module]) -> None:
        self.modules = modules
        self.functions: set[Place] = set()
        self._seen: set[int] = set()

    def name(self, module: str, name: str) -> None:
        """Reach the object that *name* of *module* refers to."""
        if module not in self.modules:
            return
        if f"{module}.{name}" in self.modules:
            return  # a module; its attributes are reached one by one
        home = self.modules[module]
        for node in home.bound.get(name, ()):
            self.node(node, home, NOT_IN_A_FUNCTION, {})
        if name in home.imported:
            self.name(*home.imported[name])

    def node(self, node: ast.AST, home: Module, hidden: frozenset[str], local: dict[str, tuple[str, str]]) -> None:
        """Reach what *node* mentions; *hidden* names are locals, *local* ones are imported by a function."""
        if isinstance(node, Function | ast.ClassDef | ast.Lambda):
            if id(node) in self._seen:
                return
            self._seen.add(id(node))
        if isinstance(node, Function):
            self.functions.add(Place(home.name, node.name, node.lineno))
        if isinstance(node, Function | ast.Lambda):
            hidden = hidden | _locals(node)
            local = {**local, **_inner_imports(node, home)}
        match node:
            case ast.Attribute(value=ast.Name() | ast.Attribute()):
                base, *inner = ast.unparse(node.value).split(".")
                target = local.get(base) or (None if base in hidden else home.imported.get(base))
                if target is not None:
                    self.name(".".join(part for part in (*target, *inner) if part), node.attr)
            case ast.Name(id=name):
                if name in local:
                    self.name(*local[name])
                elif name not in hidden:
                    self.name(home.name, name)
        for child in _evaluated(node, is_definition=not local and hidden is NOT_IN_A_FUNCTION):
            self.node(child, home, hidden, local)


def _evaluated(node: ast.AST, *, is_definition: bool) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        if is_definition and isinstance(node, ast.Call) and name == "func" and not _is_class_name(node.func):
            continue  # it ran when the module was loaded, and what it returned is what counts
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.arg):
                continue
            if isinstance(child, ast.AST):
                yield child


def _is_class_name(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2].lstrip("_")[:1].isupper()


def _own_nodes(function: Function | ast.Lambda) -> Iterator[ast.AST]:
    todo: list[ast.AST] = list(function.body) if isinstance(function, Function) else [function.body]
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            todo += ast.iter_child_nodes(node)


def _locals(function: Function | ast.Lambda) -> frozenset[str]:
    arguments = function.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    names = {one.arg for one in every if one is not None}
    declared: set[str] = set()
    for node in _own_nodes(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        if isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.Global):
            declared.update(node.names)
    return frozenset(names - declared)


def _inner_imports(function: Function | ast.Lambda, home: Module) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for node in _own_nodes(function):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.update(_imports(home, node))
    return found


def reachable(modules: dict[str, Module], *roots: tuple[str, str]) -> set[Place]:
    """The functions that classes or functions, given as (module, name), can reach."""
    reach = Reach(modules)
    for module, name in roots:
        reach.name(module, name)
    return reach.functions


def edited(module: Module, place: Place) -> str:
    """The source of *module* with one more statement in the function at *place*."""
    lines = module.file.read_text().splitlines()
    node = next(one for one in ast.walk(module.tree) if isinstance(one, Function) and one.lineno == place.line)
    has_text = ast.get_docstring(node, clean=False) is not None
    first = node.body[1] if has_text and len(node.body) > 1 else node.body[0]
    if has_text and len(node.body) == 1:
        at, column = first.end_lineno or first.lineno, first.col_offset
    else:
        start = min([first.lineno, *(one.lineno for one in getattr(first, "decorator_list", ()))])
        at, column = start - 1, first.col_offset
    return "\n".join([*lines[:at], textwrap.indent("edited_for_a_test = 1", " " * column), *lines[at:], ""])
