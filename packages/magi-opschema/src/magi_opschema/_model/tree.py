# SPDX-License-Identifier: Apache-2.0
"""The mapping tree: how one parameter, or the return value, maps to leaves of the flat schema.

    cfg: NormCfg(eps: float, pair: tuple[int, int])

    Record NormCfg              path ("cfg",)
    ├ Leaf eps                  path ("cfg", "eps"), name "cfg__eps", schema type "float"
    └ Sequence                  path ("cfg", "pair")
      ├ Leaf                    path ("cfg", "pair", "0"), name "cfg__pair__0"
      └ Leaf                    path ("cfg", "pair", "1"), name "cfg__pair__1"

This is plain data. Nothing here depends on torch, annotations or generated code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal as TypingLiteral
from typing import TypeAlias

from magi_opschema.errors import OpSchemaError


Path: TypeAlias = tuple[str, ...]

SEQUENCE = (list, tuple)
"""The classes that a list argument accepts."""


@dataclass(frozen=True)
class Codec:
    """How a leaf's Python value is written into its schema argument and read back.

    The texts are expressions of generated code. `{value}` stands for the value,
    `{name}` for a constant of that name, which generated code receives as a bound global:

        Codec("Mode", encode="{value}.name", decode="{members}[{value}]", constants={"members": {...}})
    """

    note: str = ""
    refuse: str = ""
    """A condition under which the value is refused at the call; empty: none."""
    encode: str = "{value}"
    decode: str = "{value}"
    """The value that the body gets. `{reject}` stands for the function that refuses a value."""
    constants: Mapping[str, object] = field(default_factory=dict, hash=False)
    expected: str = ""
    """What the error says was expected."""
    described: str = ""
    """What fakes, gradient functions and rules get, which describe the op and do not run it; empty: `decode`."""
    refusal: Callable[[object, str], tuple[type[OpSchemaError], str]] | None = field(default=None, compare=False)
    """From a refused value and `expected` to the error class and the message after the parameter's name."""
    is_process_bound: bool = False
    """True if the schema argument is valid only in this process, so that it cannot be a schema default."""

    @property
    def keeps_value(self) -> bool:
        """True if the caller's value goes into the schema argument as it is."""
        return self.encode == "{value}"

    @property
    def is_identity(self) -> bool:
        """True if the body receives the schema argument as it is, unchecked."""
        return self.keeps_value and self.decode == "{value}" and not self.refuse


IDENTITY = Codec()


@dataclass(frozen=True)
class Leaf:
    """One value of the flat schema."""

    path: Path
    schema_type: str
    name: str
    codec: Codec = IDENTITY
    is_padded: bool = False
    """True below a record that may be None: the schema accepts None for the leaf, but the user's annotation does
    not."""
    is_fixed: bool = False
    """True for a part of an object that was taken apart: a constant of compiled code, or a Tensor that stays."""

    @property
    def refuses_none(self) -> bool:
        """True if the dispatcher accepts a None that the annotation does not allow, as it does for every Tensor."""
        return self.is_padded or self.schema_type == "Tensor"

    @property
    def is_tensor(self) -> bool:
        """True for `Tensor`, `Tensor?`, `Tensor[]` and `Tensor[]?`."""
        return self.schema_type.startswith("Tensor")

    @property
    def is_opaque(self) -> bool:
        """True for a class that was registered with torch, whose schema type is its dotted name, and for a list."""
        return "." in self.schema_type

    @property
    def is_generator(self) -> bool:
        """True for `Generator` and `Generator?`, which no graph of Dynamo holds."""
        return self.schema_type.startswith("Generator")

    @property
    def is_list(self) -> bool:
        """True for list types, optional or not."""
        return self.schema_type.rstrip("?").endswith("[]")

    @property
    def is_optional(self) -> bool:
        """True if the schema argument may be None."""
        return self.schema_type.endswith("?")


@dataclass(frozen=True)
class Field:
    """A named part of a `Record`: the name as the user wrote it, and the node below it."""

    name: str
    node: Node


RecordKind = TypingLiteral["dataclass", "namedtuple", "typeddict", "object"]


@dataclass(frozen=True)
class Record:
    """A frozen dataclass, NamedTuple or TypedDict, or an object whose class declares its fields."""

    path: Path
    cls: type
    kind: RecordKind
    fields: tuple[Field, ...]
    label: str
    is_plain: bool = False
    """True for a dataclass or named tuple of which no code of the user runs when an instance is made or read."""
    handle: Leaf | None = None
    """If the annotation is `ObjectHandle[T]`, the leaf for the case that the caller passes the object's handle."""


@dataclass(frozen=True)
class Sequence:
    """A fixed tuple, `tuple[A, B]`."""

    path: Path
    items: tuple[Node, ...]
    label: str


@dataclass(frozen=True)
class ListOrTuple:
    """`Sequence[T]` in a record: a bool leaf that says whether the value is a tuple, and the leaves of `list[T]`."""

    path: Path
    is_tuple: Leaf
    inner: Leaf | MaskedList
    label: str


@dataclass(frozen=True)
class Optional:
    """`T | None` where T is not a single leaf: a bool leaf that says which, and T's leaves, None if it is False."""

    path: Path
    is_some: Leaf
    inner: Record | Sequence | ListOrTuple | MaskedList


@dataclass(frozen=True)
class MaskedList:
    """`list[Tensor | None]`: the tensors that are there, and for each place of the list whether one is.

    torch's autograd treats a `Tensor?[]` that holds a None as a constant, so that form would lose gradients
    (torch/_library/autograd.py, `supports_tensorlist`).
    """

    path: Path
    values: Leaf
    present: Leaf
    label: str
    is_tuple: bool = False
    """True for `tuple[Tensor | None, ...]`: the body gets a tuple."""


Node: TypeAlias = Leaf | Record | Sequence | Optional | ListOrTuple | MaskedList


def leaves(node: Node) -> list[Leaf]:
    """The leaves of *node* in schema order."""
    return [each for each in nodes(node) if isinstance(each, Leaf)]


def nodes(node: Node) -> list[Node]:
    """*node* and every node below it, parents first."""
    found = [node]
    for child in children(node):
        found += nodes(child)
    return found


def children(node: Node) -> tuple[Node, ...]:
    """The nodes right below *node*, in schema order."""
    match node:
        case Leaf():
            return ()
        case Record():
            return tuple([part.node for part in node.fields])
        case Sequence():
            return node.items
        case Optional():
            return node.is_some, node.inner
        case ListOrTuple():
            return node.is_tuple, node.inner
        case MaskedList():
            return node.values, node.present


def dotted(path: Path) -> str:
    """`("cfg", "inner", "scale")` as `cfg.inner.scale`."""
    return ".".join(path)


@functools.lru_cache(maxsize=4096)
def flat_name(path: Path) -> str:
    """The ASCII identifier of a node: `("cfg", "inner", "scale")` as `cfg__inner__scale`.

    Schemas parse ASCII identifiers only, so any other character is spelled by its code point:
    `größe` becomes `gru00f6u00dfe`. A parameter named `self` confuses auto_functionalized (pytorch #130179);
    `Ellipsis` and `NoneType` are keywords of the schema language (torch/csrc/jit/frontend/lexer.h).
    """
    name = "__".join(path)
    if not (name.isascii() and name.isidentifier()):
        name = "".join(c if c.isascii() and (c.isalnum() or c == "_") else f"u{ord(c):04x}" for c in name)
    if name in {"self", "Ellipsis", "NoneType"}:
        return f"{name}_"
    return name if not name[:1].isdigit() else f"_{name}"
