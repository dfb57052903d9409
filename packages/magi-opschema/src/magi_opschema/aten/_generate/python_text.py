# SPDX-License-Identifier: Apache-2.0
"""Schema types and defaults as Python source."""

from __future__ import annotations

import ast
import re

from magi_opschema.aten.errors import SchemaTypeError

from .schema import Parameter, Return, Type


_ANNOTATIONS = {
    "Device": "Device",
    "Dimname": "str",
    "Generator": "Generator",
    "Layout": "layout",
    "MemoryFormat": "memory_format",
    "Scalar": "Scalar",
    "ScalarType": "dtype",
    "Storage": "UntypedStorage",
    "Stream": "Stream",
    "SymBool": "bool | SymBool",
    "SymInt": "int | SymInt",
    "Tensor": "Tensor",
    "bool": "bool",
    "float": "float",
    "int": "int",
    "str": "str",
}

_RUNTIME_KINDS = {
    "Dimname": "STR",  # up to torch 2.12
    "Scalar": "NUMBER",
    "ScalarType": "DTYPE",
    "SymInt": "INT",
    "Tensor": "TENSOR",
    "bool": "BOOL",
    "float": "FLOAT",
    "int": "INT",
    "str": "STR",
}

_SYMBOLS = {
    "Mean": "1",  # at::Reduction::Mean, in ATen/core/Reduction.h
    "Sum": "2",
    "contiguous_format": "torch.contiguous_format",
    "long": "torch.int64",
}


def annotation(type_: Type) -> str:
    """The Python annotation of a schema type: `int[2]?` is `int | Sequence[int] | None`.

    Raises:
        SchemaTypeError: The installed torch uses a type that this package does not know.
    """
    element = Type(type_.element)
    if element.text.removesuffix("?") not in _ANNOTATIONS and not element.is_list:
        msg = f"schema type {type_.text!r} has no Python annotation here; magi-opschema is older than this torch"
        raise SchemaTypeError(msg)
    if not type_.is_list:
        text = _ANNOTATIONS[element.text]
    else:
        inner = annotation(element)
        text = f"{inner} | Sequence[{inner}]" if type_.sized else f"Sequence[{inner}]"
    return f"{text} | None" if type_.optional else text


def union(types: tuple[Type, ...]) -> str:
    """The annotation of a parameter that has different types in different overloads."""
    parts = [part for type_ in types for part in _split_union(annotation(type_))]
    unique = list(dict.fromkeys(part for part in parts if part != "None"))
    return " | ".join([*unique, "None"] if "None" in parts else unique)


def runtime_kind(type_: Type) -> str:
    """The name of the runtime's check for a type, for example `maybe(INT)`."""
    of_lists = "INT_OR_LIST" if type_.sized else "LIST"
    kind = of_lists if type_.is_list else _RUNTIME_KINDS.get(type_.element, "ANY")
    return f"maybe({kind})" if type_.optional else kind


def default_text(default: str) -> str:
    """A schema default as a Python expression: `[-2,-1]` is `(-2, -1)`, `Mean` is `1`."""
    if default in _SYMBOLS:
        return _SYMBOLS[default]
    if default.startswith("["):
        return repr(tuple(ast.literal_eval(default)))
    if default[0] in "'\"":
        return '"' + default[1:-1] + '"'
    ast.literal_eval(default)
    return default


def default_of(parameter: Parameter) -> str:
    """The Python text of an optional parameter's own default.

    The dispatcher repeats a single number for an `int[2]`, but not for a `SymInt[2]`, whose default is written in full.
    """
    text = default_text(str(parameter.default))
    type_ = parameter.type
    if type_.length and not type_.sized and re.fullmatch(r"-?\d+", text):
        return repr((int(text),) * type_.length)
    return text


def returns_text(returns: tuple[Return, ...], out_count: int) -> str:
    """The annotation of the result of a variant."""
    if out_count == 0:
        return "list[Tensor]"
    annotations = [annotation(r.type) for r in returns] or ["Tensor"] * out_count
    return annotations[0] if len(annotations) == 1 else f"tuple[{', '.join(annotations)}]"


def out_text(out_count: int) -> str:
    """The annotation of `out=` without its None."""
    if out_count == 0:
        return "Sequence[Tensor]"
    return "Tensor" if out_count == 1 else f"tuple[{', '.join(['Tensor'] * out_count)}]"


def _split_union(text: str) -> list[str]:
    return re.split(r" \| (?![^\[]*\])", text)
