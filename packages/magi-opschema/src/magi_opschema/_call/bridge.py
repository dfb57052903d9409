# SPDX-License-Identifier: Apache-2.0
"""Values, dims and placements carried between the user's signature and the flat one, outside the hot path.

The functions that take arguments apart and rebuild them are generated once for each op, at their first use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from magi_opschema._codegen.functions import compile_flatten, open_arguments, tuple_text
from magi_opschema._codegen.nodes import flatten, rebuild
from magi_opschema._codegen.source import Writer
from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.schema import Flat
from magi_opschema._model.tree import Leaf, ListOrTuple, MaskedList, Node, Optional, Record, Sequence, dotted, leaves
from magi_opschema._text import show_value
from magi_opschema.errors import ReturnValueError, RuleError


class FieldDict(dict[str, Any]):
    """A dict by field whose entries also read as attributes: `grads.y` is `grads["y"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def structure(lowering: SignatureLowering, flat: Flat) -> Any:
    """Flat outputs, or their gradients, in the structure of the user's return; a named tuple is a tuple."""
    node = lowering.returns
    if node is None:
        return None
    if isinstance(node, Leaf):
        return flat[0]  # most ops return one value, and every call with a gradient comes here
    names = [leaf.name for leaf in lowering.return_leaves]
    built = _structure(node, dict(zip(names, flat, strict=True)))
    return tuple(built.values()) if isinstance(node, Record) and node.kind == "namedtuple" else built


def _structure(node: Node, said: Mapping[str, Any]) -> Any:
    """*said*, by leaf name, in the structure of *node*: for a record, a dict by field."""
    match node:
        case Leaf():
            return said[node.name]
        case Record():
            return FieldDict({part.name: _structure(part.node, said) for part in node.fields})
        case Sequence():
            return tuple([_structure(item, said) for item in node.items])
        case Optional() | ListOrTuple():
            return _structure(node.inner, said)
        case MaskedList():
            return said[node.values.name]


def gradient_names(node: Node | None) -> tuple[str, ...]:
    """The names of the arguments of `backward_fn` after `ctx`: one for each item of a tuple return, otherwise one."""
    match node:
        case None:
            return ()
        case Sequence():
            return tuple(f"grad_{i}" for i in range(len(node.items)))
        case Record(kind="namedtuple"):
            return tuple(f"grad_{part.name}" for part in node.fields)
    return ("grad",)


@dataclass(frozen=True)
class Bridge:
    """Converts values, and properties of values, between the signature and the schema of one op."""

    lowering: SignatureLowering

    @functools.cached_property
    def rebuild(self) -> Callable[..., Flat]:
        """A function from the slots, all by position, to a tuple of the user's arguments."""
        lowering, to = self.lowering, Writer(self.lowering, is_description=True)
        open_arguments(lowering.slots, to)
        to.line(f"return {tuple_text([rebuild(parameter.node, to) for parameter in lowering.parameters])}")
        names = [slot.name for slot in lowering.slots]
        doc = f"Rebuild the arguments of {lowering.name}."
        return to.function(f"{lowering.name}_inputs", names, doc, f"inputs {lowering.name}")

    @functools.cached_property
    def flatten(self) -> Callable[..., Flat]:
        """A function from the user's arguments to a tuple of the flat ones."""
        lowering, to = self.lowering, Writer(self.lowering, is_description=True)
        return compile_flatten(lowering.parameters, to, f"flatten {lowering.name}", lowering.arguments)

    @functools.cached_property
    def flatten_output(self) -> Callable[[Any], Flat]:
        """A function from the user's return value to a tuple of the flat outputs."""
        if self.lowering.returns is None:
            return lambda _: ()
        to = Writer(self.lowering, returned=ReturnValueError)
        to.line(f"return {tuple_text(flatten(self.lowering.returns, 'output', to))}")
        return to.function("flatten_output", ["output"], "Take a return value apart.", f"output {self.lowering.name}")

    @functools.cached_property
    def rebuild_output(self) -> Callable[..., Any]:
        """A function from the flat outputs to the user's return value."""
        lowering, to = self.lowering, Writer(self.lowering, is_description=True)
        assert lowering.returns is not None
        to.line(f"return {rebuild(lowering.returns, to)}")
        names = [leaf.name for leaf in lowering.return_leaves]
        return to.function("rebuild_output", names, "Rebuild a return value.", f"returned {lowering.name}")

    def per_parameter(self, per_leaf: Flat) -> Flat:
        """*per_leaf*, with an entry for each slot, in the structure of the signature: for a record, a dict by field."""
        said = {
            leaf.name: value if argument.packing is None else None
            for argument, value in zip(self.lowering.slots, per_leaf, strict=True)
            for leaf in argument.leaves
        }
        return tuple(_structure(parameter.node, said) for parameter in self.lowering.parameters)

    def per_argument(self, per_parameter: Any, what: str) -> list[Any]:
        """The inverse of `per_parameter`: a list with an entry for each flat argument; raises a RuleError."""
        parameters = self.lowering.parameters
        if not isinstance(per_parameter, (list, tuple)) or len(per_parameter) != len(parameters):
            names = ", ".join(parameter.name for parameter in parameters)
            self.fail(f"{what} has no entry for each of ({names})")
        said: dict[str, Any] = {}
        for parameter, value in zip(parameters, per_parameter, strict=True):
            said |= self._take_apart(parameter.node, value, what)
        values: list[Any] = []
        for argument in self.lowering.arguments:
            if argument.bundled:
                values.append([said.get(leaf.name) for leaf in argument.leaves])
            else:
                values.append(None if argument.packing else said.get(argument.name))
        return values

    def per_output(self, structured: Any, what: str) -> list[Any]:
        """*structured* as a list with an entry for each flat output; a single value is used for all outputs."""
        if self.lowering.returns is None:
            return []
        said = self._take_apart(self.lowering.returns, structured, what)
        return [said.get(leaf.name) for leaf in self.lowering.return_leaves]

    def _take_apart(self, node: Node, value: Any, what: str) -> dict[str, Any]:
        match node:
            case Leaf():
                return {node.name: value}
            case Optional():
                return {} if value is None else self._take_apart(node.inner, value, what)
            case ListOrTuple():
                return self._take_apart(node.inner, value, what)
            case MaskedList():
                return {node.values.name: value}
            case Record():
                named = [(part.name, part.node) for part in node.fields]
            case Sequence():
                named = [(str(i), item) for i, item in enumerate(node.items)]
        if isinstance(value, Mapping):
            if unknown := [name for name in value if name not in dict(named)]:
                known = ", ".join(name for name, _ in named)
                self.fail(f"{what} for '{dotted(node.path)}' names {show_value(unknown[0])}; there are {known}")
            parts = [(part, value.get(name)) for name, part in named]
        elif isinstance(value, (tuple, list)):
            if len(value) != len(named):
                self.fail(f"{what} for '{dotted(node.path)}' has {len(value)} entries, expected {len(named)}")
            parts = [(part, item) for (_, part), item in zip(named, value, strict=True)]
        else:
            return {leaf.name: value for leaf in leaves(node)}
        said: dict[str, Any] = {}
        for part, item in parts:
            said |= self._take_apart(part, item, what)
        return said

    def fail(self, text: str) -> NoReturn:
        raise RuleError(self.lowering.sentence(f"{text}."))
