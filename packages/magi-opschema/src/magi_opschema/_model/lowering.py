# SPDX-License-Identifier: Apache-2.0
"""A signature and its flat schema as plain data."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .layout import FlatLayout
from .schema import NO_DEFAULT, Argument, schema_text, slots_of
from .tree import Leaf, Node, Optional, Record, Sequence, leaves, nodes


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
class SignatureTrees:
    """A signature as trees, before it is known which arguments the schema has."""

    name: str
    signature: inspect.Signature
    parameters: tuple[Parameter, ...]
    returns: Node | None
    prefix: str
    """The prefix of every reserved name in generated code; no name of the user has it."""
    location: str
    title: str
    """The prefix of errors about it: the op's qualified name; without an op, that of the function with brackets."""

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


@dataclass(frozen=True)
class SignatureLowering(SignatureTrees):
    """What a signature became. `lower_signature` makes it; nothing in it changes afterwards."""

    arguments: tuple[Argument, ...]
    path: LoweringPath

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
        return FlatLayout.of_arguments(self.arguments)

    @functools.cached_property
    def mutated(self) -> tuple[Argument, ...]:
        """The slots that the op writes into."""
        return tuple(slot for slot in self.slots if slot.alias)

    @property
    def rebuilds_returns(self) -> bool:
        """True if the flat outputs differ from what the user's function returns."""
        return self.returns is not None and not is_flat_return(self.returns)

    def describe(self, op_name: str = "") -> str:
        """Signature, schema, tree and path as lines of text; the schema has the name *op_name* if one is given."""
        from .show import entry, show_signature, show_trees

        schema = self.schema if not op_name else self.schema.replace(self.name, op_name, 1)
        return "\n".join(
            [
                entry("signature", show_signature(self.name, self.signature)),
                entry("schema", schema),
                *show_trees([(parameter.name, parameter.node) for parameter in self.parameters]),
                entry("path", self.path),
            ]
        )

    def __str__(self) -> str:
        return self.describe()


def is_flat_return(node: Node) -> bool:
    """True if an op returns what the user's function returns, with nothing to rebuild."""
    if isinstance(node, Sequence):
        return len(node.items) > 1 and all(isinstance(item, Leaf) and item.codec.is_identity for item in node.items)
    return isinstance(node, Leaf) and node.codec.is_identity
