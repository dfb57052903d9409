# SPDX-License-Identifier: Apache-2.0
"""A digest of what a pass does: the code of its class and helpers, and the values of its fields.

Inductor puts a pass's uuid into its cache keys and skips the pass when an entry is found. Whatever changes the
graph that a pass produces has to change the uuid, or a cache serves code that another pass produced.

A class is described member by member rather than by `inspect.getsource(cls)`, which finds the wrong class when two
share a name, sees no closure, and knows nothing of base classes. The description is kept per class.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import inspect
import sys
import textwrap
import threading
import types
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from .errors import PassIdentityError


if TYPE_CHECKING:
    from collections.abc import Iterator


_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)

# Written by Python and by @dataclass. What they say is in the fields, the bases or the members already.
_NOT_BEHAVIOUR = frozenset(
    {
        *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__slots__", "__hash__"),
        *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__type_params__"),
        *("__dataclass_fields__", "__dataclass_params__", "__match_args__", "__orig_bases__", "__parameters__"),
        *("__abstractmethods__", "_abc_impl", "__firstlineno__", "__static_attributes__"),
    }
)
_FOREIGN_MODULES = ("torch",)

_class_descriptions: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_under_way: ContextVar[frozenset[object]] = ContextVar("magi_passes_describing", default=frozenset())


def digest(*parts: str) -> str:
    """A sha256 of *parts*, in which ``("ab", "c")`` and ``("a", "bc")`` differ."""
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode()
        hasher.update(f"{len(data)}:".encode() + data)
    return hasher.hexdigest()


def describe_class(cls: type) -> str:
    """A digest of the code of *cls* and of every base class that is not torch's or Python's own.

    Raises:
        PassIdentityError: A member, closure or default holds a value without a stable form.
    """
    with _lock:
        known = _class_descriptions.get(cls)
    if known is None:
        with _describing(cls) as is_first:
            if not is_first:
                return "recursion"
            known = digest(*(_describe_own_members(base) for base in cls.__mro__ if _is_ours(base)))
        with _lock:
            _class_descriptions[cls] = known
    return known


@contextlib.contextmanager
def _describing(code: object) -> Iterator[bool]:
    """Mark a class or function as being described; gives False inside its own description, which ends a recursion.

    A method of a local class may name that class, and two local functions may call each other: both by closure.
    """
    under_way = _under_way.get()
    if code in under_way:
        yield False
        return
    token = _under_way.set(under_way | {code})
    try:
        yield True
    finally:
        _under_way.reset(token)


def describe_fields(instance: Any) -> str:
    """The fields of a dataclass instance with their values, in order.

    Raises:
        PassIdentityError: A field holds a mutable value, or one without a stable form.
    """
    described = []
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        described.append(f"{field.name}={describe(value, f'{type(instance).__name__}.{field.name}')}")
    return digest(*described)


def describe(value: object, where: str) -> str:
    """*value* as text that is equal exactly for equal values, in every process.

    Args:
        value: A plain value, an enum member, a tuple or frozenset, a torch dtype or device, a frozen dataclass,
            a class or a function.
        where: The name that an error shows, such as ``MyPass.threshold``.

    Raises:
        PassIdentityError: *value* is mutable or has no stable form.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}={value.value!r}"
    if isinstance(value, (*_PLAIN, *_TORCH_VALUES)):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, tuple):
        return f"{type(value).__qualname__}({', '.join(describe(item, where) for item in value)})"
    if isinstance(value, frozenset):
        return f"frozenset({', '.join(sorted(describe(item, where) for item in value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and is_frozen(type(value)):
        return f"{type(value).__qualname__}({describe_class(type(value))}, {describe_fields(value)})"
    return _describe_code_object(value, where)


def _describe_code_object(value: object, where: str) -> str:
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__} {describe_class(value) if _is_ours(value) else ''}"
    if isinstance(value, functools.partial):
        bound = tuple(sorted(value.keywords.items()))
        return f"partial({describe(value.func, where)}, {describe(value.args, where)}, {describe(bound, where)})"
    if isinstance(value, types.MethodType):
        return f"method({describe(value.__self__, where)}, {describe(value.__func__, where)})"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):  # noqa: SLF001
        return f"op {value}"
    if inspect.isroutine(value) or hasattr(value, "__wrapped__"):
        return _describe_function(value, where)
    raise PassIdentityError(_no_stable_form(value, where))


def is_frozen(cls: type) -> bool:
    """Whether *cls* is a frozen dataclass."""
    parameters = getattr(cls, "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def _no_stable_form(value: object, where: str) -> str:
    if isinstance(value, (list, dict, set)):
        fix = "Use a tuple or a frozenset: a value that can change later cannot be part of a cache key."
    else:
        fix = "Use plain values, tuples, enums, functions or frozen dataclasses; look the object up when the pass runs."
    return f"{where} is a {type(value).__qualname__}, which cannot be part of a pass's uuid. {fix}"


def _is_ours(cls: type) -> bool:
    package = cls.__module__.partition(".")[0]
    return package not in _FOREIGN_MODULES and package not in sys.stdlib_module_names


def _describe_own_members(cls: type) -> str:
    members = []
    for name, member in sorted(vars(cls).items()):
        if name in _NOT_BEHAVIOUR or _is_written_by_dataclass(member):
            continue
        members.append(f"{name}={_describe_member(member, f'{cls.__name__}.{name}')}")
    return digest(cls.__qualname__, *members)


def _is_written_by_dataclass(member: object) -> bool:
    code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", None)
    # dataclasses compiles its methods from text: exec() without a file name says "<string>".
    return code is not None and code.co_filename in ("<string>", dataclasses.__file__)


def _describe_member(member: object, where: str) -> str:
    if isinstance(member, property):
        return ", ".join(_describe_function(part, where) for part in (member.fget, member.fset, member.fdel) if part)
    if isinstance(member, (staticmethod, classmethod)):
        return f"{type(member).__name__} {_describe_function(member.__func__, where)}"
    if isinstance(member, functools.cached_property):
        return _describe_function(member.func, where)
    if isinstance(member, types.MemberDescriptorType):
        return "slot"
    return describe(member, where)


def _describe_function(function: Any, where: str) -> str:
    """Source, defaults and closure of *function*; its bytecode where there is no source (REPL, frozen, zip)."""
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType):
        return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(type(function)))}"
    try:
        body = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        body = _describe_code(function.__code__)
    with _describing(function) as is_first:
        if not is_first:
            return "recursion"
        defaults = describe((*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())), where)
        return digest(body, defaults, *_describe_closure(function, where))


def _describe_closure(function: types.FunctionType, where: str) -> Iterator[str]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if name != "__class__":
            yield f"{name}={describe(value, f'{where} (closure variable {name!r})')}"


def _describe_code(code: types.CodeType) -> str:
    constants = [_describe_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return digest(code.co_code.hex(), *code.co_names, *code.co_varnames, *constants)
