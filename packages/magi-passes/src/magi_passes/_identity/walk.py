# SPDX-License-Identifier: Apache-2.0
"""A digest of what a pass does: its class, all code that its work can reach, and the values that this code reads.

Inductor puts a pass's uuid into its cache keys and skips the pass if an entry is found. Everything that changes the
graph that a pass produces must change the uuid, or a cache returns code that another pass produced.

Functions are followed by their code objects, so functions without source count too: the globals that they name,
attributes of modules, closures, defaults, decorators, imports in a body. Objects are numbered in the order in which the
walk meets them, and each is described by its own code and the numbers of what it refers to.

The walk reads more than is strictly needed, on purpose: every attribute of a module that the code mentions, and every
member of a class. An edit that changes nothing may cause a cache miss; an edit that changes something never causes a
hit.

magi-tritonwrap's walk does the same for an op. This one differs because a pass may import modules and read modules as
values, follows our own packages as well, and notes what it read.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from magi_passes.errors import PassIdentityError

from .code import CodeNames, Import, code_digest, code_names, digest
from .footprint import MISSING, Footprint
from .library import Standing, content_of, content_of_module, standing_of, standing_of_module, version_of
from .members import C_FUNCTIONS, contents_of, members_of
from .value_forms import Place, container_form, foreign_form, instance_form, plain_form, runtime_form, type_name


def describe(roots: Iterable[tuple[Any, str]], own: frozenset[str]) -> tuple[str, Footprint]:
    """A digest of *roots* and all they reach, and what it was made from.

    Args:
        roots: Functions, classes or values, each with its name in errors, such as ``MyPass.threshold``.
        own: Top-level packages whose code is the author's own, installed or not.

    Raises:
        PassIdentityError: Code of the author reads a value without a stable form.
    """
    walk = _Walk(own)
    return walk.result((value, Place(where)) for value, where in roots), walk.footprint


class _Walk:
    """A walk that numbers each value it meets, and describes it once."""

    def __init__(self, own: frozenset[str], outer: tuple[int, ...] = ()) -> None:
        self.footprint = Footprint()
        self._own = own
        self._outer = outer
        self._numbers: dict[tuple[int, Standing | None], int] = {}
        self._met: list[tuple[Any, Place]] = []  # also keeps what is numbered alive, so that no id comes twice

    def result(self, roots: Iterable[tuple[Any, Place]]) -> str:
        """The digest of *roots*."""
        forms = [self.form(root, place) for root, place in roots]
        for value, place in self._met:  # grows meanwhile
            forms.append(self._description(value, place))
        return digest("roots", *forms)

    def form(self, value: Any, place: Place) -> str:
        """The form of *value* where it is plain; otherwise the number under which the walk describes it."""
        plain = plain_form(self, value, place) or self._wrapper(value, place)
        if plain is not None:
            return plain
        is_code = isinstance(value, types.FunctionType | type)
        key = (id(value), None if is_code else place.read_by)
        if key not in self._numbers:
            self._numbers[key] = len(self._met)
            self._met.append((value, place))
        return f"#{self._numbers[key]}"

    def unordered(self, values: Iterable[Any], place: Place) -> list[str]:
        """The forms of the items of a set, ordered by the digest of each item on its own."""
        inner = place.inner(" (an item)")
        alone = sorted(((self._alone(value, inner), value) for value in values), key=lambda pair: pair[0])
        return [self.form(value, inner) for _, value in alone]

    def _alone(self, value: Any, place: Place) -> str:
        if id(value) in self._outer:
            return ""
        return _Walk(self._own, (*self._outer, id(value))).result([(value, place)])

    def unstable(self, value: Any, place: Place) -> str:
        """The name of the type of *value*, if *place* is lenient.

        Raises:
            PassIdentityError: *place* is not lenient.
        """
        if place.is_lenient:
            return digest("unstable", type_name(type(value)))
        raise PassIdentityError(no_stable_form(value, place.text))

    def _wrapper(self, value: Any, place: Place) -> str | None:
        """The form of *value* where Python makes it at each access, as a bound method, or puts it around a function.

        It is None for any other value.
        """
        if isinstance(value, types.MethodType):
            return digest(
                "method", self.form(value.__func__, place), self.form(value.__self__, place.inner(".__self__"))
            )
        if isinstance(value, staticmethod | classmethod):
            return digest(type(value).__name__, self.form(value.__func__, place))
        if isinstance(value, functools.partial | functools.partialmethod):
            parts = (value.func, tuple(value.args), dict(value.keywords))
            return digest(type(value).__name__, *(self.form(part, place) for part in parts))
        if isinstance(value, C_FUNCTIONS):
            owner = getattr(value, "__self__", None)
            is_bound = owner is not None and not isinstance(owner, types.ModuleType)
            bound = self.form(owner, place.inner(".__self__")) if is_bound else ""
            module = getattr(value, "__module__", None)
            return digest("builtin", str(module), value.__qualname__, bound, self._extension(module))
        return None

    def _extension(self, module: str | None) -> str:
        """A digest of the extension module that a C function comes from; empty if that is a library's."""
        if module is None or standing_of_module(module) is Standing.LIBRARY:
            return ""
        return content_of(getattr(sys.modules.get(module), "__file__", None))

    def _description(self, value: Any, place: Place) -> str:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            return self._module(value, None, place, ())
        if isinstance(value, types.CodeType):
            return code_digest(value)
        return (
            self._descriptor(value, place)
            or foreign_form(value, place)
            or runtime_form(self, value, place)
            or container_form(self, value, place)
            or instance_form(self, value, place)
        )

    def _descriptor(self, value: Any, place: Place) -> str | None:
        if isinstance(value, property):
            return digest("property", *(self.form(part, place) for part in (value.fget, value.fset, value.fdel)))
        if isinstance(value, functools.cached_property):
            return digest("cached_property", self.form(value.func, place))
        if isinstance(value, functools._lru_cache_wrapper):  # noqa: SLF001 - the class has no public name
            return digest("cache", self.form(value.__wrapped__, place))
        if isinstance(value, functools.singledispatchmethod):
            return digest("singledispatchmethod", self.form(value.dispatcher, place), self.form(value.func, place))
        return None

    def _standing(self, value: Any) -> tuple[Standing, Place]:
        standing = standing_of(value, self._own)
        return standing, Place("", standing)

    def _function(self, function: types.FunctionType) -> str:
        standing, place = self._standing(function)
        here = function.__qualname__
        self.footprint.note(functools.partial(_parts_of_function, function))
        table = vars(function).get("registry")
        if standing is Standing.LIBRARY and table is not None:  # functools.singledispatch
            return digest("singledispatch", self.form(table, place.of(f"the registry of {here}")))
        if standing is Standing.LIBRARY and not function.__closure__:
            return digest("library function", str(function.__module__), here)
        defaults = place.of(f"a default of {here}")
        parts = [code_digest(function.__code__)]
        parts += [self.form(function.__defaults__, defaults), self.form(function.__kwdefaults__, defaults)]
        if standing is not Standing.LIBRARY:
            names = code_names(function.__code__)
            parts += self._read_by(function, names, place)
            parts += [self.form(vars(function), place.of(f"the attributes of {here}"))] if vars(function) else []
            parts += [self._distribution(standing, function.__globals__, function.__code__.co_filename)]
        parts += self._closure(function, place)
        return digest("function", *parts)

    def _distribution(self, standing: Standing, namespace: Mapping[str, Any], file: str | None) -> str:
        """The release and the file that installed code comes from, because a walk does not see all of that code."""
        if standing is not Standing.INSTALLED:
            return ""
        root = str(namespace.get("__name__", "")).partition(".")[0]
        return digest("installed", version_of(root), content_of(file))

    def _closure(self, function: types.FunctionType, place: Place) -> Iterator[str]:
        names = code_names(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.footprint.note(functools.partial(contents_of, cell))
            for value in contents_of(cell):
                where = place.of(f"closure variable {name!r} of {function.__qualname__}")
                yield self._variable(name, value, where, names)

    def _read_by(self, function: types.FunctionType, names: CodeNames, place: Place) -> Iterator[str]:
        here = function.__qualname__
        for name in names.globals:
            value = self.footprint.read(function.__globals__, name)
            yield name
            if value is not MISSING:
                yield self._variable(name, value, place.of(f"global {name!r} read by {here}"), names)
        for one in names.imports:
            yield self._imported(one, function.__globals__, names, place.of(f"{one.module!r} imported by {here}"))

    def _variable(self, name: str, value: Any, place: Place, names: CodeNames) -> str:
        if type(value) in (list, set, dict, deque) and names.is_only_written(name):
            return digest("log", type(value).__name__)
        if not isinstance(value, types.ModuleType):
            return self.form(value, place)
        # Which attributes of a module are read cannot be told here when the module is passed on as a value.
        return self._module(value, None if name in names.whole else names, place, ())

    def _imported(self, one: Import, namespace: Mapping[str, Any], names: CodeNames, place: Place) -> str:
        package = namespace.get("__package__") or ""
        if one.level and not package:
            return "relative import without a package"
        relative = "." * one.level + one.module
        name = importlib.util.resolve_name(relative, package) if one.level else one.module
        if place.read_by is Standing.INSTALLED or standing_of_module(name) is Standing.LIBRARY:
            # Whether the module is loaded already depends on what ran before.
            return digest("import", name, content_of_module(name))
        found = [self._loaded(name)]
        if isinstance(found[0], types.ModuleType):
            missing = [taken for taken in one.names if taken != "*" and not hasattr(found[0], taken)]
            found += [self._loaded(f"{name}.{taken}") for taken in missing]
        whole = one.variable in names.whole or "*" in one.names
        modules = [module for module in found if isinstance(module, types.ModuleType)]
        return digest("import", name, *(self._module(m, None if whole else names, place, ()) for m in modules))

    def _loaded(self, name: str) -> object:
        """The module *name*, which is imported here if a pass would import it when it runs; None if there is none."""
        if self.footprint.read(sys.modules, name) is MISSING:
            try:
                return importlib.import_module(name)
            except ImportError:
                return None
        return sys.modules.get(name)

    def _module(self, module: types.ModuleType, names: CodeNames | None, place: Place, above: tuple[int, ...]) -> str:
        """The form of a module: of the attributes that code with *names* can read, or of all for None."""
        standing, inside = self._standing(module)
        if standing is Standing.LIBRARY:
            return digest("library module", module.__name__, str(getattr(module, "__version__", "")))
        space = vars(module)
        parts = [self._distribution(standing, space, getattr(module, "__file__", None))] if names is None else []
        if id(module) in above or (names is None and standing is Standing.INSTALLED):
            return digest("module", *parts)
        if names is None:
            self.footprint.note(space.keys)
        wanted = (name for name in space if not name.startswith("__")) if names is None else names.mentioned
        for name in sorted(wanted):
            value = self._attribute(module, name, names, standing)
            if value is MISSING:
                continue
            here = inside.of(f"{module.__name__}.{name} ({place.text})")
            above_here = (*above, id(module))
            is_module = isinstance(value, types.ModuleType)
            parts += [name, self._module(value, names, here, above_here) if is_module else self.form(value, here)]
        return digest("module", *parts)

    def _attribute(self, module: types.ModuleType, name: str, names: CodeNames | None, standing: Standing) -> Any:
        value = self.footprint.read(vars(module), name)
        is_lazy = "__getattr__" in vars(module) and standing is not Standing.INSTALLED
        if value is MISSING and is_lazy and names is not None and name in names.attributes:
            return getattr(module, name, MISSING)
        return value

    def _class(self, cls: type) -> str:
        standing, place = self._standing(cls)
        if standing is Standing.LIBRARY:
            return digest("library class", type_name(cls))
        module = sys.modules.get(cls.__module__)
        parts = [
            cls.__qualname__,
            self._distribution(standing, vars(module or types), getattr(module, "__file__", None)),
        ]
        parts += [self.form(base, place.of(f"a base of {cls.__qualname__}")) for base in (*cls.__bases__, type(cls))]
        self.footprint.note(vars(cls).values)
        for name, member in members_of(cls).items():
            parts += [name, self.form(member, place.of(f"{cls.__qualname__}.{name}"))]
        return digest("class", *parts)


def _parts_of_function(function: types.FunctionType) -> tuple[object, ...]:
    """The parts of a function that can be replaced."""
    return (function.__code__, function.__defaults__, function.__kwdefaults__, *vars(function).values())


def no_stable_form(value: object, where: str) -> str:
    """The sentence of the error for a value that cannot be part of a uuid."""
    if isinstance(value, list | dict | set):
        fix = "Use a tuple or a frozenset: a value that can change later cannot be part of a cache key."
    else:
        fix = "Use plain values, tuples, enums, functions or frozen dataclasses; look the object up when the pass runs."
    return f"{where} is a {type(value).__qualname__}, which cannot be part of a pass's uuid. {fix}"
