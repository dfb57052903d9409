# SPDX-License-Identifier: Apache-2.0
"""Records as nodes of torch's pytrees, so that export, make_fx and torch.func see the Tensors in them.

The Tensors of a record, its records, and the containers that hold these are children; every other field is context.
This is decided by value, because in a generic record a field may be either. Torch unflattens with ints, None and types
instead of Tensors, and flattens the result again. So no `__init__` or `__post_init__` runs, and such a record remembers
which of its fields were children. A record with slots cannot remember that, so its annotations decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from magi_opschema import _torch_compat as compat
from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.tree import ListOrTuple, Node, Record, leaves, nodes
from magi_opschema.errors import RecordTreeError

from .record_context import RecordContext, dumped, find_class, loaded, name_of


_STAND_IN = "_magi_children"
"""Attribute of a record that was unflattened with anything else than Tensors: the names of its children."""
_registered: dict[str, list[type]] = {}
"""The classes that this module registered, by the names under which they are saved."""


def register_records(lowering: SignatureLowering) -> None:
    """Register the records of a signature, and those inside them, as pytree nodes, if they are not yet."""
    for record in _records(lowering):
        if record.kind == "dataclass":
            _register(record)
        elif record.kind == "namedtuple" and not compat.has_saved_name(record.cls):
            compat.register_saved_namedtuple(record.cls, name_of(record.cls))


def _records(lowering: SignatureLowering) -> Iterator[Record]:
    trees = [parameter.node for parameter in lowering.parameters]
    for tree in [*trees, *([] if lowering.returns is None else [lowering.returns])]:
        yield from (node for node in nodes(tree) if isinstance(node, Record))


def _register(record: Record) -> None:
    cls: Any = record.cls
    with compat.pytree_lock:
        if compat.is_pytree_node(cls):
            return
        name = name_of(cls)
        names = tuple(field.name for field in dataclasses.fields(cls))
        optional = frozenset(field.name for field in dataclasses.fields(cls) if not field.init)
        annotated = frozenset(part.name for part in record.fields if _holds_only_tensors(part.node))
        node = _Node(cls, names, optional, annotated if cls.__dictoffset__ == 0 else frozenset())
        earlier = compat.class_saved_as(name)
        compat.register_pytree_node(
            cls,
            node.flatten,
            node.unflatten,
            serialized_type_name=name,
            to_dumpable_context=node.dump,
            from_dumpable_context=loaded,
            flatten_with_keys_fn=node.flatten_with_keys,
        )
        _registered.setdefault(name, []).append(cls)
        if earlier is not None and find_class(name) is earlier:
            compat.save_as(name, earlier)  # the name also finds that class in a process that loads a program


def _holds_only_tensors(node: Node) -> bool:
    return all(leaf.is_tensor for leaf in leaves(node.inner if isinstance(node, ListOrTuple) else node))


@dataclass(frozen=True)
class _Node:
    """The functions of one class of records that torch calls."""

    cls: type
    names: tuple[str, ...]
    optional: frozenset[str]
    """The fields with init=False, which may have no value."""
    always: frozenset[str]
    """For a class with slots, the fields that hold only Tensors, or stand for them."""

    def flatten(self, record: Any) -> tuple[list[Any], RecordContext]:
        names, children, constants = [], [], []
        remembered = getattr(record, _STAND_IN, ())
        for name in self.names:
            if name in self.optional and not hasattr(record, name):
                continue
            value = getattr(record, name)
            if _is_child(value) or name in remembered or (name in self.always and value is not None):
                names.append(name)
                children.append(value)
            else:
                constants.append((name, value))
        return children, RecordContext.of(tuple(names), tuple(constants))

    def flatten_with_keys(self, record: Any) -> tuple[list[tuple[Any, Any]], RecordContext]:
        children, context = self.flatten(record)
        return [(compat.GetAttrKey(name), child) for name, child in zip(context.children, children)], context  # noqa: B905

    def unflatten(self, children: Iterable[Any], context: RecordContext) -> Any:
        record: Any = object.__new__(self.cls)
        for name, value in zip(context.children, children):  # noqa: B905  (Dynamo traces it)
            object.__setattr__(record, name, value)
        for name, value in context.constants:
            object.__setattr__(record, name, value)
        values = [getattr(record, name) for name in context.children]
        if not all([_is_child(value) for value in values]) and self.cls.__dictoffset__ != 0:  # noqa: C419
            object.__setattr__(record, _STAND_IN, context.children)
        return record

    def dump(self, context: RecordContext) -> dict[str, Any]:
        """*context* for a saved program.

        Raises:
            RecordTreeError: another class would be loaded for this one, or a field cannot be saved.
        """
        name = name_of(self.cls)
        others = [cls for cls in _registered[name] if cls is not self.cls]
        if others and find_class(name) is not self.cls:
            text = f"there are {len(others) + 1} classes named {name}, and a saved program finds a class by its name."
            raise RecordTreeError(f"{text} Rename one, or define it once, at the top of its module.")
        return dumped(context, self.cls)


def _is_child(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (tuple, list)):
        return any([_is_child(item) for item in value])  # noqa: C419  (Dynamo traces lists)
    if isinstance(value, dict):
        return any([_is_child(item) for item in value.values()])  # noqa: C419
    return dataclasses.is_dataclass(value) and compat.is_pytree_node(type(value))
