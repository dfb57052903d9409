# SPDX-License-Identifier: Apache-2.0
"""A signature and its flat schema as plain data, and as text for a reader: signature, schema, tree, path."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from magi_opschema._text import full_repr, show_literal, show_type, show_value

from .schema import NO_DEFAULT, Argument, FlatLayout, schema_text, slots_of
from .tree import Leaf, ListOrTuple, MaskedList, Node, Optional, Record, Sequence, children, leaves, nodes


LoweringPath = Literal["direct", "lowered", "flattened"]


@dataclass(frozen=True)
class Parameter:
    """One parameter of the user's function."""

    name: str
    node: Node
    default: object = NO_DEFAULT
    is_keyword_only: bool = False
    is_plain: bool = True
    """True if torch would accept the annotation as it is written."""

    @property
    def has_default(self) -> bool:
        """True if the caller may leave the parameter out."""
        return self.default is not NO_DEFAULT


@dataclass(frozen=True)
class SignatureLowering:
    """What a signature became. `lower_signature` makes it; nothing in it changes afterwards."""

    name: str
    signature: inspect.Signature
    parameters: tuple[Parameter, ...]
    returns: Node | None
    prefix: str
    """The prefix of every reserved name in generated code; no name of the user has it."""
    location: str
    title: str
    """The prefix of errors about it: the op's qualified name; without an op, that of the function with brackets."""
    arguments: tuple[Argument, ...] = ()
    path: LoweringPath = "direct"

    @functools.cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """All leaves of the parameters, in order."""
        return tuple(leaf for parameter in self.parameters for leaf in leaves(parameter.node))

    @functools.cached_property
    def return_leaves(self) -> tuple[Leaf, ...]:
        """The leaves of the return value, in order; none for `-> None`."""
        return () if self.returns is None else tuple(leaves(self.returns))

    @functools.cached_property
    def takes_apart(self) -> tuple[Record, ...]:
        """The objects that a caller may also pass by their handle, for which there is a second op."""
        below = (node for parameter in self.parameters for node in nodes(parameter.node))
        return tuple(node for node in below if isinstance(node, Record) and node.handle is not None)

    @property
    def objects(self) -> Mapping[str, type]:
        """The class of each parameter for which the body gets an object that is rebuilt from its fields."""
        found = ((p.name, p.node.inner if isinstance(p.node, Optional) else p.node) for p in self.parameters)
        return {name: node.cls for name, node in found if isinstance(node, Record) and node.kind != "typeddict"}

    def sentence(self, text: str) -> str:
        """An error message about this op: its title, *text*, and where it is defined."""
        return f"{self.title}: {text} ({self.location})"

    @property
    def schema(self) -> str:
        """The flat schema, without namespace: `norm(Tensor x, float cfg__eps=1e-06) -> Tensor`."""
        return schema_text(self.name, self.arguments, tuple(leaf.schema_type for leaf in self.return_leaves))

    @property
    def tree(self) -> Mapping[str, Node]:
        """The tree of each parameter, by its name."""
        return types.MappingProxyType({parameter.name: parameter.node for parameter in self.parameters})

    @functools.cached_property
    def slots(self) -> tuple[Argument, ...]:
        """The arguments, with each Tensor separate, even if Tensors share a list because of more than 64 leaves."""
        return slots_of(self.arguments)

    @functools.cached_property
    def layout(self) -> FlatLayout:
        """The positions of the slots."""
        return FlatLayout.of(self.arguments)

    @functools.cached_property
    def mutated(self) -> tuple[Argument, ...]:
        """The slots that the op writes into."""
        return tuple(slot for slot in self.slots if slot.alias)

    @property
    def rebuilds_returns(self) -> bool:
        """True if the flat outputs differ from what the user's function returns."""
        node = self.returns
        if isinstance(node, Sequence):
            return len(node.items) < 2 or not all(isinstance(i, Leaf) and i.codec.is_identity for i in node.items)
        return node is not None and not (isinstance(node, Leaf) and node.codec.is_identity)

    def describe(self, op_name: str = "") -> str:
        """Signature, schema, tree and path as lines of text; the schema has the name *op_name* if one is given."""
        trees = [line for parameter in self.parameters for line in _show_parameter(parameter.name, parameter.node)]
        schema = self.schema if not op_name else self.schema.replace(self.name, op_name, 1)
        return "\n".join(
            [
                entry("signature", show_signature(self.name, self.signature)),
                entry("schema", schema),
                *(entry("" if i else "tree", line) for i, line in enumerate(trees or ["no parameters"])),
                entry("path", self.path),
            ]
        )

    def __str__(self) -> str:
        return self.describe()


_COLUMN = 11


def show_signature(name: str, signature: inspect.Signature) -> str:
    """The rich signature, with defaults as constructor calls: `norm(x: Tensor, cfg: NormCfg = NormCfg()) -> Tensor`."""
    texts: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in texts:
            texts.append("*")
        default = "" if parameter.default is parameter.empty else f" = {_show_default(parameter.default)}"
        texts.append(f"{parameter.name}: {show_type(parameter.annotation)}{default}")
    returned = signature.return_annotation
    arrow = "" if returned is inspect.Signature.empty else f" -> {show_type(returned)}"
    return f"{name}({', '.join(texts)}){arrow}"


def entry(title: str, text: str) -> str:
    """A line with a title, such as `path       flattened`; without a title, the continuation of one."""
    return f"{title:<{_COLUMN}}{text}".rstrip()


def _show_default(value: object) -> str:
    """*value* as short text; for a dataclass, only the fields that differ from their defaults."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [
            f"{part.name}={_show_default(getattr(value, part.name))}"
            for part in dataclasses.fields(value)
            if part.init and not _is_default(part, getattr(value, part.name))
        ]
        return f"{type(value).__name__}({', '.join(parts)})"
    return show_literal(value) if isinstance(value, enum.Enum) else show_value(value)


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
    shown = _shown_below(node)
    width = max((len(child.path[-1]) for child in shown), default=0)
    flat_width = max((len(child.name) for child in shown if isinstance(child, Leaf)), default=0)
    lines = []
    for child in shown:
        is_last = child is shown[-1]
        branch = f"{margin}{'└' if is_last else '├'} {child.path[-1]:<{width}}"
        if isinstance(child, Leaf):
            lines.append(f"{branch} → {child.name:<{flat_width}}  {child.schema_type}{_note(child)}")
        else:
            lines.append(f"{branch} ─ {_label(child)}")
            lines += _show_below(child, f"{margin}{' ' if is_last else '│'} ")
    return lines


def _shown_below(node: Node) -> list[Node]:
    match node:
        case Record() | Sequence():
            return list(children(node))
        case Optional():
            return [node.is_some, *_shown_below(node.inner)]
    return [*leaves(node)]


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
