# SPDX-License-Identifier: Apache-2.0
"""Which functions of a library launch Triton kernels, read from its files alone.

It shares no code with magi-tritonwrap, so that each can show what the other overlooks. Nothing is imported and nothing
runs: a function launches what it writes as `kernel[grid](...)` and what the functions that it names launch. Names are
followed through imports, module globals, classes and methods. Where the launched thing is a parameter or a local name,
every kernel counts that the function, or one that calls it, mentions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


_MAX_STEPS = 12  # of one name through imports and globals


@dataclass(frozen=True, order=True)
class Place:
    """A function, class or kernel of a library; a module where *name* is empty."""

    module: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass
class _Names:
    """What a module or a function binds: definitions, imported names, and expressions."""

    package: str
    defined: dict[str, list[str]] = field(default_factory=dict)
    imported: dict[str, list[Place]] = field(default_factory=dict)
    assigned: dict[str, list[ast.expr]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)

    def add_import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                self.imported.setdefault(alias.asname or name, []).append(Place(name))
            return
        parts = self.package.split(".")
        above = parts[: len(parts) - node.level + 1] if node.level else []
        source = ".".join([*above, *filter(None, [node.module])])
        for alias in node.names:
            if alias.name == "*":
                self.stars.append(source)
            else:
                self.imported.setdefault(alias.asname or alias.name, []).append(Place(source, alias.name))


@dataclass
class _Module:
    """One file: its global names, its functions and methods by qualified name, its kernels and its classes."""

    name: str
    names: _Names
    functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = field(default_factory=dict)
    kernels: set[str] = field(default_factory=set)
    classes: dict[str, list[ast.expr]] = field(default_factory=dict)


@dataclass
class _Uses:
    """What one function names and launches."""

    kernels: set[Place] = field(default_factory=set)
    functions: set[Place] = field(default_factory=set)
    launched: set[Place] = field(default_factory=set)
    launches_a_local_name: bool = False


class Scan:
    """The functions of one library, and the kernels that each can launch.

    Args:
        folder: where the library is installed.
        package: its top-level package.
        without: names of modules and packages that are left out, such as code for other devices.
    """

    def __init__(self, folder: Path, package: str, without: frozenset[str] = frozenset()) -> None:
        self._modules: dict[str, _Module] = {}
        for file in sorted((folder / package).rglob("*.py")):
            parts = list(file.relative_to(folder).with_suffix("").parts)
            if not without & set(parts):
                self._read(file, parts)
        self._found: dict[tuple[str, str], frozenset[Place]] = {}
        self._uses = {
            Place(module.name, name): self._uses_of(module, name, nodes)
            for module in self._modules.values()
            for name, nodes in module.functions.items()
        }

    def launching(self) -> dict[Place, frozenset[Place]]:
        """Every function that launches, with the kernels that it can launch."""
        reached = {place: self._own_launches(uses) for place, uses in self._uses.items()}
        todo = list(reached)
        callers: dict[Place, set[Place]] = {}
        for place, uses in self._uses.items():
            for called in uses.functions:
                callers.setdefault(called, set()).add(place)
        while todo:
            called = todo.pop()
            for caller in callers.get(called, ()):
                new = reached[called] - reached[caller]
                if new:
                    reached[caller] |= new
                    todo.append(caller)
        return {place: frozenset(kernels) for place, kernels in sorted(reached.items()) if kernels}

    def _own_launches(self, uses: _Uses) -> set[Place]:
        called = [self._uses[place] for place in uses.functions if place in self._uses]
        passes_kernels = uses.launches_a_local_name or any(one.launches_a_local_name for one in called)
        return set(uses.launched | uses.kernels) if passes_kernels else set(uses.launched)

    def _read(self, file: Path, parts: list[str]) -> None:
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        package = name if is_package else name.rpartition(".")[0]
        module = _Module(name, _Names(package))
        self._modules[name] = module
        _collect(ast.parse(file.read_text()).body, module, owner="")

    def _uses_of(self, module: _Module, name: str, nodes: list[ast.FunctionDef | ast.AsyncFunctionDef]) -> _Uses:
        uses = _Uses()
        for node in nodes:
            reader = _Reader(self, module, name.rpartition(".")[0], node)
            for statement in node.body:
                for inner in ast.walk(statement):
                    reader.note(inner, uses)
        return uses

    def global_name(self, module: str, name: str, steps: int = 0) -> frozenset[Place]:
        """What a global name of a module can be: functions, classes, kernels and modules of this library."""
        if module not in self._modules or steps > _MAX_STEPS:
            return frozenset()
        if (module, name) not in self._found:
            self._found[module, name] = frozenset()
            self._found[module, name] = frozenset(self._look_up(self._modules[module], name, steps))
        return self._found[module, name]

    def _look_up(self, module: _Module, name: str, steps: int) -> Iterator[Place]:
        names = module.names
        for defined in names.defined.get(name, ()):
            yield Place(module.name, defined)
        for place in names.imported.get(name, ()):
            yield from self.imported(place, steps)
        for expression in names.assigned.get(name, ()):
            for node in ast.walk(expression):
                if isinstance(node, ast.Name | ast.Attribute):
                    yield from self.resolve(node, module, "", steps + 1)
        if name not in names.defined and name not in names.imported:
            for star in names.stars:
                yield from self.global_name(star, name, steps + 1)
        if f"{module.name}.{name}" in self._modules:
            yield Place(f"{module.name}.{name}")

    def imported(self, place: Place, steps: int = 0) -> frozenset[Place]:
        """What an import binds."""
        if place.name:
            return self.global_name(place.module, place.name, steps + 1)
        return frozenset({place}) if place.module in self._modules else frozenset()

    def resolve(self, node: ast.expr, module: _Module, owner: str, steps: int = 0) -> frozenset[Place]:
        """What a dotted name in a module can be; *owner* is the class of the method that contains it."""
        match node:
            case ast.Name(id=name):
                return self.global_name(module.name, name, steps + 1)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=attribute) if owner:
                return frozenset(self._method(Place(module.name, owner), attribute))
            case ast.Attribute(value=base, attr=attribute):
                bases = self.resolve(base, module, owner, steps + 1)
                return frozenset(found for one in bases for found in self.attribute(one, attribute, steps))
        return frozenset()

    def attribute(self, place: Place, name: str, steps: int = 0) -> Iterator[Place]:
        """What `place.name` can be; `apply` of an autograd function is its forward."""
        if not place.name:
            yield from self.global_name(place.module, name, steps + 1)
            return
        yield from self._method(place, name)
        if name == "apply":
            yield from self._method(place, "forward")

    def _method(self, cls: Place, name: str, steps: int = 0) -> Iterator[Place]:
        module = self._modules[cls.module]
        own = f"{cls.name}.{name}"
        if own in module.functions or own in module.kernels:
            yield Place(cls.module, own)
        elif steps < _MAX_STEPS:
            for base in module.classes.get(cls.name, ()):
                for found in self.resolve(base, module, ""):
                    if self.is_class(found):
                        yield from self._method(found, name, steps + 1)

    def is_class(self, place: Place) -> bool:
        return bool(place.name) and place.name in self._modules[place.module].classes

    def is_kernel(self, place: Place) -> bool:
        return bool(place.name) and place.name in self._modules[place.module].kernels

    def called(self, place: Place) -> Iterator[Place]:
        """The functions that calling *place* runs: of a class, its `__init__`."""
        if self.is_class(place):
            yield from self._method(place, "__init__")
        elif place.name:
            yield place


class _Reader:
    """Reads one function."""

    def __init__(self, scan: Scan, module: _Module, owner: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._scan, self._module, self._owner = scan, module, owner
        self._imports = _Names(module.names.package)
        self._bound = {argument.arg for argument in ast.walk(node) if isinstance(argument, ast.arg)}
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import | ast.ImportFrom):
                self._imports.add_import(inner)
            elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                self._bound.add(inner.id)

    def note(self, node: ast.AST, uses: _Uses) -> None:
        """Add what *node* names or launches to *uses*."""
        if isinstance(node, ast.Name | ast.Attribute):
            for place in self._resolve(node):
                if self._scan.is_kernel(place):
                    uses.kernels.add(place)
                uses.functions.update(self._scan.called(place))
        launched = _launched(node)
        if launched is not None:
            kernels = {place for place in self._resolve(launched) if self._scan.is_kernel(place)}
            uses.launched |= kernels
            uses.launches_a_local_name |= not kernels

    def _resolve(self, node: ast.expr) -> frozenset[Place]:
        base = node
        while isinstance(base, ast.Attribute):
            base = base.value
        if not isinstance(base, ast.Name):
            return frozenset()
        if base.id in self._imports.imported:
            return self._through_local_import(node)
        if base.id in self._bound and base.id not in ("self", "cls"):
            return frozenset()
        return self._scan.resolve(node, self._module, self._owner)

    def _through_local_import(self, node: ast.expr) -> frozenset[Place]:
        if isinstance(node, ast.Name):
            places = self._imports.imported[node.id]
            return frozenset(found for place in places for found in self._scan.imported(place))
        assert isinstance(node, ast.Attribute)
        return frozenset(
            found for one in self._through_local_import(node.value) for found in self._scan.attribute(one, node.attr)
        )


def _launched(node: ast.AST) -> ast.expr | None:
    """What a launch launches: `kernel` of `kernel[grid](...)` and of `kernel.run(..., grid=grid)`."""
    match node:
        case ast.Call(func=ast.Subscript(value=kernel)):
            return kernel
        case ast.Call(func=ast.Attribute(value=kernel, attr="run"), keywords=keywords):
            return kernel if any(keyword.arg == "grid" for keyword in keywords) else None
    return None


def _collect(body: list[ast.stmt], module: _Module, owner: str) -> None:
    """Note the definitions and bindings of a module or a class body, those in branches included."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = _defined(node.name, module, owner)
            # A kernel and the function that launches it may have one name, the kernel by another one meanwhile.
            if any(_is_jit(decorator) for decorator in node.decorator_list):
                module.kernels.add(name)
            else:
                module.functions.setdefault(name, []).append(node)
        elif isinstance(node, ast.ClassDef):
            name = _defined(node.name, module, owner)
            module.classes[name] = node.bases
            _collect(node.body, module, name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module.names.add_import(node)
        elif isinstance(node, ast.Assign) and not owner:
            for target in node.targets:
                if isinstance(target, ast.Name):
                    module.names.assigned.setdefault(target.id, []).append(node.value)
        for block in _blocks(node):
            _collect(block, module, owner)


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The statements in the branches of a statement that opens no scope of its own."""
    if isinstance(node, ast.If | ast.Try | ast.With):
        yield node.body
        yield getattr(node, "orelse", [])
        yield getattr(node, "finalbody", [])
    for handler in getattr(node, "handlers", ()):
        yield handler.body


def _defined(name: str, module: _Module, owner: str) -> str:
    qualified = f"{owner}.{name}" if owner else name
    if not owner:
        module.names.defined.setdefault(name, []).append(qualified)
    return qualified


def _is_jit(decorator: ast.expr) -> bool:
    named = decorator.func if isinstance(decorator, ast.Call) else decorator
    text = ast.unparse(named)
    return text.rpartition(".")[2] == "jit" and not text.startswith("tilelang.")
