# SPDX-License-Identifier: Apache-2.0
"""The codecs of leaves whose Python value is not the value of the schema argument.

A condition that generated code evaluates at a call is written so that Dynamo can trace it, and so that values of
different types that compare equal (`True` and `1`) are distinguished.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from magi_opschema._model.tree import IDENTITY, SEQUENCE, Codec
from magi_opschema._text import show_literal, show_type


_BOOLS = {"True": True, "False": False}

AS_TUPLE = Codec(decode="{tuple}({value})", constants={"tuple": tuple})
"""`tuple[T, ...]`: the dispatcher accepts a tuple for a list, and passes a list to the body."""

SIZE = Codec("torch.Size", decode="{size}({value})", constants={"size": torch.Size})
"""`torch.Size`: the dispatcher accepts it for a list of ints."""

AS_LIST = Codec(
    refuse="not {isinstance}({value}, {list})",
    constants={"isinstance": isinstance, "list": list},
    expected="a list, because a Sequence in a returned record arrives as one",
)
"""`Sequence[T]` in a record that an op returns: an op cannot say of an output whether it was a tuple."""

COMPLEX_PAIRS = Codec(
    note="real and imaginary parts",
    refuse=("not {isinstance}({value}, {sequence}) or not {all}([{isinstance}(item, {numbers}) for item in {value}])"),
    encode="[part for item in {value} for part in (item.real, item.imag)]",
    decode="[{complex}(*pair) for pair in {zip}({value}[::2], {value}[1::2])]",
    constants={
        "complex": complex,
        "tuple": tuple,
        "zip": zip,
        "isinstance": isinstance,
        "all": all,
        "sequence": SEQUENCE,
        "numbers": (int, float, complex, torch.SymInt, torch.SymFloat),
    },
    expected="a list of numbers",
)
"""`list[complex]`: a `complex[]` argument fails torch.export.save on torch 2.13."""

PAIRS_AS_TUPLE = replace(COMPLEX_PAIRS, decode=f"{{tuple}}({COMPLEX_PAIRS.decode})")
"""`tuple[complex, ...]`."""


def literal(values: tuple[object, ...]) -> tuple[str, Codec]:
    """The schema type and the codec of `Literal[values]`, of which None was removed."""
    shown = [show_literal(value) for value in values]
    note, expected = f"Literal {' | '.join(shown)}", f"one of {', '.join(shown)}"
    kinds = {type(value) for value in values}
    if kinds == {str}:
        return "str", Codec(note, "{value} not in {values}", constants={"values": values}, expected=expected)
    if len(kinds) == 1 and kinds <= {int, bool}:
        constants = {"values": values, "kind": kinds.pop(), "type": type}
        refuse = "{type}({value}) is not {kind} or {value} not in {values}"
        schema_type = "SymInt" if constants["kind"] is int else "bool"
        return schema_type, Codec(note, refuse, constants=constants, expected=expected)
    return "SymInt", Codec(
        f"{note}, by index",
        "({type}({value}), {value}) not in {pairs}",
        "{pairs}.index(({type}({value}), {value}))",
        "({values}[{value}] if {value} in {indices} else {reject}({value}))",
        {
            "values": values,
            "indices": range(len(values)),
            "pairs": tuple((type(value), value) for value in values),
            "type": type,
        },
        expected,
    )


def enumeration(cls: type[enum.Enum]) -> tuple[str, Codec]:
    """The schema type and the codec of an Enum: by value if all values are strings, otherwise by name.

    A Flag by its bits, which the caller may pass too. A class may override `name` and `value`, so they are read as
    `_name_` and `_value_`.
    """
    members = tuple(cls.__members__.values())
    shown = ", ".join(map(show_literal, members))
    if issubclass(cls, enum.Flag):
        refuse = "{type}({value}) is not {cls} and {type}({value}) is not {int}"
        encode = "({value}._value_ if {type}({value}) is {cls} else {value})"
        decode = "{read}({int}({value}), {reject})"
        named = {"cls": cls, "type": type, "int": int, "read": _reader(cls, ValueError)}
        expected = f"a {cls.__name__}, or the bits of one"
        return "SymInt", Codec(f"flag {cls.__name__}", refuse, encode, decode, named, expected)
    values = tuple(member._value_ for member in members)
    constants: dict[str, object] = {
        "cls": cls,
        "values": values,
        "kinds": tuple({type(value): None for value in values}),
        "type": type,
    }
    refuse = "{type}({value}) is not {cls} and ({type}({value}) not in {kinds} or {value} not in {values})"
    if all(type(value) is str for value in values):
        encode = "({value}._value_ if {type}({value}) is {cls} else {value})"
        by_text: dict[object, enum.Enum] = {member._value_: member for member in members}
    else:
        encode = "({value} if {type}({value}) is {cls} else {cls}({value}))._name_"
        by_text = {member._name_: member for member in members}
    constants["members"] = by_text
    note, expected = f"enum {cls.__name__}", f"one of {shown}, or the value of one"
    decode = "({members}[{value}] if {value} in {members} else {reject}({value}))"
    return "str", Codec(note, refuse, encode, decode, constants, expected)


def _reader(cls: Callable[[Any], Any], failure: type[Exception]) -> Callable[[Any, Callable[[object], None]], Any]:
    """A function that returns `cls(value)` for a value of the schema, and refuses it if that raises *failure*."""

    def read(value: Any, reject: Callable[[object], None]) -> Any:
        try:
            return cls(value)
        except failure:
            return reject(value)

    return read


def opaque(cls: type) -> Codec:
    """The codec of a class that torch passes on as it is; the dispatcher takes any object for one."""
    constants = {"isinstance": isinstance, "cls": cls}
    return Codec("opaque", "not {isinstance}({value}, {cls})", constants=constants, expected=f"a {cls.__name__}")


def torch_constant_text(kind: type) -> Codec:
    """The codec of a list element of *kind*, a dtype, device, layout or memory_format, written as text.

    `ScalarType[]`, `Device[]` and `Layout[]` arguments fail torch.export.save on torch 2.13; `str[]` does not.
    """
    note, refuse = show_type(kind), "not {isinstance}({value}, {kinds})"
    # The dispatcher accepts a string for one device, so a list of devices accepts strings too.
    kinds = (kind, str) if kind is torch.device else (kind,)
    constants: dict[str, object] = {"str": str, "kind": kind, "kinds": kinds, "isinstance": isinstance}
    if kind is torch.device:
        constants["read"] = _reader(torch.device, RuntimeError)
        return Codec(note, refuse, "{str}({value})", "{read}({value}, {reject})", constants, "a torch.device")
    constants["named"] = {str(value): value for value in vars(torch).values() if type(value) is kind}
    decode = "({named}[{value}] if {value} in {named} else {reject}({value}))"
    return Codec(note, refuse, "{str}({value})", decode, constants, f"a torch.{note}")


def _read_number(text: str) -> complex | bool:
    for read in (_BOOLS.__getitem__, int, float, complex):
        try:
            return read(text)
        except (KeyError, ValueError):
            continue
    raise AssertionError(text)


NUMBER_TEXT = Codec(
    "number", "", "{repr}({value})", "{read_number}({value})", {"repr": repr, "read_number": _read_number}
)
"""An int, float, bool or complex as text, exact in both directions."""


def optional(codec: Codec) -> Codec:
    """*codec* for `T | None` in one leaf: None stays None."""
    if codec == IDENTITY:
        return codec
    return replace(
        codec,
        refuse=f"{{value}} is not None and ({codec.refuse})" if codec.refuse else "",
        encode=codec.encode if codec.keeps_value else f"(None if {{value}} is None else {codec.encode})",
        decode=codec.decode if codec.decode == "{value}" else f"(None if {{value}} is None else {codec.decode})",
        described=codec.described and f"(None if {{value}} is None else {codec.described})",
        expected=f"{codec.expected.removesuffix(', or None')}, or None" if codec.expected else "",
    )


def listed(codec: Codec, *, as_tuple: bool) -> Codec:
    """*codec* for every element of a list, or of a `tuple[T, ...]`."""
    if codec == IDENTITY:
        return AS_TUPLE if as_tuple else codec
    # Every codec that converts or refuses values says what it expects.
    assert codec.refuse
    assert codec.expected
    refused, encode, decode = (text.replace("{value}", "item") for text in (codec.refuse, codec.encode, codec.decode))
    described = codec.described and _each(codec.described.replace("{value}", "item"), as_tuple=as_tuple)
    return replace(
        codec,
        refuse=f"not {{isinstance}}({{value}}, {{sequence}}) or {{any}}({refused} for item in {{value}})",
        encode="{value}" if encode == "item" else f"[{encode} for item in {{value}}]",
        decode=_each(decode, as_tuple=as_tuple),
        described=described,
        constants={**codec.constants, "any": any, "tuple": tuple, "isinstance": isinstance, "sequence": SEQUENCE},
        expected=f"a {'tuple' if as_tuple else 'list'} with each item {codec.expected}",
    )


def _each(text: str, *, as_tuple: bool) -> str:
    """*text*, an expression of `item`, for each item of the value."""
    items = "{value}" if text == "item" else f"[{text} for item in {{value}}]"
    return f"{{tuple}}({items})" if as_tuple else items
