# SPDX-License-Identifier: Apache-2.0
"""Values that the signature refuses: the conditions in generated code, and what it calls then.

The exposed function has checked most values, but `torch.ops.namespace.op` can be called with any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

from magi_opschema._model.tree import Leaf, ListOrTuple, MaskedList, Node, Optional, Record, Sequence, dotted
from magi_opschema._text import show_with_type
from magi_opschema._torch_compat import is_dynamo_compiling
from magi_opschema.errors import ArgumentError, ArgumentValueError, OpSchemaError

from .source import Reject, Writer


if TYPE_CHECKING:
    from magi_opschema._model.lowering import SignatureTrees


def writer_of(
    trees: SignatureTrees,
    *,
    returned: type[OpSchemaError] | None = None,
    of: str = "",
    is_traced: bool = False,
    is_description: bool = False,
) -> Writer:
    """A writer of one function of an op. *returned* and *of* are those of `rejections`."""
    rejects = rejections(trees.title, trees.location, returned=returned, of=of)
    return Writer(trees.prefix, rejects, trees.title, trees.location, is_traced, is_description)


def rejections(function: str, location: str, *, returned: type[OpSchemaError] | None = None, of: str = "") -> Reject:
    """A function that makes the reject functions of one op.

    Args:
        function: what errors begin with, the title of the lowering.
        location: where it is defined.
        returned: the error class if the value is the body's output.
        of: what stands before the path in errors.
    """

    def reject_for(node: Node | None) -> Callable[[object], None]:
        path, expected = ("output", "None") if node is None else (dotted(node.path), _expected(node))
        is_value = isinstance(node, Leaf) and bool(node.codec.expected)
        error = returned or (ArgumentValueError if is_value else ArgumentError)
        refusal = node.codec.refusal if isinstance(node, Leaf) else None

        def reject(value: object) -> None:
            if refusal is not None:
                error_class, text = refusal(value, expected)
                raise error_class(f"{function}: {of}'{path}' {text} ({location})")
            raise error(f"{function}: {of}'{path}' is {_shown(value)}, expected {expected}. ({location})")

        return reject

    return reject_for


def _shown(value: object) -> str:
    name = type(value).__name__
    if is_dynamo_compiling():  # Dynamo traces this too, and supports the repr of constants only.
        return f"{value!r} ({name})" if isinstance(value, (str, int, float, type(None))) else f"of class {name}"
    return show_with_type(value)


_CLASSES = {
    "Tensor": "a Tensor",
    "SymInt": "an int of 64 bits",
    "float": "a float",
    "bool": "a bool",
    "str": "a str",
    "complex": "a complex",
    "Scalar": "a number",
    "ScalarType": "a torch.dtype",
    "Device": "a torch.device",
    "Layout": "a torch.layout",
    "MemoryFormat": "a torch.memory_format",
    "Generator": "a torch.Generator",
}


def _class_of(schema_type: str) -> str:
    """The words for a value of *schema_type*: `a list with each item a float, or None` for `float[]?`."""
    base = schema_type.removesuffix("?")
    kind = base.removesuffix("[]")
    text = _CLASSES[kind] if kind == base else f"a list with each item {_CLASSES[kind]}"
    return text if base == schema_type else f"{text}, or None"


def _expected(node: Node) -> str:
    match node:
        case Leaf():
            schema_type = node.schema_type.removesuffix("?") if node.is_padded else node.schema_type
            return node.codec.expected or _class_of(schema_type)
        case Sequence():
            return f"a tuple of {len(node.items)}, {node.label}"
        case Optional():
            return f"{_expected(node.inner)}, or None"
        case ListOrTuple():
            return f"a list or a tuple, {node.label}"
        case MaskedList():
            return node.label
    if node.kind == "typeddict":
        return f"a dict with exactly the keys {', '.join(repr(part.name) for part in node.fields)}"
    text = f"a {node.cls.__name__}, not a subclass or a look-alike, because the op rebuilds it from its fields"
    return f"{text}; or the handle that register_object() gave for one" if node.handle is not None else text


Refusal = tuple[Leaf, str]
"""A leaf, and the condition under which its value is refused."""


def refusals_of(node: Node, to: Writer, *, are_real: bool) -> Iterator[Refusal]:
    """The leaves of *node*, each with the condition under which its value is refused, as code with flat names.

    A number may be symbolic unless *are_real*, and a symbol is not of the class that it stands for.
    """
    match node:
        case Leaf():
            yield from _of_leaf(node, to, are_real=are_real)
        case Record():
            for part in node.fields:
                yield from refusals_of(part.node, to, are_real=are_real)
        case Sequence():
            for item in node.items:
                yield from refusals_of(item, to, are_real=are_real)
        case ListOrTuple():
            yield from refusals_of(node.is_tuple, to, are_real=are_real)
            yield from refusals_of(node.inner, to, are_real=are_real)
        case MaskedList():
            yield from _of_leaf(node.values, to, are_real=are_real)
            yield from _of_leaf(node.present, to, are_real=are_real)
        case Optional():
            for leaf, condition in refusals_of(node.inner, to, are_real=are_real):
                yield leaf, f"{node.is_some.name} and {condition}"


def write_refusals(refusals: Iterator[Refusal], to: Writer) -> None:
    """Write the check of each leaf on its own, with an error about it."""
    for leaf, condition in refusals:
        with to.block(f"if {condition}:"):
            to.line(f"{to.bind(f'reject_{leaf.name}', to.reject(leaf))}({leaf.name})")


def write_readings(node: Node, to: Writer, condition: str = "") -> None:
    """Write lines that decode each encoded value, which raise the error about one that cannot be decoded."""
    match node:
        case Leaf():
            codec = node.codec
            if codec.described or "{reject}" not in codec.decode:
                return
            text = to.expression(node, codec.decode, node.name)
            asked = [condition, "" if node.schema_type.startswith("str") else _is_no_symbol(node, to)]
            conditions = " and ".join(filter(None, asked))
            with to.block(f"if {conditions}:") if conditions else nullcontext():
                to.line(text)
        case Record():
            for part in node.fields:
                write_readings(part.node, to, condition)
        case Sequence():
            for item in node.items:
                write_readings(item, to, condition)
        case Optional():
            write_readings(node.inner, to, " and ".join(filter(None, (condition, node.is_some.name))))
        case ListOrTuple():
            write_readings(node.inner, to, condition)
        case MaskedList():
            pass


def _of_leaf(leaf: Leaf, to: Writer, *, are_real: bool) -> Iterator[Refusal]:
    if leaf.refuses_none:
        yield leaf, f"{leaf.name} is None"
    # An encoded value is refused where it is decoded.
    if leaf.codec.keeps_value and leaf.codec.refuse:
        condition = to.expression(leaf, leaf.codec.refuse, leaf.name)
        if are_real or leaf.schema_type.startswith("str"):
            yield leaf, f"({condition})"
        else:
            yield leaf, f"{_is_no_symbol(leaf, to)} and ({condition})"


def _is_no_symbol(leaf: Leaf, to: Writer) -> str:
    type_, numbers = to.builtin("type"), to.bind("numbers", (int, bool))
    if leaf.is_list:
        return f"{to.builtin('all')}([{type_}(item) in {numbers} for item in {leaf.name} or ()])"
    return f"{type_}({leaf.name}) in {numbers}"
