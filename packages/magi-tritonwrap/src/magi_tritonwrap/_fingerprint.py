# SPDX-License-Identifier: Apache-2.0
"""A digest of everything that decides what a function does: its code, what it calls, and the values those read.

Functions are walked by their code objects, so that functions without source count too. The walk stops at libraries,
whose versions are in torch's key already. Two processes that load the same code with the same values get the same
digest; a value without a stable form, for example a socket, is listed in `unstable`, and then the digest is no key.

Over-approximated on purpose: of a user's module every attribute that the code mentions is read, of a class every
attribute. An edit that changes nothing may cost a cache miss; an edit that changes something never hits.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from ._code import CodeNames, Import, code_form, code_names
from ._library import is_library_function, is_library_module, is_library_object
from ._ops_table import bodies_mentioned, body_of_op
from ._torch_compat import overload_of, schemas_of
from ._value_forms import container_form, digest, instance_form, kernel_form, plain_form, type_name


_ATOMS = (type(None), bool, int, str, bytes, complex, type(Ellipsis), type(NotImplemented), range, slice)
_C_FUNCTIONS = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
# Attributes of a class that say nothing about what its methods do, or say it in memory addresses.
_CLASS_MACHINERY = (
    *("__module__", "__qualname__", "__dict__", "__weakref__", "__doc__", "__slots__", "__abstractmethods__"),
    *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__type_params__"),
    *("_abc_impl", "__parameters__", "__orig_bases__", "__firstlineno__", "__static_attributes__"),
    *("__dataclass_fields__", "__dataclass_params__"),
)


@dataclass(frozen=True)
class Fingerprint:
    """A digest, and the paths of values that have no stable form."""

    digest: str
    unstable: tuple[str, ...]


def fingerprint(values: Iterable[Any], name: str) -> Fingerprint:
    """The fingerprint of functions, kernels or plain values.

    Args:
        values: where the walk starts.
        name: what paths of unstable values start with.
    """
    walk = _Walk()
    found = digest("roots", *(walk.form(value, name) for value in values))
    return Fingerprint(found, tuple(dict.fromkeys(walk.unstable_values)))


class _Walk:
    """Digests values depth first; a value that is being digested already counts by its distance up the path."""

    def __init__(self) -> None:
        self.unstable_values: list[str] = []
        self._done: dict[int, str] = {}
        self._keep_alive: list[Any] = []
        self._path: list[int] = []

    def form(self, value: Any, path: str) -> str:
        """The digest of *value*, which is reached by *path*."""
        if isinstance(value, _ATOMS) and type(value) in _ATOMS:
            return digest(type(value).__name__, repr(value))
        key = id(value)
        if key in self._done:
            return self._done[key]
        if key in self._path:
            return digest("cycle", str(len(self._path) - self._path.index(key)))
        self._path.append(key)
        try:
            found = self._compound(value, path)
        except RecursionError:
            found = self.unstable(value, path, "is nested too deeply")
        finally:
            self._path.pop()
        self._done[key] = found
        self._keep_alive.append(value)  # ids stay unique only as long as the objects live
        return found

    def _compound(self, value: Any, path: str) -> str:
        return (
            plain_form(self, value, path)
            or self._function(value, path)
            or kernel_form(self, value, path)
            or self._callable(value, path)
            or container_form(self, value, path)
            or instance_form(self, value, path)
        )

    def _function(self, value: Any, path: str) -> str | None:
        if isinstance(value, types.CodeType):
            return self._code(value, path)
        if isinstance(value, types.ModuleType):
            return self._module(value, path, None)
        if isinstance(value, _C_FUNCTIONS):
            owner = getattr(value, "__self__", None)
            bound = "" if owner is None or isinstance(owner, types.ModuleType) else self.form(owner, f"{path}.__self__")
            return digest("builtin", str(getattr(value, "__module__", None)), str(value.__qualname__), bound)
        if isinstance(value, types.FunctionType):
            wrapped = getattr(value, "__wrapped__", None) if is_library_function(value) else None
            if is_library_function(value) and wrapped is None and not value.__closure__:
                return digest("library function", value.__module__ or "", value.__qualname__)
            return self._python_function(value)
        return None

    def _python_function(self, function: types.FunctionType) -> str:
        here = f"{function.__module__}.{function.__qualname__}"
        parts = [self._code(function.__code__, here)]
        parts.append(self.form(function.__defaults__, f"defaults of {here}"))
        parts.append(self.form(function.__kwdefaults__, f"defaults of {here}"))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if not isinstance(_cell_contents(cell), types.ModuleType):
                parts += [name, self._cell(cell, f"closure variable '{name}' of {here}")]
        if not is_library_function(function):
            parts += self._read_by(function, here)
        return digest("function", *parts)

    def _cell(self, cell: types.CellType, path: str) -> str:
        try:
            return self.form(cell.cell_contents, path)
        except ValueError:
            return digest("empty cell")

    def _read_by(self, function: types.FunctionType, here: str) -> Iterator[str]:
        names = code_names(function.__code__)
        for name in names.globals:
            if name in function.__globals__:
                value = function.__globals__[name]
                path = f"global '{name}' read by {here}"
                yield name
                yield self._variable(name, value, path, names)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            value = _cell_contents(cell)
            if isinstance(value, types.ModuleType):
                yield self._variable(name, value, f"closure variable '{name}' of {here}", names)
        for one in names.imports:
            yield self._imported(one, function, here, names)
        for op, body in bodies_mentioned(names.mentioned):
            yield op
            yield self.form(body, f"body of {op}")

    def _variable(self, name: str, value: Any, path: str, names: CodeNames) -> str:
        if not isinstance(value, types.ModuleType):
            return self.form(value, path)
        # What a module that is handed on is asked for cannot be told from the names mentioned here.
        return self._module(value, path, None if name in names.whole else names)

    def _imported(self, one: Import, function: types.FunctionType, here: str, names: CodeNames) -> str:
        package = function.__globals__.get("__package__") or ""
        relative = "." * one.level + one.module
        name = importlib.util.resolve_name(relative, package) if one.level and package else one.module
        if is_library_module(name):
            return digest("library module", name)
        path = f"module '{name}' imported by {here}"
        module = sys.modules.get(name)
        if module is None:
            return self.unstable(name, path, "is not loaded yet")
        return self._variable(one.variable, module, path, names)

    def _module(self, module: types.ModuleType, path: str, names: CodeNames | None) -> str:
        if is_library_module(module.__name__):
            return digest("library module", module.__name__, str(getattr(module, "__version__", "")))
        if names is None:
            return self.unstable(module, path, "is a module that is passed around as a value")
        key = id(module)
        if key in self._path:
            return digest("module", module.__name__)
        self._path.append(key)
        parts = [module.__name__]
        for name in sorted(names.mentioned & vars(module).keys()):
            value = vars(module)[name]
            here = f"{module.__name__}.{name}"
            parts.append(name)
            parts.append(
                self._module(value, here, names) if isinstance(value, types.ModuleType) else self.form(value, here)
            )
        self._path.pop()
        return digest("module", *parts)

    def _code(self, code: types.CodeType, path: str) -> str:
        return digest("code", *(self._code_part(part, path) for part in code_form(code)))

    def _code_part(self, part: object, path: str) -> str:
        if isinstance(part, types.CodeType):
            return self._code(part, path)
        if isinstance(part, tuple):
            return digest("tuple", *(self._code_part(item, path) for item in part))
        return self.form(part, f"constant of {path}")

    def _callable(self, value: Any, path: str) -> str | None:
        if isinstance(value, OpOverload | OpOverloadPacket | CustomOpDef):
            return self._op(value)
        if isinstance(value, functools.partial):
            return digest("partial", *(self.form(part, path) for part in (value.func, value.args, value.keywords)))
        if isinstance(value, types.MethodType):
            return digest("method", self.form(value.__func__, path), self.form(value.__self__, f"{path}.__self__"))
        if isinstance(value, staticmethod | classmethod):
            return digest(type(value).__name__, self.form(value.__func__, path))
        if isinstance(value, property):
            return digest("property", *(self.form(part, path) for part in (value.fget, value.fset, value.fdel)))
        if isinstance(value, functools.cached_property):
            return digest("cached_property", self.form(value.func, path))
        if isinstance(value, functools._lru_cache_wrapper):  # noqa: SLF001 - the class has no public name
            return digest("lru_cache", self.form(value.__wrapped__, path))
        if isinstance(value, type):
            return self._class(value, path)
        return None

    def _op(self, value: Any) -> str:
        body = body_of_op(value)
        op = overload_of(value) if isinstance(value, CustomOpDef) else value
        return digest("op", str(op), *schemas_of(op), "" if body is None else self.form(body, f"body of {op}"))

    def _class(self, cls: type, path: str) -> str:
        if is_library_object(cls):
            return digest("library class", type_name(cls))
        parts = [type_name(cls), *(self.form(base, path) for base in cls.__bases__)]
        for name, value in sorted(vars(cls).items()):
            if name in _CLASS_MACHINERY or isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
                continue
            parts += [name, self.form(value, f"{cls.__qualname__}.{name}")]
        return digest("class", *parts)

    def unstable(self, value: Any, path: str, why: str) -> str:
        self.unstable_values.append(f"{path} {why}")
        return digest("unstable", type_name(type(value)))


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
