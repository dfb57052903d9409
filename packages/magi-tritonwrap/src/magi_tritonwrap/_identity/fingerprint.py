# SPDX-License-Identifier: Apache-2.0
"""A digest of everything that decides what a function does: its code, what it calls, and the values those read.

Functions are followed by their code objects, so functions without source count too. The walk stops at libraries, whose
versions are already in torch's key. Two processes that load the same code with the same values get the same digest; a
value without a stable form, for example a socket, is listed in `unstable`, and then the digest is not a key.

Objects are numbered in the order in which the walk meets them, and each is described by its own code and the numbers of
what it refers to. So reference cycles end, and the depth of the caller's stack makes no difference.

The walk reads more than is strictly needed, on purpose: every attribute of a user's module that the code mentions, and
every member of a class. An edit that changes nothing may cause a cache miss; an edit that changes something never
causes a hit. An installed distribution that is not the op's own counts by its release, the content of each file that
the walk reaches, and the code and plain values that its functions read.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from magi_tritonwrap._kernel.bodies import bodies_mentioned, body_of_inner_op
from magi_tritonwrap._library import (
    Standing,
    content_of,
    content_of_module,
    content_of_package,
    root_of,
    standing_of,
    standing_of_module,
    version_of,
)
from magi_tritonwrap._torch_compat import overload_of, schemas_of

from .code import CodeNames, Import, code_digest, code_names, digest
from .members import C_FUNCTIONS, contents_of, members_of
from .value_forms import (
    Place,
    container_form,
    foreign_form,
    instance_form,
    kernel_form,
    plain_form,
    runtime_form,
    type_name,
)


@dataclass(frozen=True)
class Fingerprint:
    """A digest, and the paths of values that have no stable form."""

    digest: str
    unstable: tuple[str, ...]


def fingerprint(values: Iterable[Any], name: str) -> Fingerprint:
    """The fingerprint of functions, kernels or plain values.

    Args:
        values: where the walk starts; the distributions that they are from are read as their author's own.
        name: what paths of unstable values start with.
    """
    roots = list(values)
    walk = _Walk(frozenset(map(root_of, roots)))
    found = walk.result((value, Place(name)) for value in roots)
    return Fingerprint(found, tuple(dict.fromkeys(walk.unstable_values)))


class _Walk:
    """A walk that numbers each value it meets, and describes it once."""

    def __init__(self, own: frozenset[str], outer: tuple[int, ...] = ()) -> None:
        self.unstable_values: list[str] = []
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

    def unstable(self, value: Any, place: Place, why: str) -> str:
        """Note that *value* has no stable form, where that matters."""
        if not place.is_lenient:
            self.unstable_values.append(f"{place.text} {why}")
        return digest("unstable", type_name(type(value)))

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
        if isinstance(value, types.CodeType):
            return code_digest(value)
        if isinstance(value, types.ModuleType):
            return self._module(value, None, place, ())
        return (
            kernel_form(self, value, place)
            or self._callable(value, place)
            or foreign_form(value, place)
            or runtime_form(self, value, place)
            or container_form(self, value, place)
            or instance_form(self, value, place)
        )

    def _callable(self, value: Any, place: Place) -> str | None:
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, OpOverload | OpOverloadPacket | CustomOpDef):
            return self._op(value, place)
        if isinstance(value, property):
            return digest("property", *(self.form(part, place) for part in (value.fget, value.fset, value.fdel)))
        if isinstance(value, functools.cached_property):
            return digest("cached_property", self.form(value.func, place))
        if isinstance(value, functools._lru_cache_wrapper):  # noqa: SLF001 - the class has no public name
            return digest("cache", self.form(value.__wrapped__, place))
        if isinstance(value, functools.singledispatchmethod):
            return digest("singledispatchmethod", self.form(value.dispatcher, place), self.form(value.func, place))
        return None

    def _op(self, value: Any, place: Place) -> str:
        body = body_of_inner_op(value)
        op = overload_of(value) if isinstance(value, CustomOpDef) else value
        inner = "" if body is None else self.form(body, place.of(f"body of {op}"))
        return digest("op", str(op), *schemas_of(op), inner)

    def _standing(self, value: Any) -> tuple[Standing, Place]:
        standing = standing_of(value, self._own)
        return standing, Place("", standing)

    def _function(self, function: types.FunctionType) -> str:
        standing, place = self._standing(function)
        here = f"{function.__module__}.{function.__qualname__}"
        table = vars(function).get("registry")
        if standing is Standing.LIBRARY and table is not None:  # functools.singledispatch
            return digest("singledispatch", self.form(table, place.of(f"the registry of {here}")))
        is_followed = standing in (Standing.OPEN, Standing.INSTALLED)
        if not is_followed and not function.__closure__:
            return digest("library function", here, self._distribution(standing, here, None))
        defaults = place.of(f"defaults of {here}")
        parts = [code_digest(function.__code__)]
        parts += [self.form(function.__defaults__, defaults), self.form(function.__kwdefaults__, defaults)]
        names = code_names(function.__code__)
        if is_followed:
            parts += self._read_by(function, here, names, place)
            parts += [self.form(vars(function), place.of(f"attributes of {here}"))] if vars(function) else []
        module = str(function.__globals__.get("__name__", ""))
        parts += [self._distribution(standing, module, function.__code__.co_filename)]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            where = place.of(f"closure variable '{name}' of {here}")
            parts += [name, *(self._variable(name, value, where, names) for value in contents_of(cell))]
        return digest("function", *parts)

    def _distribution(self, standing: Standing, module: str, file: str | None) -> str:
        """The release of the distribution that *module* comes from, and the content of *file*.

        For our own packages, of all files.
        """
        root = module.partition(".")[0]
        if standing is Standing.OURS:
            return content_of_package(root)
        if standing is Standing.INSTALLED:
            return digest("installed", version_of(root), content_of(file))
        return ""

    def _read_by(self, function: types.FunctionType, here: str, names: CodeNames, place: Place) -> Iterator[str]:
        for name in names.globals:
            if name in function.__globals__:
                yield name
                where = place.of(f"global '{name}' read by {here}")
                yield self._variable(name, function.__globals__[name], where, names)
        for one in names.imports:
            yield self._imported(one, function.__globals__, names, place.of(here))
        for op, body in bodies_mentioned(names.mentioned):
            yield op
            yield self.form(body, place.of(f"body of {op}"))

    def _variable(self, name: str, value: Any, place: Place, names: CodeNames) -> str:
        if type(value) in (list, set, dict, deque) and names.is_only_written(name):
            return digest("log", type(value).__name__)
        if not isinstance(value, types.ModuleType):
            return self.form(value, place)
        # Which attributes of a module are read cannot be told here when the module is passed on as a value.
        return self._module(value, None if name in names.whole else names, place, ())

    def _imported(self, one: Import, namespace: Mapping[str, Any], names: CodeNames, place: Place) -> str:
        package = namespace.get("__package__") or ""
        relative = "." * one.level + one.module
        name = importlib.util.resolve_name(relative, package) if one.level and package else one.module
        standing = standing_of_module(name, self._own)
        if place.read_by is Standing.INSTALLED or standing in (Standing.LIBRARY, Standing.OURS):
            # Whether the module is loaded already depends on what ran before.
            return digest("import", name, self._distribution(standing, name, None), content_of_module(name))
        where = place.of(f"module '{name}' imported by {place.text}")
        if name not in sys.modules:
            return self.unstable(name, where, "is not loaded yet")
        found = sys.modules[name]
        inner = [f"{name}.{taken}" for taken in one.names if not hasattr(found, taken)]
        modules = [found, *(sys.modules[taken] for taken in inner if taken in sys.modules)]
        if any(taken not in sys.modules for taken in inner):
            return self.unstable(name, where, f"has not loaded {', '.join(inner)} yet")
        forms = (self._variable(one.variable, module, where, names) for module in modules)
        return digest("import", name, *forms)

    def _module(self, module: types.ModuleType, names: CodeNames | None, place: Place, above: tuple[int, ...]) -> str:
        """The form of a module: of the attributes that code with *names* can read, or of all for None."""
        standing, inside = self._standing(module)
        if standing in (Standing.LIBRARY, Standing.OURS):
            version = str(getattr(module, "__version__", ""))
            return digest(
                "library module", module.__name__, version, self._distribution(standing, module.__name__, None)
            )
        if names is None:
            if standing is Standing.INSTALLED:
                return digest("module", self._distribution(standing, module.__name__, module.__file__))
            return self.unstable(module, place, "is a module that is passed around as a value")
        if id(module) in above:
            return digest("module", module.__name__)
        parts = [module.__name__]
        for name in sorted(names.mentioned & vars(module).keys()):
            value = vars(module)[name]
            here = inside.of(f"{module.__name__}.{name}")
            is_module = isinstance(value, types.ModuleType)
            above_here = (*above, id(module))
            parts += [name, self._module(value, names, here, above_here) if is_module else self.form(value, here)]
        return digest("module", *parts)

    def _class(self, cls: type) -> str:
        standing, place = self._standing(cls)
        if standing in (Standing.LIBRARY, Standing.OURS):
            return digest("library class", type_name(cls), self._distribution(standing, cls.__module__, None))
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        parts = [type_name(cls), self._distribution(standing, cls.__module__, file)]
        parts += [self.form(base, place.of(f"a base of {cls.__qualname__}")) for base in (*cls.__bases__, type(cls))]
        for name, member in members_of(cls).items():
            parts += [name, self.form(member, place.of(f"{cls.__qualname__}.{name}"))]
        return digest("class", *parts)
