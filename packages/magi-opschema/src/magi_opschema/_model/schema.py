# SPDX-License-Identifier: Apache-2.0
"""The flat schema: its arguments and its text, and tuples of flat arguments at run time.

    arguments  as the schema has them         x, packed_Tensor=[a, b], packed_float=[1.0, ...]
    slots      each Tensor leaf separate    x, a, b, packed_float=[1.0, ...]
    spread     each Tensor separate, also those of the user's lists, as autograd.Function requires

Only ops with more than 64 leaves have slots that differ from their arguments.
"""

from __future__ import annotations

import math
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from .tree import IDENTITY, Codec, Leaf, dotted


Flat = tuple[Any, ...]

MAX_ARGUMENTS = 64
"""The largest number of arguments of a schema (c10, `KernelFunction` argument limit)."""

NO_DEFAULT = object()

SCHEMA_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "Tensor": ("a Tensor", (torch.Tensor,)),
    "SymInt": ("an int of 64 bits", (int, torch.SymInt)),
    "float": ("a float", (float, int, torch.SymFloat, torch.SymInt)),
    "bool": ("a bool", (bool, torch.SymBool)),
    "str": ("a str", (str,)),
    "complex": ("a complex", (complex, float, int)),
    "Scalar": ("a number", (int, float, complex)),
    "ScalarType": ("a torch.dtype", (torch.dtype,)),
    "Device": ("a torch.device", (torch.device, str)),
    "Layout": ("a torch.layout", (torch.layout,)),
    "MemoryFormat": ("a torch.memory_format", (torch.memory_format,)),
    "Generator": ("a torch.Generator", (torch.Generator,)),
}
"""A value of each schema type in words, and the classes of those that the dispatcher accepts; the first is that of its
annotation."""

_INT64 = range(-(2**63), 2**63)


def schema_type_of(cls: type, name: str) -> str:
    """*name*, which torch gave to the schema type of an opaque class, known to this module from now on."""
    SCHEMA_TYPES[name] = (f"a {cls.__name__}", (cls,))
    return name


def python_type(schema_type: str) -> Any:
    """The annotation that torch.library.infer_schema reads as *schema_type*: `list[float]` for `float[]`."""
    if schema_type.endswith("?"):
        return typing.Optional[python_type(schema_type[:-1])]  # noqa: UP045  (infer_schema knows no other spelling)
    if schema_type.endswith("[]"):
        return list[python_type(schema_type[:-2])]  # type: ignore[misc]
    return torch.types.Number if schema_type == "Scalar" else SCHEMA_TYPES[schema_type][1][0]


@dataclass(frozen=True)
class Packing:
    """How leaves share a list argument, as texts of generated code.

    `{value}` stands for the value of a leaf, `{list}` for the argument, `{i}` for the place of the leaf in it, `{rest}`
    for an iterator of it, `{encoded}` and `{decoded}` for what *codec* makes of the value and of the item.
    """

    item: str = "{value}"
    whole: str = "[{items}]"
    head: str = ""
    """The line before the leaves are read."""
    read: str = ""
    """The value of a leaf, read from the list."""
    kinds: tuple[type, ...] = ()
    """The classes of values that are accepted, if the dispatcher cannot check the packed ones."""
    codec: Codec = IDENTITY

    @property
    def holds_values(self) -> bool:
        """True if the argument holds the leaves; False if it only says how to read the argument that holds them."""
        return bool(self.head or self.read)


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

    @property
    def bundled(self) -> tuple[Leaf, ...]:
        """The Tensors that share the argument; empty if it holds one leaf, or other values."""
        return self.leaves if self.packing is not None and self.schema_type == "Tensor[]" else ()

    @property
    def is_mask(self) -> bool:
        """True for the argument after a bundle that says which of its Tensors are there."""
        return self.packing is not None and self.schema_type == "bool[]" and self.leaves[0].is_tensor

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
        if argument.bundled:
            slots += [Argument(leaf.name, leaf.schema_type, (leaf,), alias=argument.alias) for leaf in argument.leaves]
        elif not argument.is_mask:
            slots.append(argument)
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
    _, classes = SCHEMA_TYPES[kind]
    return isinstance(value, classes) and not (kind == "SymInt" and type(value) is int and value not in _INT64)


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
        case "float", (int() | float()) if type(value) in {int, float} and math.isfinite(float(value)):
            number = float(value)
            return repr(number) if number == 0 or abs(number) >= sys.float_info.min else None
        case "str", str() if type(value) is str and value.isascii() and value.isprintable():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        case "ScalarType", torch.dtype():
            return str(value).removeprefix("torch.")
        case "Device", torch.device():
            return f'"{value}"'
        case (("Layout" | "MemoryFormat"), (torch.strided | torch.contiguous_format)):
            return str(value).removeprefix("torch.")
    return None


@dataclass(frozen=True)
class FlatLayout:
    """Positions of one op's slots, or of its flat outputs."""

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    keyword_only: tuple[str, ...]
    tensor_lists: tuple[int, ...]
    """Positions of `Tensor[]` and `Tensor[]?`, in which autograd.Function does not look for Tensors."""
    bundles: tuple[Argument, ...] = ()
    """The arguments of an op of which some are bundles; empty for an op whose slots are its arguments."""
    mutated: Mapping[int, str] = field(default_factory=dict)
    """The dotted path of each slot that the op writes into, by position."""

    @staticmethod
    def of(arguments: Sequence[Argument]) -> FlatLayout:
        slots = slots_of(arguments)
        return FlatLayout(
            tuple(slot.name for slot in slots),
            tuple(slot.default for slot in slots),
            tuple(slot.name for slot in slots if slot.is_keyword_only),
            tuple(i for i, slot in enumerate(slots) if slot.schema_type.startswith("Tensor[]")),
            tuple(arguments) if any(argument.bundled for argument in arguments) else (),
            {i: dotted(slot.leaves[0].path) for i, slot in enumerate(slots) if slot.alias},
        )

    def fill(self, args: Flat, kwargs: dict[str, Any]) -> Flat:
        """All slots by position, with the defaults of arguments that the dispatcher left out."""
        if self.bundles:
            return self.open(args)
        missing = len(self.names) - len(args)
        if not missing:
            return args
        rest = zip(self.names[-missing:], self.defaults[-missing:], strict=True)
        return (*args, *(kwargs.get(name, default) for name, default in rest))

    def call(self, op: Callable[..., Any], flat: Flat) -> Any:
        """Call *op* with the slots, as arguments by position and keyword-only ones by name."""
        return self.apply(op, self._close(flat) if self.bundles else flat)

    def apply(self, op: Callable[..., Any], flat: Flat) -> Any:
        """Call *op* with all arguments; no op has both bundles and keyword-only arguments."""
        if not self.keyword_only:
            return op(*flat)
        split = len(flat) - len(self.keyword_only)
        return op(*flat[:split], **dict(zip(self.keyword_only, flat[split:], strict=True)))

    def open(self, arguments: Flat, masks: Flat | None = None) -> Flat:
        """*arguments*, with an entry for each argument, as one for each slot; *masks* says which are there."""
        if not self.bundles:
            return arguments
        slots: list[Any] = []
        for i, (argument, said) in enumerate(zip(self.bundles, arguments, strict=False)):
            if not argument.bundled:
                slots += [] if argument.is_mask else [said]
            elif i + 1 < len(self.bundles) and self.bundles[i + 1].is_mask:
                items = iter(said or ())
                present = (arguments if masks is None else masks)[i + 1]
                slots += [next(items, None) if there else None for there in present]
            else:
                slots += [None] * len(argument.leaves) if said is None else said
        return tuple(slots)

    def _close(self, slots: Flat) -> Flat:
        """The inverse of `open`."""
        by_name = dict(zip(self.names, slots, strict=True))
        arguments: list[Any] = []
        for argument in self.bundles:
            if argument.is_mask:
                arguments.append([by_name[leaf.name] is not None for leaf in argument.leaves])
            elif argument.bundled:
                tensors = [by_name[leaf.name] for leaf in argument.leaves]
                arguments.append([tensor for tensor in tensors if tensor is not None])
            else:
                arguments.append(by_name[argument.name])
        return tuple(arguments)

    def spread(self, flat: Flat) -> Flat:
        """*flat* with each Tensor separate: `(x, [a, b], 3)` as `((2,), x, a, b, 3)`; unchanged if there is no list."""
        if not self.tensor_lists:
            return flat
        counts = tuple(None if flat[i] is None else len(flat[i]) for i in self.tensor_lists)
        items = list(flat)
        for i in reversed(self.tensor_lists):
            items[i : i + 1] = flat[i] or ()
        return (counts, *items)

    def gather(self, spread: Flat, counts: tuple[int | None, ...] | None = None) -> Flat:
        """The inverse of `spread`; *counts* are given if the first item does not hold them, as for gradients."""
        if not self.tensor_lists:
            return spread
        flat = list(spread[1:])
        for i, count in zip(self.tensor_lists, spread[0] if counts is None else counts, strict=True):
            flat[i : i + (count or 0)] = [None if count is None else flat[i : i + count]]
        return tuple(flat)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The Tensors of a value, which may be a list, a tuple, a dict or a dataclass of others."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, part.name) for part in fields(value)])


def as_tuple(output: Any, count: int) -> Flat:
    """*output*, the output of an op with *count* outputs, as a tuple."""
    if count == 0:
        return ()
    return (output,) if count == 1 else tuple(output)


def as_output(flat: Flat) -> Any:
    """The inverse of `as_tuple`."""
    if not flat:
        return None
    return flat[0] if len(flat) == 1 else flat
