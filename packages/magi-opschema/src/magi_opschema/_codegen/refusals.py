# SPDX-License-Identifier: Apache-2.0
"""Conditions under which the signature refuses flat values that the dispatcher accepts.

The exposed function has checked most of them, but `torch.ops.namespace.op` can be called with any values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

from magi_opschema._model.tree import Leaf, ListOrTuple, MaskedList, Node, Optional, Record, Sequence

from .writer import Writer


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
