# SPDX-License-Identifier: Apache-2.0
"""The walk that follows the rows of a graph from its inputs to its outputs, by a rule for each operator.

It claims of each value: an entry that belongs to real rows in all of the dimensions in which rows lie is the same,
whatever the added rows hold and however many they are. What has no rule, or is refused by its rule, may mix rows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from magi_backend._torch_compat.nodes import called_name, overloads_of, schema_of
from magi_backend._verify.blame import described


class MixesRowsError(Exception):
    """An operator may mix rows. The message says which, where and why."""


@dataclass(frozen=True)
class Rows:
    """Where the rows lie in a tensor, and what is known of its entries.

    Attributes:
        inner: For each dimension with rows, how many neighbouring entries of it belong to one row. Its size is
            ``outer * rows * inner``.
        index: Factors of the dimensions: each entry is the sum of its indices times these, plus *offset*. That of
            ``arange(rows)`` is ``{0: 1}``. None if that is not known.
        offset: See *index*.
        number: The number that every entry is.
        added: The number that entries are in added rows of a dimension, and in real rows of the others.
        fresh: Whether added rows may hold values that no real row could hold.
    """

    inner: Mapping[int, Any] = field(default_factory=dict)
    index: Mapping[int, int] | None = None
    offset: int = 0
    number: Any = None
    added: Mapping[int, Any] = field(default_factory=dict)
    fresh: bool = False

    def moved(self, to: Mapping[int, int]) -> Rows:
        """With each dimension *d* at ``to[d]``, or left out if *to* lacks it."""
        return replace(
            self,
            inner={to[dim]: inner for dim, inner in self.inner.items() if dim in to},
            index=None
            if self.index is None or not self.index.keys() <= to.keys()
            else {to[d]: n for d, n in self.index.items()},
            added={to[dim]: number for dim, number in self.added.items() if dim in to},
        )

    def shifted(self, by: int) -> Rows:
        """With each dimension *by* further back."""
        return self.moved({dim: dim + by for dim in range(-by, 64)})


@dataclass(frozen=True)
class Found:
    """What a walk has found out.

    Attributes:
        inputs: Of each input in whose sizes the rows occur, by its place, the dimensions with rows, as in `Rows.inner`.
        outputs: The same of the outputs.
        numbers: The outputs that are the number of rows.
        written: The inputs with rows that the graph writes to.
        most: Up to how many rows there may be, and the operator that says so.
        draws: Whether random numbers are drawn for each row.
    """

    inputs: Mapping[int, Mapping[int, Any]] = field(default_factory=dict)
    outputs: Mapping[int, Mapping[int, Any]] = field(default_factory=dict)
    numbers: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()
    most: tuple[float, str] = (math.inf, "")
    draws: bool = False


def expression_of(number: Any) -> Any:
    """A size as an expression."""
    return number.node.expr if isinstance(number, torch.SymInt) else sympy.Integer(number)


def quotient(a: Any, b: Any) -> Any:
    """*a* over *b*; None if that is not whole for all sizes."""
    if b == 0:
        return None
    numerator, denominator = sympy.fraction(sympy.cancel(a / b))
    return numerator if denominator == 1 else None


def shape_of(node: Any) -> tuple[Any, ...]:
    return tuple(map(expression_of, value_of(node).shape))


def value_of(node: Any) -> Any:
    return node.meta.get("val")


def is_tensor(node: object) -> bool:
    return isinstance(node, Node) and isinstance(value_of(node), torch.Tensor)


def dims_named(dims: Any, rank: int) -> tuple[int, ...]:
    """*dims*, an argument of an operator, of a tensor with *rank* dimensions; all of them if it names none."""
    if dims is None or dims == []:
        return tuple(range(rank))
    return tuple(dim % max(rank, 1) for dim in (dims if isinstance(dims, list | tuple) else [dims]))


def constant(node: Node, given: Mapping[str, Any]) -> Any:
    """The number that a constant without dimensions holds; None if it is not known."""
    number = given.get("fill_value", given.get("s"))
    return number if called_name(node) in ("full", "scalar_tensor") and isinstance(number, int | float) else None


def _arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by name, with defaults."""
    schema = schema_of(node)
    declared = () if schema is None else schema.arguments
    given = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    given |= {argument.name: value for argument, value in zip(declared, node.args, strict=False)}
    return given | dict(node.kwargs)


_SIZES = {"size", "end", "start", "length"}
"""The arguments that may be a size: what is made of it shows in the sizes of the result, or is read by the rule."""


class Walk:
    """Follows the symbol *rows* through *gm*; `rule_of` gives the rule of an operator that has one."""

    def __init__(self, gm: GraphModule, rows: Any, names: Sequence[str], rule_of: Callable[[Any], Rule | None]) -> None:
        self.graph, self.rows, self.rule_of = gm.graph, rows, rule_of
        self.names = dict(zip(gm.graph.find_nodes(op="placeholder"), names, strict=True))
        self.known: dict[Node, Any] = {}
        self.most: tuple[float, str] = (math.inf, "")
        self.draws = False

    def run(self) -> Found:
        inputs: dict[Node, int] = {}
        written: set[int] = set()
        for place, node in enumerate(self.names):
            if not is_tensor(node):
                continue
            numbers = [*shape_of(node), *map(expression_of, value_of(node).stride())]
            if any(self.is_counted(number) for number in numbers):
                inputs[node] = place
                dims = [dim for dim, size in enumerate(shape_of(node)) if self.is_counted(size)]
                self.known[node] = self.checked(node, Rows(dict.fromkeys(dims, sympy.S.One)))
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            try:
                if called_name(node) == "copy_" and node.args[0].op == "placeholder":
                    written |= self.write(node, inputs)
                else:
                    self.known[node] = self.result(node)
            except MixesRowsError as refused:
                raise MixesRowsError(f"{described((node,))}: {refused}") from None
        outputs, counts = self.outputs(inputs)
        dims_of = {place: self.known[node].inner for node, place in inputs.items()}
        return Found(dims_of, outputs, counts, frozenset(written), self.most, self.draws)

    def outputs(self, inputs: Mapping[Node, int]) -> tuple[dict[int, Mapping[int, Any]], frozenset[int]]:
        """The outputs with rows, and those that are the number of rows."""
        (results,) = self.graph.output_node().args
        outputs, numbers, roots = dict[int, Mapping[int, Any]](), set[int](), dict[Node, int]()
        for place, result in enumerate(tree_leaves(results)):
            if is_tensor(result) and self.of(result).inner:
                outputs[place] = self.of(result).inner
                root = self.root(result)
                first = roots.setdefault(root, place)
                if root in inputs or (first != place and {*outputs[first], *outputs[place]} != {0}):
                    raise MixesRowsError(
                        "the graph returns a view of an input, or two views of a tensor, which would be copies of it. "
                        "Return a clone"
                    )
            elif isinstance(result, Node) and self.reads(result):
                if expression_of(value_of(result)) != self.rows:
                    raise MixesRowsError(f"the graph returns a number that follows from the size: {value_of(result)}")
                numbers.add(place)
        return outputs, frozenset(numbers)

    def write(self, node: Node, inputs: Mapping[Node, int]) -> set[int]:
        """The input that *node* writes to, if it has rows."""
        target, source = node.all_input_nodes[:2]
        if target in inputs and self.of(source).inner == self.known[target].inner:
            return {inputs[target]}
        if target in inputs or self.of(source).inner:
            raise MixesRowsError("it writes rows to an input, or to a buffer, that has none of them")
        return set()

    def root(self, node: Node) -> Node:
        """The tensor of which *node* is a view, or itself."""
        while (schema := schema_of(node)) is not None and schema.returns and schema.returns[0].alias_info is not None:
            node = node.all_input_nodes[0]
        return node

    def name(self, node: Node) -> str:
        """What to call *node* in messages."""
        return self.names.get(node) or f"{called_name(node)} (node {node.name})"

    def is_counted(self, size: Any) -> bool:
        return self.rows in size.free_symbols

    def reads(self, node: Node) -> bool:
        """Whether *node* is a number that follows from how many rows there are."""
        value = value_of(node)
        is_symbolic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
        return is_symbolic and self.is_counted(value.node.expr)

    def of(self, node: Any) -> Rows:
        """What is known of a tensor."""
        return self.known.get(node, Rows()) if isinstance(node, Node) else Rows()

    def outer(self, node: Node, dim: int, inner: Any) -> Any:
        """What is left of a dimension without rows of *inner* entries; None if these do not divide it."""
        outer = quotient(shape_of(node)[dim], self.rows * inner)
        return None if outer is None or self.is_counted(outer) else outer

    def is_whole(self, node: Node, dim: int) -> bool:
        """Whether entry i of a dimension is row i."""
        return dim in self.of(node).inner and shape_of(node)[dim] == self.rows

    def checked(self, node: Node, rows: Rows) -> Rows:
        """*rows*, claimed of the tensor *node*, if its sizes agree."""
        for dim, size in enumerate(shape_of(node)):
            if self.is_counted(size) != (dim in rows.inner):
                raise MixesRowsError(f"it gives dimension {dim} the size {size}, which is not a number of whole rows")
            if dim in rows.inner and self.outer(node, dim, rows.inner[dim]) is None:
                raise MixesRowsError(f"it gives dimension {dim} the size {size}, in which rows cannot be told apart")
        return rows

    def result(self, node: Node) -> Any:
        """What is known of the result of a call: `Rows`, or several for an operator with several results."""
        if node.target is operator.getitem:
            source, place = cast("tuple[Node, int]", node.args)
            known = self.known.get(source, Rows())
            return self.checked(node, known[place]) if isinstance(known, tuple) and is_tensor(node) else Rows()
        name, values, overloads = called_name(node), tree_leaves(value_of(node)), overloads_of(node.target)
        if name.startswith("sym_") or not any(map(is_tensor, (node, *node.all_input_nodes))):
            return Rows()  # a size, or arithmetic with sizes
        given = _arguments(node)
        rule = self.rule_of(overloads[0]) if overloads else None
        if rule is None:
            has_rows = any(self.of(each).inner or self.reads(each) for each in node.all_input_nodes)
            sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
            if has_rows or any(self.is_counted(expression_of(size)) for size in sizes):
                raise MixesRowsError("nothing is known of what this operator does with rows, so it may mix them")
            return Rows(number=constant(node, given))
        for argument, value in given.items():
            if argument not in _SIZES and any(
                isinstance(each, Node) and self.reads(each) for each in tree_leaves(value)
            ):
                raise MixesRowsError(f"its argument {argument!r} is a number that follows from the size")
        rows = rule(self, node, given)
        if isinstance(rows, tuple):
            return rows  # checked where one of them is used
        if rows.inner and torch.Tag.nondeterministic_seeded in overloads[0].tags:
            self.draws, rows = True, Rows(rows.inner, fresh=True)
        return self.checked(node, rows) if is_tensor(node) else (rows,) * len(values)

    def union(self, *operands: Rows) -> dict[int, Any]:
        """The dimensions with rows of *operands*, whose dimensions are aligned."""
        inner: dict[int, Any] = {}
        for operand in operands:
            for dim, entries in operand.inner.items():
                if inner.setdefault(dim, entries) != entries:
                    raise MixesRowsError(f"rows lie in another order in one of its operands, in dimension {dim}")
        return inner

    def clean(self, *nodes: Any) -> None:
        """Refuse rows in any of *nodes*."""
        for node in nodes:
            if self.of(node).inner:
                raise MixesRowsError(f"the result for each row depends on the rows of {self.name(node)}")

    def looks_up(self, index: Any, size: Any) -> None:
        """Refuse an *index* that might be too large for a table of *size* in added rows only."""
        rows = self.of(index)
        if not rows.fresh or rows.number is not None:
            return
        if rows.index is None or [*rows.index.values()] != [1] or not size.is_number:
            raise MixesRowsError(
                f"nobody knows which numbers {self.name(index)} holds in added rows; "
                f"they may be too large for a table of {size}"
            )
        self.most = min(
            self.most,
            (float(size - rows.offset), f"{self.name(index)} counts up to the size, for a table of {size} entries"),
        )


Rule = Callable[[Walk, Node, Mapping[str, Any]], Any]
"""Says what an operator does with rows, from the call and its arguments by name: `Rows`, or several."""
