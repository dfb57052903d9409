# SPDX-License-Identifier: Apache-2.0
"""Flat outputs, and the gradients for them, in the structure of what the user's function returns."""

from __future__ import annotations

from typing import Any

from magi_opschema._model.layout import Flat
from magi_opschema._model.tree import Leaf, Node, Record, Sequence


class FieldDict(dict[str, Any]):
    """A dict by field whose entries also read as attributes: `grads.y` is `grads["y"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def structure(node: Node | None, flat: Flat) -> Any:
    """Flat outputs, or their gradients, in the structure of the user's return: for a record, a dict by field."""
    if node is None:
        return None
    if isinstance(node, Leaf):
        return flat[0]
    items = iter(flat)

    def build(part: Node) -> Any:
        match part:
            case Record():
                return FieldDict({field.name: build(field.node) for field in part.fields})
            case Sequence():
                return tuple(build(item) for item in part.items)
            case Leaf():
                return next(items)
        raise AssertionError(part)

    if isinstance(node, Record) and node.kind == "namedtuple":
        return tuple(build(field.node) for field in node.fields)
    return build(node)


def positional(node: Node | None, structured: Any) -> Flat:
    """The gradients as arguments of `backward_fn`: the items of a tuple, otherwise *structured* as a single one."""
    if node is None:
        return ()
    is_tuple = isinstance(node, Sequence) or (isinstance(node, Record) and node.kind == "namedtuple")
    return tuple(structured) if is_tuple else (structured,)


def gradient_names(node: Node | None) -> tuple[str, ...]:
    """The names of the arguments of `backward_fn` after `ctx`: one for each item of a tuple return, otherwise one."""
    match node:
        case None:
            return ()
        case Sequence():
            return tuple(f"grad_{i}" for i in range(len(node.items)))
        case Record(kind="namedtuple"):
            return tuple(f"grad_{part.name}" for part in node.fields)
    return ("grad",)
