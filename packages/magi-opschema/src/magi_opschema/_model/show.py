# SPDX-License-Identifier: Apache-2.0
"""A lowering as text for a reader: signature, schema, tree, path."""

from __future__ import annotations

import dataclasses
import enum
import inspect

from magi_opschema._text import full_repr, show_type, show_value

from .tree import Field, Leaf, ListOrTuple, MaskedList, Node, Optional, Record, Sequence, leaves


_COLUMN = 11


def show_signature(name: str, signature: inspect.Signature) -> str:
    """The rich signature, with defaults as constructor calls: `norm(x: Tensor, cfg: NormCfg = NormCfg()) -> Tensor`."""
    texts: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in texts:
            texts.append("*")
        default = "" if parameter.default is parameter.empty else f" = {_show_value(parameter.default)}"
        texts.append(f"{parameter.name}: {show_type(parameter.annotation)}{default}")
    returned = signature.return_annotation
    arrow = "" if returned is inspect.Signature.empty else f" -> {show_type(returned)}"
    return f"{name}({', '.join(texts)}){arrow}"


def show_trees(parameters: list[tuple[str, Node]]) -> list[str]:
    """The lines of the mapping tree, one for each leaf."""
    lines = [line for name, node in parameters for line in _show_parameter(name, node)]
    return [entry("tree" if i == 0 else "", line) for i, line in enumerate(lines or ["no parameters"])]


def entry(title: str, text: str) -> str:
    """A line with a title, such as `path       flattened`; without a title, the continuation of one."""
    return f"{title:<{_COLUMN}}{text}".rstrip()


def _show_value(value: object) -> str:
    """*value* as short text; for a dataclass, only the fields that differ from their defaults."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [
            f"{part.name}={_show_value(getattr(value, part.name))}"
            for part in dataclasses.fields(value)
            if part.init and not _is_default(part, getattr(value, part.name))
        ]
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value._name_}"
    return show_value(value)


def _is_default(part: dataclasses.Field[object], value: object) -> bool:
    if part.default is not dataclasses.MISSING:
        default: object = part.default
    elif part.default_factory is not dataclasses.MISSING:
        default = part.default_factory()
    else:
        return False
    return value is default or (type(value) is type(default) and full_repr(value) == full_repr(default))


def _show_parameter(name: str, node: Node) -> list[str]:
    if isinstance(node, Leaf):
        renamed = f" → {node.name}" if node.name != name else ""
        return [f"{name} ─{renamed} {node.schema_type}{_note(node)}"]
    return [f"{name} ─ {_label(node)}", *_show_below(node, "  ")]


def _show_below(node: Node, margin: str) -> list[str]:
    children = _children(node)
    width = max((len(child.name) for child in children), default=0)
    flat_width = max((len(child.node.name) for child in children if isinstance(child.node, Leaf)), default=0)
    lines = []
    for child in children:
        is_last = child is children[-1]
        branch = f"{margin}{'└' if is_last else '├'} {child.name:<{width}}"
        if isinstance(child.node, Leaf):
            lines.append(f"{branch} → {child.node.name:<{flat_width}}  {child.node.schema_type}{_note(child.node)}")
        else:
            lines.append(f"{branch} ─ {_label(child.node)}")
            lines += _show_below(child.node, f"{margin}{' ' if is_last else '│'} ")
    return lines


def _children(node: Node) -> list[Field]:
    match node:
        case Record():
            return list(node.fields)
        case Sequence():
            return [Field(str(i), item) for i, item in enumerate(node.items)]
        case Optional():
            return [Field("is_some", node.is_some), *_children(node.inner)]
    return [Field(leaf.path[-1], leaf) for leaf in leaves(node)]


def _label(node: Node) -> str:
    match node:
        case Optional():
            return f"{_label(node.inner)} | None"
        case Record() if node.handle is not None or node.kind == "object":
            return f"{node.label}, taken apart"
        case Record() | Sequence() | ListOrTuple() | MaskedList():
            return node.label
    raise AssertionError(node)


def _note(leaf: Leaf) -> str:
    return f"  ({leaf.codec.note})" if leaf.codec.note else ""
