# SPDX-License-Identifier: Apache-2.0
"""More than 64 leaves: leaves of one kind travel in one list argument.

    200 floats                  float[] packed_float
    100 floats that may be None float[] packed_optional_float, bool[] packed_optional_float_present
    dtypes, devices, numbers    str[] packed_ScalarType
    lists of ints               SymInt[] packed_SymInt_list, SymInt[] packed_SymInt_list_length

Tensors stay arguments of their own: autograd, functionalization and aliasing look at them one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from . import _codecs as codecs
from ._emit import Writer
from ._schema import MAX_ARGUMENTS, NO_DEFAULT, Argument
from ._tree import Codec, Leaf, flat_name, nodes
from .errors import Problem, SignatureError


if TYPE_CHECKING:
    from ._lowering import SignatureLowering

_FILLERS = {"SymInt": "0", "float": "0.0", "bool": "False", "str": '""'}
_TEXTS: dict[str, Codec] = {
    "ScalarType": codecs.torch_constant_text(torch.dtype),
    "Device": codecs.torch_constant_text(torch.device),
    "Layout": codecs.torch_constant_text(torch.layout),
    "MemoryFormat": codecs.torch_constant_text(torch.memory_format),
    "complex": codecs.number_text(),
    "Scalar": codecs.number_text(),
}


@dataclass(frozen=True)
class Values:
    """Values side by side: `[a, b]`."""

    def pack(self, exprs: Sequence[str], to: Writer) -> str:  # noqa: ARG002  (a Packing may bind names)
        return f"[{', '.join(exprs)}]"

    def unpack(self, argument: Argument, to: Writer) -> None:
        to.line(f"{', '.join(leaf.name for leaf in argument.leaves)}, = {argument.name}")


@dataclass(frozen=True)
class OptionalValues:
    """Values that may be None, a filler in their place; the argument *present* says which."""

    filler: str
    present: str

    def pack(self, exprs: Sequence[str], to: Writer) -> str:  # noqa: ARG002
        return f"[{', '.join(f'{self.filler} if {text} is None else {text}' for text in exprs)}]"

    def unpack(self, argument: Argument, to: Writer) -> None:
        for i, leaf in enumerate(argument.leaves):
            to.line(f"{leaf.name} = {argument.name}[{i}] if {self.present}[{i}] else None")


@dataclass(frozen=True)
class Present:
    """Which of the optional values are there; `OptionalValues` reads it."""

    def pack(self, exprs: Sequence[str], to: Writer) -> str:  # noqa: ARG002
        return f"[{', '.join(f'{text} is not None' for text in exprs)}]"

    def unpack(self, argument: Argument, to: Writer) -> None:
        """Nothing: it has no leaf of its own."""


@dataclass(frozen=True)
class Texts:
    """Values written as text, the empty text for None."""

    codec: Codec

    def pack(self, exprs: Sequence[str], to: Writer) -> str:
        leaf = Leaf((), "str", "packed", self.codec)
        texts = [f"'' if {text} is None else {to.expression(leaf, self.codec.encode, text)}" for text in exprs]
        return f"[{', '.join(texts)}]"

    def unpack(self, argument: Argument, to: Writer) -> None:
        for i, leaf in enumerate(argument.leaves):
            text = f"{argument.name}[{i}]"
            value = to.expression(Leaf((), "str", "packed", self.codec), self.codec.decode, text)
            to.line(f"{leaf.name} = {value} if {text} else None")


@dataclass(frozen=True)
class Lists:
    """Lists one after the other; the argument *lengths* says where each ends."""

    lengths: str

    def pack(self, exprs: Sequence[str], to: Writer) -> str:  # noqa: ARG002
        return f"[{', '.join(f'*({text} or ())' for text in exprs)}]"

    def unpack(self, argument: Argument, to: Writer) -> None:
        items, list_ = to.bind("islice", codecs.take), to.temporary(argument.name)
        to.line(f"{list_} = {to.builtin('iter')}({argument.name})")
        for i, leaf in enumerate(argument.leaves):
            to.line(f"{leaf.name} = {items}({list_}, {self.lengths}[{i}])")


@dataclass(frozen=True)
class Lengths:
    """The length of each list, -1 for None; `Lists` reads it."""

    def pack(self, exprs: Sequence[str], to: Writer) -> str:
        len_ = to.builtin("len")
        return f"[{', '.join(f'-1 if {text} is None else {len_}({text})' for text in exprs)}]"

    def unpack(self, argument: Argument, to: Writer) -> None:
        """Nothing: it has no leaf of its own."""


def pack(arguments: tuple[Argument, ...], lowering: SignatureLowering) -> tuple[Argument, ...]:
    """At most 64 arguments for any number of leaves.

    Raises:
        SignatureError: more than 64 leaves are left that cannot travel in a list: Tensors, generators.
    """
    groups: dict[str, list[Leaf]] = {}
    for argument in arguments:
        if kind := _kind(argument.leaves[0]):
            groups.setdefault(kind, []).extend(argument.leaves)
    groups = {kind: members for kind, members in groups.items() if len(members) > 2}
    alone = [replace(argument, default=NO_DEFAULT) for argument in arguments if _kind(argument.leaves[0]) not in groups]
    taken = {flat_name(node.path) for parameter in lowering.parameters for node in nodes(parameter.node)}
    packed = [
        argument
        for kind, members in groups.items()
        for argument in _pack_group(kind, _free_name(f"packed_{kind}", taken), tuple(members))
    ]
    if len(alone) + len(packed) > MAX_ARGUMENTS:
        tensors = sum(argument.leaves[0].is_tensor for argument in alone)
        sentence = (
            f"the signature has {tensors} Tensors, and torch registers no schema of more than {MAX_ARGUMENTS} "
            "arguments. Pass some of them as one list[Tensor], or stacked."
        )
        raise SignatureError(lowering.name, lowering.location, (Problem("", sentence),))
    return (*alone, *packed)


def _kind(leaf: Leaf) -> str:
    """What leaves can share an argument; empty for those that stay alone."""
    base = leaf.schema_type.removesuffix("?")
    if base in _FILLERS:
        return f"optional_{base}" if leaf.is_optional else base
    if base in _TEXTS:
        return base
    if leaf.is_list and not leaf.is_tensor:
        return f"{base.removesuffix('[]')}_list"
    return ""


def _free_name(name: str, taken: set[str]) -> str:
    """*name*, or a longer one where one of the user's begins with it."""
    while any(other.startswith(name) for other in taken):
        name += "_"
    return name


def _pack_group(kind: str, name: str, members: tuple[Leaf, ...]) -> list[Argument]:
    base = members[0].schema_type.removesuffix("?")
    if kind.startswith("optional_"):
        present = f"{name}_present"
        values = OptionalValues(_FILLERS[base], present)
        return [
            Argument(name, f"{base}[]", members, packing=values),
            Argument(present, "bool[]", members, packing=Present()),
        ]
    if kind.endswith("_list"):
        lengths = f"{name}_length"
        return [
            Argument(name, base, members, packing=Lists(lengths)),
            Argument(lengths, "SymInt[]", members, packing=Lengths()),
        ]
    if base in _TEXTS:
        return [Argument(name, "str[]", members, packing=Texts(_TEXTS[base]))]
    return [Argument(name, f"{base}[]", members, packing=Values())]
