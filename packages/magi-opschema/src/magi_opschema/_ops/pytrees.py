# SPDX-License-Identifier: Apache-2.0
"""Records as nodes of torch's pytrees, so that export, make_fx and torch.func see the Tensors in them.

The Tensors of a record, its records, and the containers that hold these are children; every other field is context.
This is decided by value, because in a generic record a field may be either. Torch unflattens with ints, None and types
instead of Tensors, and flattens the result again. So no `__init__` or `__post_init__` runs, and such a record remembers
which of its fields were children. A record with slots cannot remember that, so its annotations decide.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from magi_opschema import _torch_compat as compat
from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.tree import ListOrTuple, Record, leaves, nodes
from magi_opschema._text import show_with_type
from magi_opschema.errors import RecordTreeError


Constants: TypeAlias = tuple[tuple[str, Any], ...]
Form: TypeAlias = tuple[type, Any]
_TEXTS = (float, complex)
_CONTAINERS = (tuple, list)
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
_classes: dict[str, type] = {}
"""Classes of which values were saved, by name, to find those that are local to a function."""


class RecordContext(NamedTuple):
    """The names of the fields that are children, and the forms of the other fields.

    Forms are equal if the values are equal and of the same types: `1` differs from `True` and `1.0`, and a nan equals
    itself. A context is a tuple of constants, so that Dynamo can make a constant of one that traced code made, as
    `torch.export` with `strict=True` requires if a record is returned.
    """

    children: tuple[str, ...]
    forms: tuple[tuple[str, Form], ...]

    @staticmethod
    def of(children: tuple[str, ...], constants: Constants) -> RecordContext:
        """The context of a record with these fields."""
        return RecordContext(children, tuple([(name, _form(value)) for name, value in constants]))

    @staticmethod
    def loaded(dump: dict[str, Any]) -> RecordContext:
        """The context that `_Node.dump` made data for JSON of."""
        constants = tuple([(name, _load(item)) for name, item in dump["constants"].items()])
        return RecordContext.of(tuple(dump["children"]), constants)

    def __repr__(self) -> str:
        shown = [*self.children, *(f"{name}={_value(form)!r}" for name, form in self.forms)]
        return f"({', '.join(shown)})"


class _Same:
    """Wraps a value, and is equal to another wrapper only if that holds the identical value."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _form(value: Any) -> Form:
    """The form of *value*: its class, and data that is equal for every value that may replace it in a graph."""
    kind = type(value)
    if kind in _TEXTS:
        return kind, repr(value)
    if kind in _CONTAINERS or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return kind, tuple([_form(item) for item in value])
    if kind is dict:
        return kind, tuple([(key, _form(item)) for key, item in value.items()])
    if isinstance(value, enum.Enum):  # its own `__eq__` may say that two members are equal
        return kind, _member_key(value)
    if value is None or isinstance(value, (int, str, torch.device, *_TORCH_CONSTANTS)):
        return kind, value
    return kind, _Same(value)


def _value(form: Form) -> Any:
    """The inverse of `_form`."""
    kind, content = form
    if kind in _TEXTS:
        return kind(content)
    if kind in _CONTAINERS:
        return kind([_value(item) for item in content])
    if kind is dict:
        return {key: _value(item) for key, item in content}
    if type(content) is _Same:
        return content.value
    if issubclass(kind, enum.Enum):
        return _member(kind, content)
    if type(content) is tuple:
        return kind(*[_value(item) for item in content])
    return content


def _dump(value: Any, path: str) -> Any:
    kind = type(value)
    if value is None or kind in {bool, int, str} or (kind is float and math.isfinite(value)):
        return value
    if kind in {float, complex}:
        return {kind.__name__: repr(value)}
    if isinstance(value, enum.Enum):
        return {"enum": name_of(kind), "value": _member_key(value)}
    if isinstance(value, _TORCH_CONSTANTS):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {"dict": {key: _dump(item, f"{path}[{key!r}]") for key, item in value.items()}}
    if isinstance(value, (tuple, list)):
        items = [_dump(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if kind in {tuple, list}:
            return {kind.__name__: items}
        return {"namedtuple": name_of(kind), "items": items}
    text = f"{path} is {show_with_type(value)}, which cannot be saved with an exported program."
    raise RecordTreeError(f"{text} Pass it to the op as a parameter of its own, which the program does not take.")


def _load(dump: Any) -> Any:
    match dump:
        case {"float": text}:
            return float(text)
        case {"complex": text}:
            return complex(text)
        case {"enum": name, "value": key}:
            return _member(_class_of(name), key)
        case {"torch": name}:
            return getattr(torch, name)
        case {"device": text}:
            return torch.device(text)
        case {"dict": items}:
            return {key: _load(item) for key, item in items.items()}
        case {"tuple": items}:
            return tuple([_load(item) for item in items])
        case {"list": items}:
            return [_load(item) for item in items]
        case {"namedtuple": name, "items": items}:
            return _class_of(name)(*[_load(item) for item in items])
    return dump


def _member_key(value: enum.Enum) -> Any:
    """What names a member of an Enum: the bits of a Flag, which may have no name, otherwise the name."""
    return value._value_ if isinstance(value, enum.Flag) else value._name_


def _member(cls: Any, key: Any) -> Any:
    """The inverse of `_member_key`."""
    return cls(key) if issubclass(cls, enum.Flag) else cls[key]


def name_of(cls: type) -> str:
    """The name under which a class is saved: `mylib.ops:NormCfg`."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    _classes[name] = cls
    return name


def find_class(name: str) -> Any:
    """The object that `module:qualified.name` refers to now; None if there is none."""
    module, _, qualname = name.partition(":")
    try:
        return operator.attrgetter(qualname)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


def _class_of(name: str) -> Any:
    found = find_class(name) or _classes.get(name)
    if found is None:
        raise RecordTreeError(f"the saved program has a value of {name}, which is not there. Import its module first.")
    return found


_STAND_IN = "_magi_children"
"""Attribute of a record that was unflattened with anything else than Tensors: the names of its children."""
_registered: dict[str, list[type]] = {}
"""The classes that this module registered, by the names under which they are saved."""


def register_records(lowering: SignatureLowering) -> None:
    """Register the records of a signature, and those inside them, as pytree nodes, if they are not yet."""
    trees = [parameter.node for parameter in lowering.parameters]
    for tree in [*trees, *([] if lowering.returns is None else [lowering.returns])]:
        for record in nodes(tree):
            if isinstance(record, Record) and record.kind == "dataclass":
                _register(record)
            elif isinstance(record, Record) and record.kind == "namedtuple" and record.cls not in compat.saved_nodes:
                compat.register_saved_namedtuple(record.cls, serialized_type_name=name_of(record.cls))


def _register(record: Record) -> None:
    cls: Any = record.cls
    with compat.pytree_lock:
        if cls in compat.pytree_nodes:
            return
        name = name_of(cls)
        names = tuple(field.name for field in dataclasses.fields(cls))
        optional = frozenset(field.name for field in dataclasses.fields(cls) if not field.init)
        below = {
            part.name: part.node.inner if isinstance(part.node, ListOrTuple) else part.node for part in record.fields
        }
        annotated = frozenset(name for name, node in below.items() if all(leaf.is_tensor for leaf in leaves(node)))
        node = _Node(cls, names, optional, frozenset(annotated if cls.__dictoffset__ == 0 else ()))
        earlier = compat.saved_classes.get(name)
        compat.register_pytree_node(
            cls,
            node.flatten,
            node.unflatten,
            serialized_type_name=name,
            to_dumpable_context=node.dump,
            from_dumpable_context=RecordContext.loaded,
            flatten_with_keys_fn=node.flatten_with_keys,
        )
        _registered.setdefault(name, []).append(cls)
        if earlier is not None and find_class(name) is earlier:
            compat.saved_classes[name] = earlier  # the name also finds that class in a process that loads a program


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
        for name, form in context.forms:
            object.__setattr__(record, name, _value(form))
        values = [getattr(record, name) for name in context.children]
        if not all([_is_child(value) for value in values]) and self.cls.__dictoffset__ != 0:  # noqa: C419
            object.__setattr__(record, _STAND_IN, context.children)
        return record

    def dump(self, context: RecordContext) -> dict[str, Any]:
        """*context* as data for JSON; raises a RecordTreeError if this class and its fields could not be loaded."""
        name = name_of(self.cls)
        others = [cls for cls in _registered[name] if cls is not self.cls]
        if others and find_class(name) is not self.cls:
            text = f"there are {len(others) + 1} classes named {name}, and a saved program finds a class by its name."
            raise RecordTreeError(f"{text} Rename one, or define it once, at the top of its module.")
        constants = {name: _dump(_value(form), f"{self.cls.__name__}.{name}") for name, form in context.forms}
        return {"children": list(context.children), "constants": constants}


def _is_child(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (tuple, list)):
        return any([_is_child(item) for item in value])  # noqa: C419  (Dynamo traces lists)
    if isinstance(value, dict):
        return any([_is_child(item) for item in value.values()])  # noqa: C419
    # Before torch 2.12, Dynamo does not ask the class of an enum for an attribute.
    return type(value) in compat.pytree_nodes and dataclasses.is_dataclass(value)
