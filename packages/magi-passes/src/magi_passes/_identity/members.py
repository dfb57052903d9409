# SPDX-License-Identifier: Apache-2.0
"""What classes and functions consist of, without what Python keeps for itself."""

from __future__ import annotations

import types


C_FUNCTIONS = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
"""Functions written in C, bound or not."""
REMEMBERED = "_magi_passes_identity"
"""The attribute of a class that holds what magi-passes knows of its identity."""
# Written by Python, some of it long after the class was made. It says nothing about what methods do, or says it in
# memory addresses.
_CLASS_MACHINERY = frozenset(
    {
        *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__slots__", "__slotnames__"),
        *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__type_params__"),
        *("__dataclass_params__", "__orig_bases__", "__parameters__", "__abstractmethods__", "_abc_impl"),
        *("__firstlineno__", "__static_attributes__", "_value2member_map_", REMEMBERED),
    }
)


def members_of(cls: type) -> dict[str, object]:
    """What the author of *cls*, or a class decorator, put into it, by name."""
    return {
        name: member
        for name, member in sorted(vars(cls).items(), key=lambda pair: pair[0])
        if name not in _CLASS_MACHINERY
        and not isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType)
    }


def contents_of(cell: types.CellType) -> tuple[object, ...]:
    """The content of the cell of a closure, as a tuple of one; an empty tuple while the cell has none."""
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return ()
