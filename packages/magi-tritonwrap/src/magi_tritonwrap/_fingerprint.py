# SPDX-License-Identifier: Apache-2.0
"""A digest of everything that decides what a function does: its code, what it calls, and the values those read.

Functions are walked by their code objects, so that functions without source count too. The walk stops at libraries,
whose versions are in torch's key already. Two processes that load the same code with the same values get the same
digest; a value without a stable form, for example a socket, is listed in `unstable`, and then the digest is no key.

Over-approximated on purpose: of a user's module every attribute that the code mentions is read, of a class every
attribute. An edit that changes nothing may cost a cache miss; an edit that changes something never hits.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import hashlib
import importlib.util
import logging
import os
import struct
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from triton.runtime.autotuner import Autotuner, Config, Heuristics
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from ._code import CodeNames, code_form, code_names
from ._library import is_library_function, is_library_module, is_library_object
from ._ops_table import bodies_mentioned, body_of_op
from ._torch_compat import kernel_in_wrapper, overload_of


_ATOMS = (type(None), bool, int, str, bytes, complex, type(Ellipsis), type(NotImplemented), range, slice)
_TORCH_ATOMS = (torch.dtype, torch.device, torch.layout, torch.memory_format, triton.language.dtype)
# Synchronisation and bookkeeping: it decides when code runs, not what it does.
_WITHOUT_CONTENT = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.local,
    threading.Condition,
    type(os.environ),
)
_C_FUNCTIONS = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
_LARGEST_TENSOR = 4096
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
    digest = _digest("roots", *(walk.form(value, name) for value in values))
    return Fingerprint(digest, tuple(dict.fromkeys(walk.unstable)))


def _digest(kind: str, *parts: str) -> str:
    hasher = hashlib.sha256(kind.encode())
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(struct.pack("<q", len(data)))
        hasher.update(data)
    return hasher.hexdigest()


class _Walk:
    """Digests values depth first; a value that is being digested already counts by its distance up the path."""

    def __init__(self) -> None:
        self.unstable: list[str] = []
        self._done: dict[int, str] = {}
        self._keep_alive: list[Any] = []
        self._path: list[int] = []

    def form(self, value: Any, path: str) -> str:
        """The digest of *value*, which is reached by *path*."""
        if isinstance(value, _ATOMS) and type(value) in _ATOMS:
            return _digest(type(value).__name__, repr(value))
        key = id(value)
        if key in self._done:
            return self._done[key]
        if key in self._path:
            return _digest("cycle", str(len(self._path) - self._path.index(key)))
        self._path.append(key)
        try:
            found = self._compound(value, path)
        except RecursionError:
            found = self._unstable(value, path, "is nested too deeply")
        finally:
            self._path.pop()
        self._done[key] = found
        self._keep_alive.append(value)  # ids stay unique only as long as the objects live
        return found

    def _compound(self, value: Any, path: str) -> str:
        for digest in (self._plain, self._function, self._kernel, self._callable, self._container):
            found = digest(value, path)
            if found is not None:
                return found
        return self._instance(value, path)

    def _plain(self, value: Any, path: str) -> str | None:
        if isinstance(value, enum.Enum):
            return _digest("enum", _type_name(type(value)), value.name, self.form(value.value, f"{path}.value"))
        if type(value) is float:
            return _digest("float", value.hex())
        if isinstance(value, _TORCH_ATOMS):
            return _digest("torch", _type_name(type(value)), str(value))
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, logging.Logger):
            return _digest("logger", value.name)
        if isinstance(value, contextvars.ContextVar):
            return _digest("context variable", value.name, self.form(value.get(None), f"{path}.get()"))
        if isinstance(value, _WITHOUT_CONTENT):
            return _digest("without content", _type_name(type(value)))
        return None

    def _tensor(self, value: torch.Tensor, path: str) -> str:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.device.type != "cpu":
            return self._unstable(value, path, "is a tensor that cannot be read here")
        if value.layout != torch.strided or value.numel() > _LARGEST_TENSOR:
            return self._unstable(value, path, f"is a tensor of {value.numel()} elements")
        data = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return _digest("tensor", str(value.dtype), str(tuple(value.shape)), bytes(data.tolist()).hex())

    def _function(self, value: Any, path: str) -> str | None:
        if isinstance(value, types.CodeType):
            return self._code(value, path)
        if isinstance(value, types.ModuleType):
            return self._module(value, path, None)
        if isinstance(value, _C_FUNCTIONS):
            owner = getattr(value, "__self__", None)
            bound = "" if owner is None or isinstance(owner, types.ModuleType) else self.form(owner, f"{path}.__self__")
            return _digest("builtin", str(getattr(value, "__module__", None)), str(value.__qualname__), bound)
        if isinstance(value, types.FunctionType):
            wrapped = getattr(value, "__wrapped__", None) if is_library_function(value) else None
            if is_library_function(value) and wrapped is None and not value.__closure__:
                return _digest("library function", value.__module__ or "", value.__qualname__)
            return self._python_function(value)
        return None

    def _python_function(self, function: types.FunctionType) -> str:
        here = f"{function.__module__}.{function.__qualname__}"
        parts = [self._code(function.__code__, here)]
        parts.append(self.form(function.__defaults__, f"defaults of {here}"))
        parts.append(self.form(function.__kwdefaults__, f"defaults of {here}"))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            parts += [name, self._cell(cell, f"closure variable '{name}' of {here}")]
        if not is_library_function(function):
            parts += self._read_by(function, here)
        return _digest("function", *parts)

    def _cell(self, cell: types.CellType, path: str) -> str:
        try:
            return self.form(cell.cell_contents, path)
        except ValueError:
            return _digest("empty cell")

    def _read_by(self, function: types.FunctionType, here: str) -> Iterator[str]:
        names = code_names(function.__code__)
        for name in names.globals:
            if name in function.__globals__:
                value = function.__globals__[name]
                path = f"global '{name}' read by {here}"
                yield name
                yield (
                    self._module(value, path, names) if isinstance(value, types.ModuleType) else self.form(value, path)
                )
        for cell in function.__closure__ or ():
            value = _cell_contents(cell)
            if isinstance(value, types.ModuleType):
                yield self._module(value, f"module in the closure of {here}", names)
        for name in self._imported_by(function, names):
            yield self._imported_module(name, here, names)
        for op, body in bodies_mentioned(names.mentioned):
            yield op
            yield self.form(body, f"body of {op}")

    def _imported_by(self, function: types.FunctionType, names: CodeNames) -> Iterator[str]:
        package = function.__globals__.get("__package__") or ""
        for one in names.imports:
            name = "." * one.level + one.module
            yield importlib.util.resolve_name(name, package) if one.level and package else one.module

    def _imported_module(self, name: str, here: str, names: CodeNames) -> str:
        if is_library_module(name):
            return _digest("library module", name)
        module = sys.modules.get(name)
        if module is None:
            return self._unstable(name, f"module '{name}' imported by {here}", "is not loaded yet")
        return self._module(module, f"module '{name}' imported by {here}", names)

    def _module(self, module: types.ModuleType, path: str, names: CodeNames | None) -> str:
        if is_library_module(module.__name__):
            return _digest("library module", module.__name__, str(getattr(module, "__version__", "")))
        if names is None:
            return self._unstable(module, path, "is a module that is passed around as a value")
        key = id(module)
        if key in self._path:
            return _digest("module", module.__name__)
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
        return _digest("module", *parts)

    def _code(self, code: types.CodeType, path: str) -> str:
        return _digest("code", *(self._code_part(part, path) for part in code_form(code)))

    def _code_part(self, part: object, path: str) -> str:
        if isinstance(part, types.CodeType):
            return self._code(part, path)
        if isinstance(part, tuple):
            return _digest("tuple", *(self._code_part(item, path) for item in part))
        return self.form(part, f"constant of {path}")

    def _kernel(self, value: Any, path: str) -> str | None:
        wrapped = kernel_in_wrapper(value)
        if wrapped is not None:
            return self.form(wrapped, path)
        if isinstance(value, JITFunction):
            settings = (value.do_not_specialize, value.do_not_specialize_on_alignment, value.noinline, value.debug)
            parts = (value.src, self.form(settings, path), self.form(value.fn, path), self.form(value.version, path))
            return _digest("kernel", *parts)
        if isinstance(value, InterpretedFunction):
            return _digest("interpreted kernel", self.form(value.fn, path))
        if isinstance(value, Config):
            return _digest("config", self.form(value.all_kwargs(), path), self.form(value.pre_hook, path))
        if isinstance(value, Heuristics):
            return _digest("heuristics", self.form(dict(value.values), path), self.form(value.fn, path))
        if isinstance(value, Autotuner):
            tuned = (value.configs, value.keys, value.reset_to_zero, value.restore_value)
            pruned = (value.perf_model, value.configs_top_k, value.early_config_prune)
            return _digest("autotuner", *(self.form(part, path) for part in (tuned, pruned, value.fn)))
        if isinstance(value, triton.language.constexpr):
            return _digest("constexpr", self.form(value.value, path))
        return None

    def _callable(self, value: Any, path: str) -> str | None:
        if isinstance(value, OpOverload | OpOverloadPacket | CustomOpDef):
            return self._op(value)
        if isinstance(value, functools.partial):
            return _digest("partial", *(self.form(part, path) for part in (value.func, value.args, value.keywords)))
        if isinstance(value, types.MethodType):
            return _digest("method", self.form(value.__func__, path), self.form(value.__self__, f"{path}.__self__"))
        if isinstance(value, staticmethod | classmethod):
            return _digest(type(value).__name__, self.form(value.__func__, path))
        if isinstance(value, property):
            return _digest("property", *(self.form(part, path) for part in (value.fget, value.fset, value.fdel)))
        if isinstance(value, functools.cached_property):
            return _digest("cached_property", self.form(value.func, path))
        if isinstance(value, functools._lru_cache_wrapper):  # noqa: SLF001 - the class has no public name
            return _digest("lru_cache", self.form(value.__wrapped__, path))
        if isinstance(value, type):
            return self._class(value, path)
        return None

    def _op(self, value: Any) -> str:
        body = body_of_op(value)
        name = str(overload_of(value) if isinstance(value, CustomOpDef) else value)
        return _digest("op", name, "" if body is None else self.form(body, f"body of {name}"))

    def _class(self, cls: type, path: str) -> str:
        if is_library_object(cls):
            return _digest("library class", _type_name(cls))
        parts = [_type_name(cls), *(self.form(base, path) for base in cls.__bases__)]
        for name, value in sorted(vars(cls).items()):
            if name in _CLASS_MACHINERY or isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
                continue
            parts += [name, self.form(value, f"{cls.__qualname__}.{name}")]
        return _digest("class", *parts)

    def _container(self, value: Any, path: str) -> str | None:
        if type(value) in (tuple, list):
            items = (self.form(item, f"{path}[{at}]") for at, item in enumerate(value))
            return _digest(type(value).__name__, *items)
        if type(value) in (set, frozenset):
            return _digest(type(value).__name__, *sorted(self.form(item, path) for item in value))
        if type(value) in (dict, types.MappingProxyType):
            return _digest("dict", *self._items(value, path))
        return None

    def _items(self, value: Mapping[Any, Any], path: str) -> Iterator[str]:
        for key, item in value.items():
            yield self.form(key, f"a key of {path}")
            yield self.form(item, f"{path}[{key!r}]" if isinstance(key, str | int) else f"an item of {path}")

    def _instance(self, value: Any, path: str) -> str:
        cls = type(value)
        if is_library_object(value):
            return self._library_instance(value, path)
        parts = [self.form(cls, path)]
        for name, item in sorted(_state(value).items()):
            parts += [name, self.form(item, f"{path}.{name}")]
        if isinstance(value, dict):
            parts += self._items(value, path)
        elif isinstance(value, tuple | list):
            parts += (self.form(item, f"{path}[{at}]") for at, item in enumerate(value))
        elif isinstance(value, str | int | float | bytes):
            parts.append(repr(value))
        elif not hasattr(value, "__dict__") and not any("__slots__" in vars(base) for base in cls.__mro__):
            return self._unstable(value, path, f"is a {_type_name(cls)}, which keeps its content to itself")
        return _digest("instance", *parts)

    def _library_instance(self, value: Any, path: str) -> str:
        if isinstance(value, torch.nn.Module):
            return _digest("module", _type_name(type(value)), self.form(vars(value), path))
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:  # noqa: BLE001 - whatever a library's type raises, it has no stable form
            return self._unstable(value, path, f"is a {_type_name(type(value))}, which cannot be pickled ({error})")
        if isinstance(reduced, str):
            return _digest("named", _type_name(type(value)), reduced)
        parts = (list(part) if isinstance(part, Iterator) else part for part in reduced)
        return _digest("reduced", _type_name(type(value)), *(self.form(part, path) for part in parts))

    def _unstable(self, value: Any, path: str, why: str) -> str:
        self.unstable.append(f"{path} {why}")
        return _digest("unstable", _type_name(type(value)))


def _state(value: Any) -> dict[str, Any]:
    """Attributes of an instance, in `__dict__` and in slots."""
    state = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType) and hasattr(value, name):
                state.setdefault(name, getattr(value, name))
    return state


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _type_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
