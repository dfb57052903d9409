# SPDX-License-Identifier: Apache-2.0
"""More than 64 leaves: leaves of one kind share one list argument.

    200 floats                  float[] packed_float
    100 floats that may be None float[] packed_optional_float, bool[] packed_optional_float_present
    dtypes, devices, numbers    str[] packed_ScalarType
    lists of ints               SymInt[] packed_SymInt_list, SymInt[] packed_SymInt_list_length

Tensors stay separate arguments while there is room, because a graph then shows each of them. If there is no room, they
share a list too, and the kernels of this package still see each Tensor: see `slots` in `_model.layout`.

    64 Tensors and a float      Tensor[] packed_Tensor, float packed_float
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from magi_opschema._codegen.source import Writer
from magi_opschema._model.schema import MAX_ARGUMENTS, NO_DEFAULT, Argument
from magi_opschema._model.tree import SEQUENCE, Codec, Leaf, flat_name, nodes
from magi_opschema.errors import Problem, SignatureError

from . import codecs


if TYPE_CHECKING:
    from magi_opschema._model.lowering import SignatureTrees

_FILLERS = {"SymInt": "0", "float": "0.0", "bool": "False", "str": '""'}
_TEXTS: dict[str, Codec] = {
    "ScalarType": codecs.torch_constant_text(torch.dtype),
    "Device": codecs.torch_constant_text(torch.device),
    "Layout": codecs.torch_constant_text(torch.layout),
    "MemoryFormat": codecs.torch_constant_text(torch.memory_format),
    "complex": codecs.number_text(),
    "Scalar": codecs.number_text(),
}
_NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)
_KINDS: dict[str, tuple[type, ...]] = {
    "ScalarType": (torch.dtype,),
    "Device": (torch.device, str),
    "Layout": (torch.layout,),
    "MemoryFormat": (torch.memory_format,),
    "complex": _NUMBERS,
    "Scalar": _NUMBERS,
}


@dataclass(frozen=True)
class Values:
    """Values in one list: `[a, b]`."""

    holds_values: ClassVar[bool] = True

    def pack(self, argument: Argument, exprs: Sequence[str], to: Writer) -> str:  # noqa: ARG002
        return f"[{', '.join(exprs)}]"

    def unpack(self, argument: Argument, to: Writer) -> None:
        to.line(f"{', '.join(leaf.name for leaf in argument.leaves)}, = {argument.name}")


@dataclass(frozen=True)
class OptionalValues:
    """Values that may be None, for which a filler is passed; the argument *present* says which values are there."""

    filler: str
    present: str

    holds_values: ClassVar[bool] = True

    def pack(self, argument: Argument, exprs: Sequence[str], to: Writer) -> str:  # noqa: ARG002
        return f"[{', '.join(f'{self.filler} if {text} is None else {text}' for text in exprs)}]"

    def unpack(self, argument: Argument, to: Writer) -> None:
        for i, leaf in enumerate(argument.leaves):
            to.line(f"{leaf.name} = {argument.name}[{i}] if {self.present}[{i}] else None")


@dataclass(frozen=True)
class Present:
    """Which of the optional values are there; `OptionalValues` reads it."""

    holds_values: ClassVar[bool] = False

    def pack(self, argument: Argument, exprs: Sequence[str], to: Writer) -> str:  # noqa: ARG002
        return f"[{', '.join(f'{text} is not None' for text in exprs)}]"

    def unpack(self, argument: Argument, to: Writer) -> None:
        """Nothing: it has no leaf of its own."""


@dataclass(frozen=True)
class Texts:
    """Values written as text, the empty text for None."""

    codec: Codec

    holds_values: ClassVar[bool] = True

    def pack(self, argument: Argument, exprs: Sequence[str], to: Writer) -> str:
        texts = []
        for leaf, text in zip(argument.leaves, exprs, strict=True):
            value = _refuse_unless(leaf, _KINDS[leaf.schema_type.removesuffix("?")], text, to)
            encoded = to.expression(Leaf((), "str", "packed", self.codec), self.codec.encode, value)
            texts.append(f"'' if {value} is None else {encoded}")
        return f"[{', '.join(texts)}]"

    def unpack(self, argument: Argument, to: Writer) -> None:
        for i, leaf in enumerate(argument.leaves):
            text = f"{argument.name}[{i}]"
            value = to.expression(Leaf(leaf.path, "str", "packed", self.codec), self.codec.decode, text)
            to.line(f"{leaf.name} = {value} if {text} else None")


@dataclass(frozen=True)
class Lists:
    """Lists one after the other; the argument *lengths* says where each ends."""

    lengths: str

    holds_values: ClassVar[bool] = True

    def pack(self, argument: Argument, exprs: Sequence[str], to: Writer) -> str:
        texts = [_refuse_unless(leaf, SEQUENCE, text, to) for leaf, text in zip(argument.leaves, exprs, strict=True)]
        return f"[{', '.join(f'*({text} or ())' for text in texts)}]"

    def unpack(self, argument: Argument, to: Writer) -> None:
        items, list_ = to.bind("take", codecs.take), to.temporary(argument.name)
        to.line(f"{list_} = {to.builtin('iter')}({argument.name})")
        for i, leaf in enumerate(argument.leaves):
            to.line(f"{leaf.name} = {items}({list_}, {self.lengths}[{i}])")


@dataclass(frozen=True)
class Lengths:
    """The length of each list, -1 for None; `Lists` reads it."""

    holds_values: ClassVar[bool] = False

    def pack(self, argument: Argument, exprs: Sequence[str], to: Writer) -> str:  # noqa: ARG002
        len_ = to.builtin("len")
        return f"[{', '.join(f'-1 if {text} is None else {len_}({text})' for text in exprs)}]"

    def unpack(self, argument: Argument, to: Writer) -> None:
        """Nothing: it has no leaf of its own."""


@dataclass(frozen=True)
class OptionalTensors:
    """The Tensors that are there; the argument *present* says which."""

    present: str

    holds_values: ClassVar[bool] = True

    def pack(self, argument: Argument, exprs: Sequence[str], to: Writer) -> str:  # noqa: ARG002
        tensor = to.temporary("tensor")
        return f"[{tensor} for {tensor} in ({', '.join(exprs)},) if {tensor} is not None]"

    def unpack(self, argument: Argument, to: Writer) -> None:
        next_, rest = to.builtin("next"), to.temporary(argument.name)
        to.line(f"{rest} = {to.builtin('iter')}({argument.name})")
        for i, leaf in enumerate(argument.leaves):
            to.line(f"{leaf.name} = {next_}({rest}) if {self.present}[{i}] else None")


def _refuse_unless(leaf: Leaf, kinds: tuple[type, ...], value: str, to: Writer) -> str:
    """Write the check that *value* is of one of *kinds*, because the dispatcher cannot check a packed value.

    Returns:
        The value's local name.
    """
    if not value.isidentifier():
        # The leaf's own name is not used, because the expression may read it, and is written again for the length.
        name = to.temporary(f"{leaf.name}_packed")
        to.line(f"{name} = {value}")
        value = name
    accepted = to.bind(f"kinds_of_{leaf.name}", (*kinds, *((type(None),) if leaf.is_optional else ())))
    with to.block(f"if not {to.builtin('isinstance')}({value}, {accepted}):"):
        to.line(f"{to.bind(f'reject_{leaf.name}', to.reject(leaf))}({value})")
    return value


def pack(arguments: tuple[Argument, ...], trees: SignatureTrees) -> tuple[Argument, ...]:
    """*arguments*, packed so that there are at most 64 for any number of leaves.

    Raises:
        SignatureError: more than 64 leaves cannot share an argument, such as lists of Tensors and generators.
    """
    taken = {flat_name(node.path) for parameter in trees.parameters for node in nodes(parameter.node)}
    groups = {kind: members for kind, members in _by_kind(arguments, _kind).items() if len(members) > 2}
    alone = [replace(argument, default=NO_DEFAULT) for argument in arguments if _kind(argument) not in groups]
    packed = [
        argument
        for kind, members in groups.items()
        for argument in _pack_group(kind, _free_name(f"packed_{kind}", taken), _leaves_of(members))
    ]
    if len(alone) + len(packed) > MAX_ARGUMENTS:
        tensors = _by_kind(alone, _tensor_kind)
        alone = [argument for argument in alone if _tensor_kind(argument) not in tensors]
        for kind, members in tensors.items():
            alone += _bundle(kind, _free_name(f"packed_{kind}", taken), members)
    if len(alone) + len(packed) > MAX_ARGUMENTS:
        raise SignatureError(trees.title, trees.location, (Problem("", _too_many(alone)),))
    return (*alone, *packed)


def _by_kind(arguments: Iterable[Argument], kind_of: Callable[[Argument], str]) -> dict[str, list[Argument]]:
    groups: dict[str, list[Argument]] = {}
    for argument in arguments:
        if kind := kind_of(argument):
            groups.setdefault(kind, []).append(argument)
    return groups


def _leaves_of(arguments: Iterable[Argument]) -> tuple[Leaf, ...]:
    return tuple(leaf for argument in arguments for leaf in argument.leaves)


def _too_many(arguments: Sequence[Argument]) -> str:
    lists = sum(argument.leaves[0].is_tensor for argument in arguments)
    return (
        f"the signature has {lists} lists of Tensors and {len(arguments) - lists} other values that cannot share an "
        f"argument, and torch registers no schema of more than {MAX_ARGUMENTS} arguments. Pass some as one list."
    )


def _kind(argument: Argument) -> str:
    """A key that is equal for leaves that can share an argument; empty for Tensors and for leaves that cannot."""
    leaf = argument.leaves[0]
    base = leaf.schema_type.removesuffix("?")
    if base in _FILLERS:
        return f"optional_{base}" if leaf.is_optional else base
    if base in _TEXTS:
        return base
    if leaf.is_list and not leaf.is_tensor:
        return f"{base.removesuffix('[]')}_list"
    return ""


def _tensor_kind(argument: Argument) -> str:
    """A key that is equal for Tensors that can share an argument; empty for lists of them, and for other values."""
    if argument.schema_type not in {"Tensor", "Tensor?"}:
        return ""
    kind = "mutated_Tensor" if argument.alias else "Tensor"
    return f"optional_{kind}" if argument.leaves[0].is_optional else kind


def _bundle(kind: str, name: str, members: Sequence[Argument]) -> list[Argument]:
    tensors = _leaves_of(members)
    if not kind.startswith("optional_"):
        return [Argument(name, "Tensor[]", tensors, alias=members[0].alias, packing=Values())]
    present = f"{name}_present"
    return [
        Argument(name, "Tensor[]", tensors, alias=members[0].alias, packing=OptionalTensors(present)),
        Argument(present, "bool[]", tensors, packing=Present()),
    ]


def _free_name(name: str, taken: set[str]) -> str:
    """*name*, or a longer one if one of *taken*, the names of the user, begins with it."""
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
