# SPDX-License-Identifier: Apache-2.0
"""Torch's registry of pytree nodes, and the names under which trees are saved."""

from __future__ import annotations

from torch.utils import _pytree


pytree_lock = _pytree._NODE_REGISTRY_LOCK
"""Torch's own lock around its table of pytree nodes."""

register_pytree_node = _pytree.register_pytree_node
"""In the Python registry, and in that of optree if it is installed. Not in torch.utils' documented names."""

GetAttrKey = _pytree.GetAttrKey
"""The key of a child that is an attribute."""


def is_pytree_node(cls: type) -> bool:
    """True if *cls* is registered in torch's Python registry of pytrees."""
    return cls in _pytree.SUPPORTED_NODES


def has_saved_name(cls: type) -> bool:
    """True if a tree that holds *cls* can be saved."""
    return cls in _pytree.SUPPORTED_SERIALIZED_TYPES


def register_saved_namedtuple(cls: type, name: str) -> None:
    """Give a named tuple, which is a pytree node as it is, the name that it is saved as."""
    _pytree._register_namedtuple(cls, serialized_type_name=name)


def class_saved_as(name: str) -> type | None:
    """The class that a saved tree means by *name*."""
    return _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)


def save_as(name: str, cls: type) -> None:
    """Let a saved tree mean *cls* by *name*; a registration gives the name to the latest class without a word."""
    _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name] = cls
