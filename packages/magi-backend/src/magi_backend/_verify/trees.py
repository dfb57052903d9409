# SPDX-License-Identifier: Apache-2.0
"""Values taken apart, compared place by place and built again: containers, pytree nodes, and every dataclass.

Pytrees are not enough: for them, an unregistered dataclass is one opaque leaf, and the tensors in it would be neither
copied nor compared.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Node:
    """A value that holds others.

    Attributes:
        kind: A value that is equal for two values of one class with parts of the same names and the same constants.
        parts: The values inside, each with the text of the step to it: ``.weight``, ``[0]``, ``['mask']``.
        build: The inverse, from other parts to a value of the same kind.
    """

    kind: object
    parts: tuple[tuple[str, Any], ...]
    build: Callable[[list[Any]], Any]


def node_of(value: Any) -> Node | None:
    """*value* taken apart by one level; None for a leaf."""
    if isinstance(value, torch.Tensor):
        return None
    parts, spec = _one_level(value)
    if not spec.is_leaf():
        return Node(spec, parts, lambda built: pytree.tree_unflatten(built, spec))
    if dataclasses.is_dataclass(value) and not isinstance(value, type | torch.nn.Module):
        names = tuple(field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
        fields = tuple((f".{name}", getattr(value, name)) for name in names)
        return Node((type(value), names), fields, lambda built: _with_fields(value, names, built))
    return None


def _one_level(value: Any) -> tuple[tuple[tuple[str, Any], ...], pytree.TreeSpec]:
    def is_part(part: Any) -> bool:
        return part is not value

    try:
        keyed, spec = pytree.tree_flatten_with_path(value, is_leaf=is_part)
    except ValueError:  # a node whose class was registered without names for its children
        children, spec = pytree.tree_flatten(value, is_leaf=is_part)
        return tuple((f"[{index}]", child) for index, child in enumerate(children)), spec
    return tuple((pytree.keystr(path), child) for path, child in keyed), spec


def _with_fields(value: Any, names: tuple[str, ...], built: list[Any]) -> Any:
    twin = copy.copy(value)  # no __init__ or __post_init__ runs, and attributes that are not fields are kept
    for name, part in zip(names, built, strict=True):
        object.__setattr__(twin, name, part)
    return twin


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of *value*, each with its path, which begins with *path*."""
    node = node_of(value)
    if node is None:
        yield path, value
        return
    for step, part in node.parts:
        yield from leaves_of(part, path + step)


def with_leaves(value: Any, replacement: Callable[[Any], Any]) -> Any:
    """*value* built again with another value for each of its leaves, in the order of `leaves_of`."""
    node = node_of(value)
    if node is None:
        return replacement(value)
    return node.build([with_leaves(part, replacement) for _, part in node.parts])
