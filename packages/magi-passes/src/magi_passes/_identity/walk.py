# SPDX-License-Identifier: Apache-2.0
"""A digest of everything that decides what code does: the code, what it calls, and the values that those read.

Functions are followed by their code objects, so functions without source count too: the globals that they name,
attributes of modules, closures, defaults, decorators, imports in a body. The walk stops at libraries, whose releases
are in torch's keys. Two processes that load the same code with the same values get the same digest.

Objects are numbered in the order in which the walk meets them, and each is described by its own code and the numbers of
what it refers to. So reference cycles end, and the depth of the caller's stack makes no difference.

The walk reads more than is strictly needed, on purpose: every attribute of a module that the code mentions, and every
member of a class. An edit that changes nothing may cause a cache miss; an edit that changes something never causes a
hit. An installed distribution that is not the author's own counts by its release, the content of each file that the
walk reaches, and the code and plain values that its functions read.

A *form* is text that is equal exactly for equal values, in every process.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import gc
import importlib.util
import logging
import os
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch

from .code import CodeNames, Import, code_digest, code_names, digest
from .library import (
    Standing,
    content_of,
    content_of_module,
    content_of_package,
    standing_of,
    standing_of_module,
    version_of,
)
from .members import C_FUNCTIONS, MISSING, REMEMBERED, Footprint, attribute, contents_of, is_a, members_of, stored


ATOMS = (type(None), bool, int, str, bytes, complex, type(Ellipsis), type(NotImplemented), range, slice)
"""Types whose text is the form of a value."""
TORCH_ATOMS: tuple[type, ...] = (torch.dtype, torch.device, torch.layout, torch.memory_format)
# These decide when code runs, or hold what belongs to other objects of this process, so their content differs between
# processes.
RUNTIME = (
    *(type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Semaphore),
    *(threading.local, weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
    *(logging.Logger, type(os.environ)),
)
CONTENT: tuple[Any, ...] = (dict, list, tuple, deque, set, frozenset, str, int, float, bytes)
"""Types of Python whose subclasses have a content besides attributes."""
_PARAMETERS = "__dataclass_params__"
_LARGEST_TENSOR = 4096
_CONTAINERS: dict[type, str] = {list: "list", deque: "list", set: "set", dict: "dict", types.MappingProxyType: "dict"}


@dataclasses.dataclass(frozen=True)
class Place:
    """How a value is reached, in words, and whose code reads it.

    What the author's own code reads must have a stable form. What this project reads without a stable form, such as a
    lock or a log, is state, and its form is its type. Of what an installed distribution reads, only code and plain
    values count, because its objects lead to everything that the process holds.
    """

    text: str
    read_by: Standing = Standing.OPEN

    @property
    def is_lenient(self) -> bool:
        """Whether the type of a value without a stable form is its form."""
        return self.read_by is not Standing.OPEN

    def of(self, text: str) -> Place:
        """Another place that the same code reads."""
        return Place(text, self.read_by)

    def inner(self, text: str) -> Place:
        """A part of this place."""
        return Place(self.text + text, self.read_by)


def content_of_variable(variable: ContextVar[Any]) -> tuple[Any, ...]:
    """The value of *variable* here, as a tuple of one; an empty tuple if it has none."""
    try:
        return (variable.get(),)
    except LookupError:
        return ()


def has_dict(value: Any) -> bool:
    """Whether *value* keeps attributes in a ``__dict__``."""
    return any("__dict__" in vars(one) for one in type(value).__mro__)


def state_of(value: Any) -> dict[str, Any]:
    """The values that distinguish *value* from other instances of its class, by name.

    They are the fields of a frozen dataclass, and the attributes of any other. The result of a
    `functools.cached_property` is left out, because it follows from the rest.
    """
    cls = type(value)
    if is_frozen(cls):
        fields = {one.name: attribute(value, one.name) for one in dataclasses.fields(cls)}
        # A descriptor keeps the value of a field elsewhere in the object.
        if not any("__set__" in vars(base) for held in fields.values() for base in type(held).__mro__):
            return {name: held for name, held in fields.items() if held is not MISSING}
    state = dict(stored(value))
    for base in cls.__mro__:
        for name, member in vars(base).items():
            if is_a(member, functools.cached_property):
                state.pop(name, None)
            if is_a(member, types.MemberDescriptorType) and attribute(value, name) is not MISSING:
                state.setdefault(name, attribute(value, name))
    return state


def is_frozen(cls: type) -> bool:
    """Whether *cls* is a frozen dataclass."""
    parameters = next((vars(base)[_PARAMETERS] for base in cls.__mro__ if _PARAMETERS in vars(base)), None)
    return parameters is not None and bool(parameters.frozen)


def type_name(cls: type) -> str:
    """The module and the qualified name of *cls*, with a dot between them."""
    return f"{cls.__module__}.{cls.__qualname__}"


class Walk:
    """A walk that numbers each value it meets, and describes it once.

    A subclass says what is special about its roots: values with a form of their own, what to do about one without a
    stable form and a module that is not loaded, and whether our own packages are code like any other.

    Args:
        own: top-level packages whose code is the author's own, installed or not.
        outer: ids of the values that this walk describes a part of.
        earlier: a walk with a result; what it has met is not walked again.
    """

    atoms = TORCH_ATOMS
    """Types of values whose text is their form."""
    follows_ours = True
    """Whether functions of this project are followed; otherwise all of its files count."""
    reads_whole_modules = True
    """Whether a module that is passed on as a value has a form: that of all of its attributes."""

    def __init__(self, own: frozenset[str], outer: tuple[int, ...] = (), earlier: Walk | None = None) -> None:
        self.footprint = Footprint()
        self.digest = ""
        self._own = own
        self._outer = outer
        self.forms: dict[tuple[int, Standing | None], str] = {} if earlier is None else {**earlier.forms}
        self._met: list[tuple[Any, Place]] = []  # also keeps what has a form alive, so that no id comes twice
        self._earlier = earlier  # for the same reason

    def unstable(self, value: Any, place: Place, why: str) -> str:
        """The form of a *value* without a stable form at *place*, if that does no harm there."""
        raise NotImplementedError

    def loaded(self, name: str) -> Any:
        """The module *name*, which code that the walk follows imports when it runs; `MISSING` if there is none."""
        return self.footprint.read(sys.modules, name)

    def unloaded(self, place: Place, names: list[str]) -> str:
        """The form of an import of modules that could not be had."""
        raise NotImplementedError

    def special_form(self, value: Any, place: Place) -> str | None:  # noqa: ARG002 - for those that override it
        """The form of a value that only this kind of walk knows; None for any other."""
        return None

    def mentioned(self, names: CodeNames, place: Place) -> Iterator[str]:  # noqa: ARG002 - as above
        """The forms of what code with *names* reaches in ways that only this kind of walk knows."""
        return iter(())

    def title(self, function: types.FunctionType) -> str:
        """The name of *function* in places."""
        return function.__qualname__

    def result(self, roots: Iterable[tuple[Any, Place]]) -> str:
        """The digest of *roots*. What has a number counts in later walks by this digest and the number."""
        forms = [self.form(root, place) for root, place in roots]
        forms += (self._description(value, place) for value, place in self._met)  # which grows meanwhile
        self.digest = digest("roots", *forms)
        self.forms = {key: f"{form} of {self.digest}" for key, form in self.forms.items()}
        return self.digest

    def met(self) -> Iterator[Any]:
        """The values that the walk has described, in the order in which it met them."""
        return (value for value, _ in self._met)

    def form(self, value: Any, place: Place) -> str:
        """The form of *value* where it is plain; otherwise the number under which the walk describes it."""
        plain = self._plain(value, place) or self._wrapper(value, place)
        if plain is not None:
            return plain
        is_code = is_a(value, (types.FunctionType, type))
        key = (id(value), None if is_code else place.read_by)
        if key not in self.forms:
            self.forms[key] = f"#{len(self._met)}"
            self._met.append((value, place))
        return self.forms[key]

    def _plain(self, value: Any, place: Place) -> str | None:
        """The form of a value that cannot change and whose identity does not matter; None for any other value."""
        if type(value) in ATOMS:
            return digest(type(value).__name__, repr(value))
        if type(value) is float:
            return digest("float", value.hex())
        if is_a(value, enum.Enum):
            held = stored(value)  # a class may compute `name` and `value`
            return digest("enum", self.form(type(value), place), str(held["_name_"]), self.form(held["_value_"], place))
        if is_a(value, self.atoms):
            return digest("torch", type(value).__name__, str(value))
        if type(value) is tuple:
            return digest("tuple", *self._items(value, place))
        if type(value) is frozenset:
            return digest("frozenset", *self.unordered(value, place))
        return None

    def unordered(self, values: Iterable[Any], place: Place) -> list[str]:
        """The forms of the items of a set, ordered by the digest of each item on its own."""
        inner = place.inner(" (an item)")
        alone = sorted(((self._alone(value, inner), value) for value in values), key=lambda pair: pair[0])
        return [self.form(value, inner) for _, value in alone]

    def _alone(self, value: Any, place: Place) -> str:
        if id(value) in self._outer:
            return ""
        return type(self)(self._own, (*self._outer, id(value))).result([(value, place)])

    def _wrapper(self, value: Any, place: Place) -> str | None:
        """The form of *value* where Python makes it at each access, as a bound method, or puts it around a function.

        It is None for any other value.
        """
        if is_a(value, types.MethodType):
            return digest(
                "method", self.form(value.__func__, place), self.form(value.__self__, place.inner(".__self__"))
            )
        if is_a(value, (staticmethod, classmethod)):
            return digest(type(value).__name__, self.form(value.__func__, place))
        if is_a(value, (functools.partial, functools.partialmethod)):
            parts = (value.func, tuple(value.args), dict(value.keywords))
            return digest(type(value).__name__, *(self.form(part, place) for part in parts))
        if is_a(value, C_FUNCTIONS):
            owner = getattr(value, "__self__", None)
            is_bound = owner is not None and not is_a(owner, types.ModuleType)
            bound = self.form(owner, place.inner(".__self__")) if is_bound else ""
            module = getattr(value, "__module__", None)
            is_library = module is None or standing_of_module(module) is Standing.LIBRARY
            extension = "" if is_library else content_of(stored(sys.modules.get(str(module))).get("__file__"))
            return digest("builtin", str(module), value.__qualname__, bound, extension)
        return None

    def _description(self, value: Any, place: Place) -> str:
        if is_a(value, types.FunctionType):
            return self._function(value)
        if is_a(value, types.CodeType):
            return code_digest(value)
        if is_a(value, types.ModuleType):
            return self._module(value, None, place, ())
        return (
            self.special_form(value, place)
            or (self._class(value) if is_a(value, type) else None)
            or self._descriptor(value, place)
            or self._container(value, place)
            or self._instance(value, place)
        )

    def _container(self, value: Any, place: Place) -> str | None:
        """The form of a container, of what exists only while a program runs, and of what installed code reads.

        It is None for any other value.
        """
        if place.read_by is Standing.INSTALLED:
            # A table of settings cannot be told from a table of what the library has seen so far. An edit of the former
            # changes a file, which counts. The methods of an object are code like any other.
            return digest("foreign", self.form(type(value), place))
        if is_a(value, RUNTIME):
            name = attribute(value, "name")
            return digest("runtime", type_name(type(value)), name if type(name) is str else "")
        if is_a(value, ContextVar):
            if place.is_lenient:  # the form leaves its value out, which changes during each compilation
                return digest("context variable", value.name)
            self.footprint.note(lambda: content_of_variable(value))
            return digest("context variable", value.name, self.form(content_of_variable(value), place.inner(".get()")))
        if is_a(value, deque) and place.is_lenient:
            return digest("runtime", "deque")  # a log: what this project and libraries keep in one grows while they run
        kind = _CONTAINERS.get(type(value))
        # A read-only view may show a mapping of the author's, which would run his methods.
        shown = gc.get_referents(value) if type(value) is types.MappingProxyType else ()
        if kind is None or any(type(mapping) is not dict for mapping in shown):
            return None
        return digest(kind, *self._content(type(value), value, place))

    def _content(self, base: Any, value: Any, place: Place) -> Iterable[str]:
        """The forms of what *value* holds as a *base*, one of Python's containers or types of plain values."""
        if base in (dict, types.MappingProxyType):
            self.footprint.note(lambda: (*base.keys(value), *base.values(value)))
            return self._entries(base.items(value), place)
        if base not in (list, tuple, deque, set, frozenset):
            return [base.__repr__(value)]
        self.footprint.note(lambda: base.__iter__(value))
        items = base.__iter__(value)
        return self.unordered(items, place) if base in (set, frozenset) else self._items(items, place)

    def _items(self, items: Iterable[Any], place: Place) -> Iterator[str]:
        return (self.form(item, place.inner(f"[{at}]")) for at, item in enumerate(items))

    def _entries(self, items: Iterable[tuple[Any, Any]], place: Place) -> Iterator[str]:
        for key, item in tuple(items):
            yield self.form(key, place.inner(" (a key)"))
            yield self.form(item, place.inner(f"[{key!r}]" if type(key) in (str, int) else " (an item)"))

    def _instance(self, value: Any, place: Place) -> str:
        """The form of an object, from its class and attributes; for subclasses of containers, from its items too."""
        if standing_of(type(value)) is Standing.LIBRARY:
            return self._library_instance(value, place)
        parts = [self.form(type(value), place)]
        self.footprint.note(lambda: state_of(value).values())
        for name, item in sorted(state_of(value).items()):
            parts += [name, self.form(item, place.inner(f".{name}"))]
        base = next((one for one in CONTENT if is_a(value, one)), None)
        if base is not None:
            parts += self._content(base, value, place)
        elif not has_dict(value) and not any("__slots__" in vars(one) for one in type(value).__mro__):
            # a type of an extension
            return self.unstable(value, place, f"is a {type_name(type(value))}, which keeps its content to itself")
        return digest("instance", *parts)

    def _library_instance(self, value: Any, place: Place) -> str:
        """The form of an object of a library, from what pickle would take it apart into."""
        if is_a(value, torch.Tensor):
            return self._tensor(value, place)
        if is_a(value, dataclasses.Field):
            fields = (value.name, value.default, value.default_factory, dict(value.metadata), value.init)
            return digest("field", *(self.form(part, place) for part in fields))
        if is_a(value, torch.nn.Module):
            return digest("module", type_name(type(value)), self.form(vars(value), place))
        if is_a(value, (dict, list, set, deque)):
            self.footprint.note(lambda: (*value, *(value.values() if is_a(value, dict) else ())))
        if has_dict(value):
            self.footprint.note(lambda: stored(value).values())
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception as error:  # noqa: BLE001 - whatever a library's type raises, it has no stable form
            return self.unstable(value, place, f"is a {type_name(type(value))}, which cannot be pickled ({error})")
        if isinstance(reduced, str):
            return digest("named", type_name(type(value)), reduced)
        parts = (list(part) if isinstance(part, Iterator) else part for part in reduced)
        return digest("reduced", type_name(type(value)), *(self.form(part, place) for part in parts))

    def _tensor(self, value: torch.Tensor, place: Place) -> str:
        """The form of a small tensor on the CPU, from its content; any other tensor has no stable form."""
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.device.type != "cpu":
            return self.unstable(value, place, "is a tensor that cannot be read here")
        if value.layout != torch.strided or value.numel() > _LARGEST_TENSOR:
            return self.unstable(value, place, f"is a tensor of {value.numel()} elements")
        data = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return digest("tensor", str(value.dtype), str(tuple(value.shape)), bytes(data.tolist()).hex())

    def _descriptor(self, value: Any, place: Place) -> str | None:
        if is_a(value, property):
            return digest("property", *(self.form(part, place) for part in (value.fget, value.fset, value.fdel)))
        if is_a(value, functools.cached_property):
            return digest("cached_property", self.form(value.func, place))
        if is_a(value, functools._lru_cache_wrapper):  # noqa: SLF001 - the class has no public name
            return digest("cache", self.form(value.__wrapped__, place))
        if is_a(value, functools.singledispatchmethod):
            return digest("singledispatchmethod", self.form(value.dispatcher, place), self.form(value.func, place))
        return None

    def _standing(self, value: Any) -> tuple[Standing, Place]:
        standing = standing_of(value, self._own)
        return standing, Place("", standing)

    def _is_followed(self, standing: Standing) -> bool:
        return standing is not Standing.LIBRARY and (self.follows_ours or standing is not Standing.OURS)

    def _distribution(self, standing: Standing, module: str, file: str | None) -> str:
        """What stands for code that is not followed, or not all of it: its release, and the content of *file*.

        For our own packages, the content of all files.
        """
        root = module.partition(".")[0]
        if standing is Standing.OURS and not self.follows_ours:
            return _content_of_ours(root)
        if standing is Standing.INSTALLED:
            return digest("installed", version_of(root), content_of(file))
        return ""

    def _function(self, function: types.FunctionType) -> str:
        standing, place = self._standing(function)
        here = self.title(function)
        self.footprint.note(  # what of it can be replaced
            lambda: (function.__code__, function.__defaults__, function.__kwdefaults__, *vars(function).values())
        )
        table = vars(function).get("registry")
        if standing is Standing.LIBRARY and table is not None:  # functools.singledispatch
            return digest("singledispatch", self.form(table, place.of(f"the registry of {here}")))
        module = str(function.__globals__.get("__name__", ""))
        is_followed = self._is_followed(standing)
        if not is_followed and not function.__closure__:
            name = f"{function.__module__}.{function.__qualname__}"
            return digest("library function", name, self._distribution(standing, name, None))
        defaults = place.of(f"a default of {here}")
        parts = [code_digest(function.__code__)]
        parts += [self.form(function.__defaults__, defaults), self.form(function.__kwdefaults__, defaults)]
        names = code_names(function.__code__)
        if is_followed:
            parts += self._read_by(function, here, names, place)
            parts += [self.form(vars(function), place.of(f"the attributes of {here}"))] if vars(function) else []
        parts += [self._distribution(standing, module, function.__code__.co_filename)]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.footprint.note(functools.partial(contents_of, cell))
            where = place.of(f"closure variable {name!r} of {here}")
            parts += [name, *(self._variable(name, value, where, names) for value in contents_of(cell))]
        return digest("function", *parts)

    def _read_by(self, function: types.FunctionType, here: str, names: CodeNames, place: Place) -> Iterator[str]:
        for name in names.globals:
            value = self.footprint.read(function.__globals__, name)
            yield name
            if value is not MISSING:
                yield self._variable(name, value, place.of(f"global {name!r} read by {here}"), names)
        for one in names.imports:
            yield self._imported(one, function.__globals__, names, place.of(here))
        yield from self.mentioned(names, place)

    def _variable(self, name: str, value: Any, place: Place, names: CodeNames) -> str:
        if type(value) in (list, set, dict, deque) and names.is_only_written(name):
            return digest("log", type(value).__name__)
        if not is_a(value, types.ModuleType):
            return self.form(value, place)
        # Which attributes of a module are read cannot be told here when the module is passed on as a value.
        return self._module(value, None if name in names.whole else names, place, ())

    def _imported(self, one: Import, namespace: Mapping[str, Any], names: CodeNames, place: Place) -> str:
        package = namespace.get("__package__") or ""
        if one.level and not package:
            return "relative import without a package"
        relative = "." * one.level + one.module
        name = importlib.util.resolve_name(relative, package) if one.level else one.module
        standing = standing_of_module(name, self._own)
        if place.read_by is Standing.INSTALLED or not self._is_followed(standing):
            # Whether the module is loaded already depends on what ran before.
            return digest("import", name, self._distribution(standing, name, None), content_of_module(name))
        where = place.of(f"module {name!r} imported by {place.text}")
        found = self.loaded(name)
        if found is MISSING or found is None:
            return self.unloaded(where, [name])
        missing = [each for each in one.names if each != "*" and attribute(found, each) is MISSING]
        is_lazy = attribute(found, "__getattr__") is not MISSING
        inner = {f"{name}.{each}": MISSING for each in missing}
        for each in inner:
            inner[each] = self.footprint.read(sys.modules, each) if is_lazy else self.loaded(each)
        gone = [each for each, module in inner.items() if module is MISSING and not is_lazy]
        modules = [found, *(module for module in inner.values() if module is not MISSING)]
        forms = (self._variable(one.variable, module, where, names) for module in modules)
        return digest("import", name, *([self.unloaded(where, gone)] if gone else ()), *forms)

    def _module(self, module: types.ModuleType, names: CodeNames | None, place: Place, above: tuple[int, ...]) -> str:
        """The form of a module: of the attributes that code with *names* can read, or of all for None."""
        standing, inside = self._standing(module)
        space = stored(module)
        title = str(space.get("__name__", ""))
        if not self._is_followed(standing):
            version = str(space.get("__version__", ""))
            return digest("library module", title, version, self._distribution(standing, title, None))
        parts = [title]
        if names is None:
            parts.append(self._distribution(standing, title, space.get("__file__")))
        if id(module) in above or (names is None and standing is Standing.INSTALLED):
            return digest("module", *parts)
        if names is None:
            if not self.reads_whole_modules:
                return self.unstable(module, place, "is a module that is passed around as a value")
            self.footprint.note(space.keys)
        wanted = (name for name in space if not name.startswith("__")) if names is None else names.mentioned
        is_whole = True
        for name in sorted(wanted):
            value: Any = self.footprint.read(space, name)
            if value is MISSING:
                is_whole = is_whole and names is not None and name not in names.attributes
                continue
            here = inside.of(f"{title}.{name} ({place.text})")
            above_here = (*above, id(module))
            is_module = is_a(value, types.ModuleType)
            parts += [name, self._module(value, names, here, above_here) if is_module else self.form(value, here)]
        lazily = MISSING if is_whole or standing is Standing.INSTALLED else attribute(module, "__getattr__")
        if lazily is not MISSING:
            # It makes an attribute when it is asked, from its own code and, often, from a file beside this one.
            parts += [self.form(lazily, inside), content_of_package(title.partition(".")[0])]
        return digest("module", *parts)

    def _class(self, cls: type) -> str:
        standing, place = self._standing(cls)
        if not self._is_followed(standing):
            return digest("library class", type_name(cls), self._distribution(standing, cls.__module__, None))
        file = stored(sys.modules.get(cls.__module__)).get("__file__")
        parts = [cls.__qualname__, self._distribution(standing, cls.__module__, file)]
        parts += [self.form(base, place.of(f"a base of {cls.__qualname__}")) for base in (*cls.__bases__, type(cls))]
        self.footprint.note(lambda: [member for name, member in vars(cls).items() if name != REMEMBERED])
        for name, member in members_of(cls).items():
            parts += [name, self.form(member, place.of(f"{cls.__qualname__}.{name}"))]
        return digest("class", *parts)


_content_of_ours = functools.cache(content_of_package)
