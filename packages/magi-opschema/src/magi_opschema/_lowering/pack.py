# SPDX-License-Identifier: Apache-2.0
"""More than 64 leaves: leaves of one kind share one list argument.

    200 floats                  float[] packed_float
    100 floats that may be None float[] packed_optional_float, bool[] packed_optional_float_present
    dtypes, devices, numbers    str[] packed_ScalarType
    lists of ints               SymInt[] packed_SymInt_list, SymInt[] packed_SymInt_list_length

Tensors stay separate arguments while there is room, because a graph then shows each of them. If there is no room, they
share a list too, and the kernels of this package still see each Tensor: see `FlatLayout` in `_model.schema`.

    64 Tensors and a float      Tensor[] packed_Tensor, float packed_float
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from magi_opschema._model.schema import MAX_ARGUMENTS, NO_DEFAULT, Argument, Packing
from magi_opschema._model.tree import SEQUENCE, Codec, Leaf, flat_name, nodes
from magi_opschema.errors import Problem, SignatureError

from . import codecs


if TYPE_CHECKING:
    from magi_opschema._model.lowering import SignatureLowering

_FILLERS = {"SymInt": "0", "float": "0.0", "bool": "False", "str": '""'}
_NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


def _texts(codec: Codec, *kinds: type) -> Packing:
    """Values of *kinds* written as text, the empty text for None."""
    return Packing(
        "'' if {value} is None else {encoded}", read="{decoded} if {list}[{i}] else None", kinds=kinds, codec=codec
    )


_TEXTS = {
    "ScalarType": _texts(codecs.torch_constant_text(torch.dtype), torch.dtype),
    "Device": _texts(codecs.torch_constant_text(torch.device), torch.device, str),
    "Layout": _texts(codecs.torch_constant_text(torch.layout), torch.layout),
    "MemoryFormat": _texts(codecs.torch_constant_text(torch.memory_format), torch.memory_format),
    "complex": _texts(codecs.number_text(), *_NUMBERS),
    "Scalar": _texts(codecs.number_text(), *_NUMBERS),
}
_VALUES = Packing(head="{leaves}, = {list}")
_PRESENT = Packing("{value} is not None")
_LENGTHS = Packing("-1 if {value} is None else {len}({value})")


def pack(arguments: tuple[Argument, ...], trees: SignatureLowering) -> tuple[Argument, ...]:
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
    tensors, alias, present = _leaves_of(members), members[0].alias, f"{name}_present"
    if not kind.startswith("optional_"):
        return [Argument(name, "Tensor[]", tensors, alias=alias, packing=_VALUES)]
    packing = Packing(
        whole="[{tensor} for {tensor} in ({items},) if {tensor} is not None]",
        head="{rest} = {iter}({list})",
        read=f"{{next}}({{rest}}) if {present}[{{i}}] else None",
    )
    return [
        Argument(name, "Tensor[]", tensors, alias=alias, packing=packing),
        Argument(present, "bool[]", tensors, packing=_PRESENT),
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
        item, read = (
            f"{_FILLERS[base]} if {{value}} is None else {{value}}",
            f"{{list}}[{{i}}] if {present}[{{i}}] else None",
        )
        return [
            Argument(name, f"{base}[]", members, packing=Packing(item, read=read)),
            Argument(present, "bool[]", members, packing=_PRESENT),
        ]
    if kind.endswith("_list"):
        lengths = f"{name}_length"
        head, read = "{rest} = {iter}({list})", f"{{take}}({{rest}}, {lengths}[{{i}}])"
        return [
            Argument(name, base, members, packing=Packing("*({value} or ())", head=head, read=read, kinds=SEQUENCE)),
            Argument(lengths, "SymInt[]", members, packing=_LENGTHS),
        ]
    if base in _TEXTS:
        return [Argument(name, "str[]", members, packing=_TEXTS[base])]
    return [Argument(name, f"{base}[]", members, packing=_VALUES)]
