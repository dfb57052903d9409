# SPDX-License-Identifier: Apache-2.0
"""Stable digests of values: plain ones, kernels with their settings, containers and instances."""

from __future__ import annotations

import contextvars
import enum
import hashlib
import logging
import os
import struct
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import triton
from triton.runtime.autotuner import Autotuner, Config, Heuristics
from triton.runtime.jit import JITFunction

from ._library import is_library_object
from ._torch_compat import interpreted_classes, kernel_in_wrapper


_TORCH_ATOMS = (torch.dtype, torch.device, torch.layout, torch.memory_format, triton.language.dtype)
# Synchronisation and bookkeeping: it decides when code runs, not what it does.
_WITHOUT_CONTENT = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.local,
    threading.Condition,
    type(os.environ),
)
_LARGEST_TENSOR = 4096


class Walk(Protocol):
    """What a form asks for the values inside a value."""

    def form(self, value: Any, path: str) -> str:
        """The digest of *value*, which is reached by *path*."""

    def unstable(self, value: Any, path: str, why: str) -> str:
        """Note that *value* has no stable form."""


def digest(kind: str, *parts: str) -> str:
    """One digest of several, none of which can run into the next."""
    hasher = hashlib.sha256(kind.encode())
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(struct.pack("<q", len(data)))
        hasher.update(data)
    return hasher.hexdigest()


def plain_form(walk: Walk, value: Any, path: str) -> str | None:
    """Enum members, numbers, torch's constants, tensors, and what has a name but no content."""
    if isinstance(value, enum.Enum):
        return digest("enum", type_name(type(value)), value.name, walk.form(value.value, f"{path}.value"))
    if type(value) is float:
        return digest("float", value.hex())
    if isinstance(value, _TORCH_ATOMS):
        return digest("torch", type_name(type(value)), str(value))
    if isinstance(value, torch.Tensor):
        return tensor_form(walk, value, path)
    if isinstance(value, logging.Logger):
        return digest("logger", value.name)
    if isinstance(value, contextvars.ContextVar):
        return digest("context variable", value.name, walk.form(value.get(None), f"{path}.get()"))
    if isinstance(value, _WITHOUT_CONTENT):
        return digest("without content", type_name(type(value)))
    return None


def tensor_form(walk: Walk, value: torch.Tensor, path: str) -> str:
    """A small tensor on the CPU by its content; any other has no stable form."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.device.type != "cpu":
        return walk.unstable(value, path, "is a tensor that cannot be read here")
    if value.layout != torch.strided or value.numel() > _LARGEST_TENSOR:
        return walk.unstable(value, path, f"is a tensor of {value.numel()} elements")
    data = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return digest("tensor", str(value.dtype), str(tuple(value.shape)), bytes(data.tolist()).hex())


def kernel_form(walk: Walk, value: Any, path: str) -> str | None:
    """A kernel by its source and settings, and what its function refers to; an autotuner by its configs too."""
    wrapped = kernel_in_wrapper(value)
    if wrapped is not None:
        return walk.form(wrapped, path)
    if isinstance(value, JITFunction):
        settings = (value.do_not_specialize, value.do_not_specialize_on_alignment, value.noinline, value.debug)
        parts = (value.src, walk.form(settings, path), walk.form(value.fn, path), walk.form(value.version, path))
        return digest("kernel", *parts)
    if isinstance(value, interpreted_classes()):
        return digest("interpreted kernel", walk.form(value.fn, path))
    if isinstance(value, Config):
        return digest("config", walk.form(value.all_kwargs(), path), walk.form(value.pre_hook, path))
    if isinstance(value, Heuristics):
        return digest("heuristics", walk.form(dict(value.values), path), walk.form(value.fn, path))
    if isinstance(value, Autotuner):
        tuned = (value.configs, value.keys, value.reset_to_zero, value.restore_value)
        pruned = (value.perf_model, value.configs_top_k, value.early_config_prune)
        return digest("autotuner", *(walk.form(part, path) for part in (tuned, pruned, value.fn)))
    if isinstance(value, triton.language.constexpr):
        return digest("constexpr", walk.form(value.value, path))
    return None


def container_form(walk: Walk, value: Any, path: str) -> str | None:
    """Tuples, lists, sets and dicts by their items."""
    if type(value) in (tuple, list):
        items = (walk.form(item, f"{path}[{at}]") for at, item in enumerate(value))
        return digest(type(value).__name__, *items)
    if type(value) in (set, frozenset):
        return digest(type(value).__name__, *sorted(walk.form(item, path) for item in value))
    if type(value) in (dict, types.MappingProxyType):
        return digest("dict", *items_form(walk, value, path))
    return None


def items_form(walk: Walk, value: Mapping[Any, Any], path: str) -> Iterator[str]:
    """Keys and items of a mapping, in its order."""
    for key, item in value.items():
        yield walk.form(key, f"a key of {path}")
        yield walk.form(item, f"{path}[{key!r}]" if isinstance(key, str | int) else f"an item of {path}")


def instance_form(walk: Walk, value: Any, path: str) -> str:
    """An object by its class and its attributes, items included for subclasses of containers."""
    cls = type(value)
    if is_library_object(value):
        return library_instance_form(walk, value, path)
    parts = [walk.form(cls, path)]
    for name, item in sorted(state_of(value).items()):
        parts += [name, walk.form(item, f"{path}.{name}")]
    if isinstance(value, dict):
        parts += items_form(walk, value, path)
    elif isinstance(value, tuple | list):
        parts += (walk.form(item, f"{path}[{at}]") for at, item in enumerate(value))
    elif isinstance(value, str | int | float | bytes):
        parts.append(repr(value))
    elif not hasattr(value, "__dict__") and not any("__slots__" in vars(base) for base in cls.__mro__):
        return walk.unstable(value, path, f"is a {type_name(cls)}, which keeps its content to itself")
    return digest("instance", *parts)


def library_instance_form(walk: Walk, value: Any, path: str) -> str:
    """An object of a library as pickle would take it apart."""
    if isinstance(value, torch.nn.Module):
        return digest("module", type_name(type(value)), walk.form(vars(value), path))
    try:
        reduced = value.__reduce_ex__(4)
    except Exception as error:  # noqa: BLE001 - whatever a library's type raises, it has no stable form
        return walk.unstable(value, path, f"is a {type_name(type(value))}, which cannot be pickled ({error})")
    if isinstance(reduced, str):
        return digest("named", type_name(type(value)), reduced)
    parts = (list(part) if isinstance(part, Iterator) else part for part in reduced)
    return digest("reduced", type_name(type(value)), *(walk.form(part, path) for part in parts))


def state_of(value: Any) -> dict[str, Any]:
    """Attributes of an instance, in `__dict__` and in slots."""
    state = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType) and hasattr(value, name):
                state.setdefault(name, getattr(value, name))
    return state


def type_name(cls: type) -> str:
    """Module and qualified name."""
    return f"{cls.__module__}.{cls.__qualname__}"
