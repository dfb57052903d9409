# SPDX-License-Identifier: Apache-2.0
"""Calls that pass the handle of an object that would be taken apart.

In eager code, the object is looked up. A compiler cannot do that, so under a compiler such a call goes to the opaque
form of the op.
"""

from __future__ import annotations

from collections.abc import Iterator

from magi_opschema._model.tree import Leaf, Node, Optional, Record, Sequence, nodes

from .nodes import class_name, read
from .writer import Writer


def write_found_objects(node: Node, value: str, to: Writer, is_dynamo_compiling: str) -> None:
    """Write the lookup of an object whose handle an eager call passes, if *node* is an object or an optional one."""
    found = node.inner if isinstance(node, Optional) else node
    if isinstance(found, Record) and found.handle is not None:
        with to.block(f"if not {is_dynamo_compiling}() and {to.builtin('isinstance')}({value}, {to.builtin('int')}):"):
            to.line(f"{value} = {to.expression(found.handle, found.handle.codec.decode, value)}")


def handle_conditions(node: Node, value: str, to: Writer) -> Iterator[str]:
    """Conditions under which *value* is, or holds, a handle instead of an object."""
    if not any(isinstance(part, Record) and part.handle is not None for part in nodes(node)):
        return
    match node:
        case Record(handle=Leaf() as leaf):
            # Dynamo sees a symbolic int as an int, and has no stand-ins for objects. A class that two ops name is
            # compared at every call, in Python.
            asked = "({isinstance}({value}, {int}) if {is_dynamo_compiling}() else {isinstance}({value}, {handles}))"
            yield to.expression(leaf, asked, value)
        case Record():
            is_one = f"{to.builtin('type')}({value}) is {class_name(node, to)}"
            if node.kind == "typeddict":
                keys = to.bind(f"keys_of_{node.cls.__name__}", {part.name for part in node.fields})
                is_one = f"{to.builtin('isinstance')}({value}, {to.builtin('dict')}) and {value}.keys() == {keys}"
            for part in node.fields:
                yield from _within(is_one, handle_conditions(part.node, read(node, value, part.name, to), to))
        case Sequence():
            count = f"{to.builtin('len')}({value}) == {len(node.items)}"
            is_one = f"{to.builtin('isinstance')}({value}, {to.builtin('tuple')}) and {count}"
            for i, item in enumerate(node.items):
                yield from _within(is_one, handle_conditions(item, f"{value}[{i}]", to))
        case Optional():
            yield from handle_conditions(node.inner, value, to)


def _within(outer: str, inner: Iterator[str]) -> Iterator[str]:
    return (f"{outer} and {condition}" for condition in inner)
