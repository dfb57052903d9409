# SPDX-License-Identifier: Apache-2.0
"""Which attributes can be read without running code of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

from magi_tritonwrap._library import is_library_module


MISSING = object()
"""What `inspect.getattr_static` is asked to return for an attribute that is not there."""

# Reading these runs no code of the user's.
_HARMLESS_DESCRIPTORS = (
    *(FunctionType, staticmethod, classmethod, BuiltinFunctionType, MethodDescriptorType, ClassMethodDescriptorType),
    *(MemberDescriptorType, GetSetDescriptorType, WrapperDescriptorType, MethodWrapperType, type),
)


def _own_attributes(obj: Any) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return {}
    return found


def runs_code_when_read(obj: Any, name: str, static: Any) -> bool:
    """Whether reading an attribute calls a descriptor of the user's."""
    if static is MISSING or isinstance(obj, ModuleType) or isinstance(static, _HARMLESS_DESCRIPTORS):
        return False
    if not isinstance(obj, type) and name in _own_attributes(obj):
        return False
    return hasattr(type(static), "__get__") and not is_library_module(type(static).__module__)
