# SPDX-License-Identifier: Apache-2.0
"""Torch's registry of pytree nodes, and the names under which trees are saved."""

from __future__ import annotations

from torch.utils import _pytree


pytree_lock = _pytree._NODE_REGISTRY_LOCK
"""Torch's own lock around its table of pytree nodes."""

register_pytree_node = _pytree.register_pytree_node
"""Register in the Python registry, and in that of optree if it is installed. It is not documented in torch.utils."""

GetAttrKey = _pytree.GetAttrKey
"""The class of keys of children that are attributes."""


def is_pytree_node(cls: type) -> bool:
    """True if *cls* is registered in torch's Python registry of pytrees."""
    return cls in _pytree.SUPPORTED_NODES


def has_saved_name(cls: type) -> bool:
    """True if a tree that holds *cls* can be saved."""
    return cls in _pytree.SUPPORTED_SERIALIZED_TYPES


def register_saved_namedtuple(cls: type, name: str) -> None:
    """Register the name under which *cls*, a named tuple and so already a pytree node, is saved."""
    _pytree._register_namedtuple(cls, serialized_type_name=name)


def class_saved_as(name: str) -> type | None:
    """The class that *name* refers to in a saved tree."""
    return _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)


def save_as(name: str, cls: type) -> None:
    """Make *name* refer to *cls* in a saved tree; a registration silently gives the name to the latest class."""
    _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name] = cls
