# SPDX-License-Identifier: Apache-2.0
"""Schema text: arguments, aliasing marks, and the defaults that torch's schema parser takes."""

from __future__ import annotations

import math
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .tree import Leaf


MAX_ARGUMENTS = 64
"""The largest number of arguments of a schema (c10, `KernelFunction` argument limit)."""

NO_DEFAULT = object()

_VALUES: dict[str, tuple[type, ...]] = {
    "Tensor": (torch.Tensor,),
    "SymInt": (int, torch.SymInt),
    "float": (float, int, torch.SymFloat, torch.SymInt),
    "bool": (bool, torch.SymBool),
    "str": (str,),
    "complex": (complex, float, int),
    "Scalar": (int, float, complex),
    "ScalarType": (torch.dtype,),
    "Device": (torch.device, str),
    "Layout": (torch.layout,),
    "MemoryFormat": (torch.memory_format,),
    "Generator": (torch.Generator,),
}
_INT64 = range(-(2**63), 2**63)
_LAYOUTS = {torch.strided: "strided"}
_MEMORY_FORMATS = {torch.contiguous_format: "contiguous_format"}


def python_type(schema_type: str) -> Any:
    """The annotation that torch.library.infer_schema reads as *schema_type*: `list[float]` for `float[]`."""
    if schema_type.endswith("?"):
        return typing.Optional[python_type(schema_type[:-1])]  # noqa: UP045  (infer_schema knows no other spelling)
    if schema_type.endswith("[]"):
        return list[python_type(schema_type[:-2])]  # type: ignore[misc]
    return torch.types.Number if schema_type == "Scalar" else _VALUES[schema_type][0]


class Packing(Protocol):
    """How an argument holds several leaves, as text of generated code; *to* is the writer of that code."""

    @property
    def holds_values(self) -> bool:
        """True if the argument holds the leaves; False if it only says how to read the argument that holds them."""

    def pack(self, argument: Argument, exprs: Sequence[str], to: Any) -> str:
        """An expression for the argument, made from one expression for each leaf."""

    def unpack(self, argument: Argument, to: Any) -> None:
        """Write the lines that give each leaf its name again."""


@dataclass(frozen=True)
class Argument:
    """One argument of the flat schema: one leaf, or several of one kind packed into a list."""

    name: str
    schema_type: str
    leaves: tuple[Leaf, ...]
    default: object = NO_DEFAULT
    alias: str = ""
    is_keyword_only: bool = False
    packing: Packing | None = None

    @property
    def has_default(self) -> bool:
        """True if the schema has a default for it."""
        return self.default is not NO_DEFAULT

    def pack(self, exprs: Sequence[str], to: Any) -> str:
        """The argument as an expression of its leaves' expressions."""
        return exprs[0] if self.packing is None else self.packing.pack(self, exprs, to)

    def unpack(self, to: Any) -> None:
        """Write the lines that give each leaf its name again."""
        if self.packing is not None:
            self.packing.unpack(self, to)

    @property
    def is_bundle(self) -> bool:
        """True for several Tensors in one list, and for the argument that says which of them are there."""
        return self.packing is not None and self.leaves[0].is_tensor

    @property
    def text(self) -> str:
        """The argument as the schema spells it: `Tensor(a0!) out`, `float eps=1e-06`."""
        spelled = self.schema_type.replace("Tensor", f"Tensor({self.alias}!)", 1) if self.alias else self.schema_type
        if not self.has_default:
            return f"{spelled} {self.name}"
        return f"{spelled} {self.name}={default_text(self.schema_type, self.default)}"


def slots_of(arguments: Sequence[Argument]) -> tuple[Argument, ...]:
    """*arguments* with each Tensor of a bundle as a separate argument, as autograd and the rules see them."""
    slots: list[Argument] = []
    for argument in arguments:
        if not argument.is_bundle:
            slots.append(argument)
        elif argument.schema_type == "Tensor[]":
            slots += [Argument(leaf.name, leaf.schema_type, (leaf,), alias=argument.alias) for leaf in argument.leaves]
    return tuple(slots)


def schema_text(name: str, arguments: tuple[Argument, ...], return_types: tuple[str, ...]) -> str:
    """The schema: `norm(Tensor x, float eps=1e-06) -> Tensor`."""
    spelled: list[str] = []
    for argument in arguments:
        if argument.is_keyword_only and "*" not in spelled:
            spelled.append("*")
        spelled.append(argument.text)
    returned = return_types[0] if len(return_types) == 1 else f"({', '.join(return_types)})"
    return f"{name}({', '.join(spelled)}) -> {returned}"


def takes(schema_type: str, value: object) -> bool:
    """True if the dispatcher accepts *value* for an argument of *schema_type*."""
    kind = schema_type.removesuffix("?")
    if value is None:
        return kind != schema_type
    if kind.endswith("[]"):
        return isinstance(value, (list, tuple)) and all(takes(kind[:-2], item) for item in value)
    return isinstance(value, _VALUES[kind]) and not (kind == "SymInt" and type(value) is int and value not in _INT64)


def default_text(schema_type: str, value: object) -> str | None:
    """*value* as text that the schema parser of torch 2.10 to 2.15 reads back as *value*; None if there is none.

    The parser does not support inf, nan, subnormal floats, lists of bools or strings, lists that may be None, complex
    numbers with a real part, or most layouts and memory formats (torch/csrc/jit/frontend/function_schema_parser.cpp).
    """
    if value is None:
        return "None" if schema_type.endswith("?") else None
    kind = schema_type.removesuffix("?")
    if kind.endswith("[]"):
        if schema_type not in {"SymInt[]", "float[]"} or not isinstance(value, (list, tuple)):
            return None
        items = [default_text(kind[:-2], item) for item in value]
        return None if None in items else f"[{', '.join(map(str, items))}]"
    return _scalar_text(kind, value)


def _scalar_text(kind: str, value: object) -> str | None:
    match kind, value:
        case (("bool" | "Scalar"), bool()):
            return str(value)
        case "SymInt", int() if type(value) is int and value in _INT64:
            return str(value)
        case "Scalar", (int() | float()) if type(value) in {int, float}:
            return default_text("SymInt" if type(value) is int else "float", value)
        case "float", (int() | float()) if type(value) in {int, float} and _parses(float(value)):
            return repr(float(value))
        case "str", str() if type(value) is str and value.isascii() and value.isprintable():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        case "ScalarType", torch.dtype():
            return str(value).removeprefix("torch.")
        case "Device", torch.device():
            return f'"{value}"'
        case "Layout", torch.layout():
            return _LAYOUTS.get(value)
        case "MemoryFormat", torch.memory_format():
            return _MEMORY_FORMATS.get(value)
    return None


def _parses(value: float) -> bool:
    return math.isfinite(value) and (value == 0 or abs(value) >= sys.float_info.min)
