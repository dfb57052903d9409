# SPDX-License-Identifier: Apache-2.0
"""Which attributes can be read without running code of the user's."""

from __future__ import annotations

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

from magi_tritonwrap._identity.library import is_library_module
from magi_tritonwrap._identity.members import MISSING, attribute, stored


# Reading these runs no code of the user's.
_HARMLESS_DESCRIPTORS = (
    *(FunctionType, staticmethod, classmethod, BuiltinFunctionType, MethodDescriptorType, ClassMethodDescriptorType),
    *(MemberDescriptorType, GetSetDescriptorType, WrapperDescriptorType, MethodWrapperType, type),
)


def what_computes(obj: Any, name: str, static: Any) -> str:
    """The code of the user's that reading an attribute calls, such as a descriptor; empty if there is none."""
    hooks = ("__getattribute__", "__getattr__") if static is MISSING else ("__getattribute__",)
    for hook in hooks:
        owner = next((cls for cls in type(obj).__mro__ if hook in vars(cls)), object)
        if not is_library_module(owner.__module__):
            return f"its {hook}"
    if isinstance(obj, super):
        parent: Any = obj
        owners = parent.__self_class__.__mro__
        bases = owners[owners.index(parent.__thisclass__) + 1 :]
        static = next((vars(base)[name] for base in bases if name in vars(base)), MISSING)
    if isinstance(obj, ModuleType):
        is_lazy = static is MISSING and attribute(obj, "__getattr__") is not MISSING
        return "its __getattr__" if is_lazy and not is_library_module(stored(obj).get("__name__")) else ""
    if static is MISSING or isinstance(static, _HARMLESS_DESCRIPTORS):
        return ""
    if not isinstance(obj, type) and name in stored(obj):
        return ""
    is_users = hasattr(type(static), "__get__") and not is_library_module(type(static).__module__)
    return f"a {type(static).__qualname__}" if is_users or isinstance(obj, super) else ""
