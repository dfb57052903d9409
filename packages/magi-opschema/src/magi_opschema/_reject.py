# SPDX-License-Identifier: Apache-2.0
"""What generated code calls with a value that the signature refuses."""

from __future__ import annotations

import reprlib
from collections.abc import Callable

from ._emit import Reject
from ._tree import Leaf, MaskedList, Node, Optional, Sequence, dotted
from .errors import ArgumentError, ArgumentValueError, OpSchemaError


def rejections(function: str, location: str, *, returned: type[OpSchemaError] | None = None, of: str = "") -> Reject:
    """Makes the reject functions of one op.

    Args:
        function: the op's name in errors.
        location: where it is defined.
        returned: the error class where the value is the body's output.
        of: what stands before the path in errors.
    """

    def reject_for(node: Node | None) -> Callable[[object], None]:
        path, expected = ("output", "None") if node is None else (dotted(node.path), _expected(node))
        error = returned or (ArgumentValueError if isinstance(node, Leaf) else ArgumentError)
        explain = node.codec.explain if isinstance(node, Leaf) else None

        def reject(value: object) -> None:
            if explain is not None:
                explained, text = explain(value, expected)
                raise explained(f"{function}(): {of}'{path}' {text} ({location})")
            shown = f"{reprlib.repr(value)} ({type(value).__name__})"
            raise error(f"{function}(): {of}'{path}' is {shown}, expected {expected}. ({location})")

        return reject

    return reject_for


def _expected(node: Node) -> str:
    match node:
        case Leaf():
            return node.codec.expected
        case Sequence():
            return f"a tuple of {len(node.items)}, {node.label}"
        case Optional():
            return f"{_expected(node.inner)}, or None"
        case MaskedList():
            return node.label
    if node.kind == "typeddict":
        return f"a dict with exactly the keys {', '.join(repr(part.name) for part in node.fields)}"
    return f"a {node.cls.__name__}, not a subclass or a look-alike, because the op rebuilds it from its fields"
