# SPDX-License-Identifier: Apache-2.0
"""Whether the rows of a graph stay apart, so that its inputs can get more of them, which are cut off its outputs.

A size of the graph counts rows. The walk follows, from the inputs to the outputs, in which dimensions of each value
these rows lie. It claims of each value: an entry that belongs to real rows in all of these dimensions is the same,
whatever the added rows hold and however many they are. An operator for which that cannot be shown is refused. The graph
is in core ATen, so that one table has a rule for each operator.
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
from torch.fx.node import map_aggregate

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


def rows_apart(gm: GraphModule, rows: Any, names: Sequence[str]) -> Found:
    """Follow the symbol *rows* through *gm*, a graph of core ATen operators whose inputs have these *names*.

    Raises:
        MixesRowsError: Added rows might change what real rows hold.
    """
    return _Walk(gm, rows, names).run()


def _size(number: Any) -> Any:
    """A size as an expression."""
    return number.node.expr if isinstance(number, torch.SymInt) else sympy.Integer(number)


def _quotient(a: Any, b: Any) -> Any:
    """*a* over *b*; None if that is not whole for all sizes."""
    if b == 0:
        return None
    numerator, denominator = sympy.fraction(sympy.cancel(a / b))
    return numerator if denominator == 1 else None


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(map(_size, _value(node).shape))


def _value(node: Any) -> Any:
    return node.meta.get("val")


def _is_tensor(node: object) -> bool:
    return isinstance(node, Node) and isinstance(_value(node), torch.Tensor)


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    map_aggregate(value, found.append)
    return found


def _dims(dims: Any, rank: int) -> tuple[int, ...]:
    """*dims*, an argument of an operator, of a tensor with *rank* dimensions; all of them if it names none."""
    if dims is None or dims == []:
        return tuple(range(rank))
    return tuple(dim % max(rank, 1) for dim in (dims if isinstance(dims, list | tuple) else [dims]))


class _Walk:
    def __init__(self, gm: GraphModule, rows: Any, names: Sequence[str]) -> None:
        self.graph, self.rows = gm.graph, rows
        self.names = dict(zip(gm.graph.find_nodes(op="placeholder"), names, strict=True))
        self.known: dict[Node, Any] = {}
        self.most: tuple[float, str] = (math.inf, "")
        self.draws = False

    def run(self) -> Found:
        inputs: dict[Node, int] = {}
        written: set[int] = set()
        for place, node in enumerate(self.names):
            if not _is_tensor(node):
                continue
            numbers = [*_shape(node), *map(_size, _value(node).stride())]
            if any(self.is_counted(number) for number in numbers):
                inputs[node] = place
                dims = [dim for dim, size in enumerate(_shape(node)) if self.is_counted(size)]
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
                msg = f"{described((node,))}: {refused}"
                raise MixesRowsError(msg) from None
        outputs, counts = self.outputs(inputs)
        dims_of = {place: self.known[node].inner for node, place in inputs.items()}
        return Found(dims_of, outputs, counts, frozenset(written), self.most, self.draws)

    def outputs(self, inputs: Mapping[Node, int]) -> tuple[dict[int, Mapping[int, Any]], frozenset[int]]:
        """The outputs with rows, and those that are the number of rows."""
        (results,) = self.graph.output_node().args
        outputs, numbers, roots = dict[int, Mapping[int, Any]](), set[int](), dict[Node, int]()
        for place, result in enumerate(_leaves(results)):
            if _is_tensor(result) and self.of(result).inner:
                outputs[place] = self.of(result).inner
                root = self.root(result)
                first = roots.setdefault(root, place)
                if root in inputs or (first != place and {*outputs[first], *outputs[place]} != {0}):
                    raise MixesRowsError(
                        "the graph returns a view of an input, or two views of a tensor, which would be copies of it. "
                        "Return a clone"
                    )
            elif isinstance(result, Node) and self.reads(result):
                if _size(_value(result)) != self.rows:
                    raise MixesRowsError(f"the graph returns a number that follows from the size: {_value(result)}")
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
        value = _value(node)
        is_symbolic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
        return is_symbolic and self.is_counted(value.node.expr)

    def of(self, node: Any) -> Rows:
        """What is known of a tensor."""
        return self.known.get(node, Rows()) if isinstance(node, Node) else Rows()

    def outer(self, node: Node, dim: int, inner: Any) -> Any:
        """What is left of a dimension without rows of *inner* entries; None if it is no multiple of these."""
        outer = _quotient(_shape(node)[dim], self.rows * inner)
        return None if outer is None or self.is_counted(outer) else outer

    def is_whole(self, node: Node, dim: int) -> bool:
        """Whether entry i of a dimension is row i."""
        return dim in self.of(node).inner and _shape(node)[dim] == self.rows

    def checked(self, node: Node, rows: Rows) -> Rows:
        """*rows*, claimed of the tensor *node*, if its sizes agree."""
        for dim, size in enumerate(_shape(node)):
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
            return self.checked(node, known[place]) if isinstance(known, tuple) and _is_tensor(node) else Rows()
        name, values, overloads = called_name(node), _leaves(_value(node)), overloads_of(node.target)
        if name.startswith("sym_") or not any(map(_is_tensor, (node, *node.all_input_nodes))):
            return Rows()  # a size, or arithmetic with sizes
        given = _arguments(node)
        rule = _RULES.get(name) if overloads and overloads[0].namespace in ("aten", "prims") else None
        if rule is None and overloads and torch.Tag.pointwise in overloads[0].tags:
            rule = _pointwise
        if rule is None or not overloads:
            has_rows = any(self.of(each).inner or self.reads(each) for each in node.all_input_nodes)
            if has_rows or any(self.is_counted(size) for value in values for size in _sizes_of(value)):
                raise MixesRowsError("nothing is known of what this operator does with rows, so it may mix them")
            return Rows(number=_constant(node, given))
        for argument, value in given.items():
            if argument not in _SIZES and any(isinstance(each, Node) and self.reads(each) for each in _leaves(value)):
                raise MixesRowsError(f"its argument {argument!r} is a number that follows from the size")
        rows = rule(self, node, given)
        if isinstance(rows, tuple):
            return rows  # checked where one of them is used
        if rows.inner and torch.Tag.nondeterministic_seeded in overloads[0].tags:
            self.draws, rows = True, Rows(rows.inner, fresh=True)
        return self.checked(node, rows) if _is_tensor(node) else (rows,) * len(values)

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


_SIZES = {"size", "end", "start", "length"}
"""The arguments that may be a size: what is made of it shows in the sizes of the result, or is read by the rule."""


def _sizes_of(value: Any) -> list[Any]:
    return list(map(_size, value.shape)) if isinstance(value, torch.Tensor) else []


def _arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by name, with defaults."""
    schema = schema_of(node)
    declared = () if schema is None else schema.arguments
    given = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    given |= {argument.name: value for argument, value in zip(declared, node.args, strict=False)}
    return given | dict(node.kwargs)


def _tensors(given: Mapping[str, Any]) -> list[Node]:
    return [each for value in given.values() for each in _leaves(value) if _is_tensor(each)]


def _evaluated(node: Node, numbers: Mapping[Node, Any]) -> Any:
    """The number that a pointwise operator gives for *numbers*, each that of a tensor; None if it cannot be known."""
    is_known = torch.Tag.pointwise in overloads_of(node.target)[0].tags or called_name(node) in _SAME
    if not is_known or any(number is None for number in numbers.values()):
        return None
    if any(isinstance(each, Node) and not _is_tensor(each) for each in _leaves((node.args, node.kwargs))):
        return None

    def tensor(value: Any) -> Any:
        return torch.tensor(numbers[value], dtype=_value(value).dtype) if isinstance(value, Node) else value

    kwargs = {name: value for name, value in node.kwargs.items() if name not in ("device", "layout", "pin_memory")}
    target: Any = node.target
    return target(*map_aggregate(node.args, tensor), **map_aggregate(kwargs, tensor)).item()


def _constant(node: Node, given: Mapping[str, Any]) -> Any:
    """The number that a constant without dimensions holds; None if it is not known."""
    number = given.get("fill_value", given.get("s"))
    return number if called_name(node) in ("full", "scalar_tensor") and isinstance(number, int | float) else None


_ABSORBING = {
    "bitwise_and": False,
    "logical_and": False,
    "bitwise_or": True,
    "logical_or": True,
    "mul": 0,
    "add": -math.inf,
}
"""A number of one operand that decides the result, whatever the other one holds; `True` and `False` for bools."""

_DIVISIONS = ("div", "floor_divide", "remainder", "fmod")

_SAME = ("_to_copy", "clone", "alias", "detach", "lift_fresh_copy")
"""Operators that give what they get."""

_COUNTING = (torch.int64, torch.int32, torch.float64)
"""The dtypes that hold each index of a dimension."""


def _pointwise(walk: _Walk, node: Node, given: Mapping[str, Any]) -> Rows:
    """Each entry follows from the entries at the same place."""
    rank, name, dtype = len(_shape(node)), called_name(node), _value(node).dtype
    operands = {each: walk.of(each).shifted(rank - len(_shape(each))) for each in _tensors(given)}
    inner = walk.union(*operands.values())
    absorbing: Any = _ABSORBING.get(name)
    if given.get("alpha", 1) != 1 or (isinstance(absorbing, bool) and dtype != torch.bool):
        absorbing = None
    added: dict[int, Any] = {}
    for dim in inner:
        numbers = {each: one.added.get(dim, one.number) for each, one in operands.items()}
        if name == "where" and len(numbers) == 3:
            condition, *choices = (numbers[given[each]] for each in ("condition", "self", "other"))
            number = choices[0] if condition or choices[0] == choices[1] else None if condition is None else choices[1]
        elif absorbing is not None and absorbing in numbers.values():
            number = absorbing
        else:
            number = _evaluated(node, numbers)
        if number is not None:
            added[dim] = number
    divisor = given.get("other")
    if name in _DIVISIONS and not dtype.is_floating_point and isinstance(divisor, Node) and walk.of(divisor).fresh:
        raise MixesRowsError(f"nobody knows whether {walk.name(divisor)} is zero in added rows, by which it divides")
    index, offset = _line(operands, given, name)
    if index is not None and index.keys() <= inner.keys() and name in ("le", "lt", "ge", "gt"):
        added |= _compared(name, index, offset)
    return Rows(
        inner,
        index=index if dtype in _COUNTING else None,
        offset=offset,
        number=_evaluated(node, {each: one.number for each, one in operands.items()}),
        added=added,
        fresh=dtype != torch.bool and any(one.fresh for one in operands.values()),
    )


def _line(operands: Mapping[Node, Rows], given: Mapping[str, Any], name: str) -> tuple[Mapping[int, int] | None, int]:
    """`Rows.index` and `Rows.offset` of a result, for a comparison those of the difference."""
    given_by = [given.get("self"), given.get("other", 0)]
    is_same = name in _SAME
    if not is_same and (name not in ("add", "sub", "le", "lt", "ge", "gt") or given.get("alpha", 1) != 1):
        return None, 0
    lines = []
    for one in given_by:
        rows = operands.get(one, Rows()) if isinstance(one, Node) else Rows(number=one)
        number = rows.number if isinstance(rows.number, int) else None
        lines.append((rows.index, rows.offset) if number is None else ({}, number))
    (left, a), (right, b) = lines
    if left is None or right is None:
        return None, 0
    sign = 1 if name == "add" or is_same else -1
    factors = {dim: left.get(dim, 0) + sign * right.get(dim, 0) for dim in {*left, *right}}
    return {dim: factor for dim, factor in factors.items() if factor}, a + sign * b


def _compared(name: str, index: Mapping[int, int], offset: int) -> dict[int, bool]:
    """What a comparison with zero gives in added rows, where one of the two indices is larger than the other."""
    if sorted(index.values()) != [-1, 1]:
        return {}
    found = {}
    for dim, sign in index.items():
        holds = getattr(operator, name)(offset + sign, 0)  # at least, or at most, so much
        if holds == ((name in ("ge", "gt")) == (sign == 1)):
            found[dim] = holds
    return found


_NEUTRAL = {
    "sum": 0,
    "any": False,
    "amax": -math.inf,
    "_softmax": -math.inf,
    "_log_softmax": -math.inf,
}
"""Numbers that added rows may hold where an operator acts along them: they change nothing."""

_CHOOSES = ("argmax", "argmin", "topk", "sort", "max", "min")
"""Operators whose results are places in a dimension, so any that they give is a valid one."""


def _along(acts_on: str | int, *aligned: str) -> Callable[[_Walk, Node, Mapping[str, Any]], Any]:
    """A rule for an operator that mixes entries along some dimensions of the arguments *aligned*, and along no others.

    *acts_on* is the argument that names these dimensions, or says how many of the last ones they are; -1 is for all but
    the first. Other tensors must have no rows.
    """

    def rule(walk: _Walk, node: Node, given: Mapping[str, Any]) -> Any:
        operands = [each for argument in aligned for each in _leaves(given[argument]) if _is_tensor(each)]
        operands = [each for each in operands if _shape(each) != (0,)]  # `cat` takes such tensors for none
        ranks = {len(_shape(each)) for each in operands}
        if len(ranks) != 1:
            raise MixesRowsError("its operands have different numbers of dimensions")
        (rank,), name = ranks, called_name(node)
        walk.clean(*(each for each in _tensors(given) if each not in operands))
        if isinstance(acts_on, int):
            last = acts_on if acts_on >= 0 else rank - 1
            dims = tuple(range(rank - last, rank))
        else:
            dims = _dims(given.get(acts_on), rank)
        if name == "constant_pad_nd":
            dims = tuple(range(rank - len(given["pad"]) // 2, rank))
        if name == "slice_scatter" and _is_all(operands[0], dims[0], given):
            dims = ()
        known = [walk.of(each) for each in operands]
        for dim in dims:
            for one in known:
                if dim in one.inner and (name not in _NEUTRAL or one.added.get(dim) != _NEUTRAL[name]):
                    raise MixesRowsError(
                        f"it mixes rows, which lie in dimension {dim} of {walk.name(operands[known.index(one)])}"
                    )
        if "index" in given:
            walk.looks_up(given["index"], _shape(operands[0])[dims[0]])
        inner = walk.union(*known)
        kept = [dim for dim in range(rank) if dim not in dims]

        def result(value: Any) -> Rows:
            fresh = any(one.fresh for one in known) and not (name in _CHOOSES and value.dtype == torch.int64)
            rows = Rows({dim: entries for dim, entries in inner.items() if dim in kept}, fresh=fresh)
            if name in ("_softmax", "_log_softmax"):
                added = {dim: 0 if name == "_softmax" else -math.inf for dim in dims if dim in inner}
                return Rows(inner, added=added, fresh=fresh)
            return rows.moved({dim: place for place, dim in enumerate(kept)}) if value.dim() == len(kept) else rows

        values = _value(node)
        return result(values) if isinstance(values, torch.Tensor) else tuple(map(result, values))

    return rule


def _is_all(node: Node, dim: int, given: Mapping[str, Any]) -> bool:
    """Whether a slice along a dimension is all of it."""
    start, end, size = given.get("start") or 0, given.get("end"), _shape(node)[dim]
    is_end = _size(_value(end)) == size if isinstance(end, Node) else end in (None, 2**63 - 1)
    return start == 0 and given.get("step", 1) == 1 and is_end


def _reshape(walk: _Walk, node: Node, given: Mapping[str, Any]) -> Rows:
    """The entries stay in their order, and get other dimensions: a row stays where as many entries follow it."""
    source = given["self"]
    rows, before, after = walk.of(source), _shape(source), _shape(node)
    inner: dict[int, Any] = {}
    to: dict[int, int] = {}
    for dim, entries in rows.inner.items():
        follow = entries * sympy.prod(before[dim + 1 :])
        for place, size in enumerate(after):
            within = _quotient(follow, sympy.prod(after[place + 1 :]))
            if walk.is_counted(size) and within is not None and walk.outer(node, place, within) is not None:
                inner[place] = within
                if size == before[dim]:
                    to[dim] = place
    if len(inner) != len(rows.inner):
        raise MixesRowsError(f"rows cannot be told apart any more where {before} becomes {after}")
    return replace(rows.moved(to), inner=inner)


def _permute(walk: _Walk, node: Node, given: Mapping[str, Any]) -> Rows:
    rank = len(_shape(node))
    return walk.of(given["self"]).moved({dim % rank: place for place, dim in enumerate(given["dims"])})


def _expand(walk: _Walk, node: Node, given: Mapping[str, Any]) -> Rows:
    """Where a dimension is new, or had one entry, each row is the same."""
    source, after = given["self"], _shape(node)
    shift = len(after) - len(_shape(source))
    rows = walk.of(source).shifted(shift)
    new = {dim for dim, size in enumerate(after) if walk.is_counted(size) and dim not in rows.inner}
    if any(after[dim] != walk.rows for dim in new):
        raise MixesRowsError(f"it gives a dimension the size {after}, in which rows cannot be told apart")
    return replace(rows, inner={**rows.inner, **dict.fromkeys(new, sympy.S.One)})


def _slice(walk: _Walk, node: Node, given: Mapping[str, Any]) -> Rows:
    source, before, after = given["self"], _shape(given["self"]), _shape(node)
    rows, (dim,) = walk.of(source), _dims(given.get("dim", 0), len(before))
    start, step = given.get("start") or 0, given.get("step", 1)
    starts_late = isinstance(start, Node) or start < 0
    if dim not in rows.inner:
        if not walk.is_counted(after[dim]):
            if any(isinstance(end, Node) and walk.reads(end) for end in (start, given.get("end"))):
                raise MixesRowsError("where it ends follows from the size")
            return rows if _is_all(source, dim, given) else replace(rows, index=None)
        if after[dim] != walk.rows or step != 1 or (isinstance(start, Node) and walk.reads(start)):
            raise MixesRowsError(f"it takes {after[dim]} entries of a dimension without rows")
        return replace(rows, inner={**rows.inner, dim: sympy.S.One}, index=None, fresh=True)
    if _is_all(source, dim, given) or after[dim] == before[dim]:
        return rows
    if starts_late or not after[dim].is_number or not walk.is_whole(source, dim):
        raise MixesRowsError(f"it takes rows that are counted from the end, or {after[dim]} of {before[dim]}")
    return replace(rows.moved({each: each for each in range(len(before)) if each != dim}), fresh=rows.fresh)


def _select(walk: _Walk, node: Node, given: Mapping[str, Any]) -> Rows:  # noqa: ARG001 - as all rules
    source = given["self"]
    rank = len(_shape(source))
    rows, (dim,), index = walk.of(source), _dims(given["dim"], rank), given["index"]
    if dim in rows.inner and (isinstance(index, Node) or index < 0 or not walk.is_whole(source, dim)):
        raise MixesRowsError("it takes a row that is counted from the end, which would be an added one")
    return rows.moved({each: each - (each > dim) for each in range(rank) if each != dim})


_PRODUCTS = {
    "mm": ("ik", "kj", "ij"),
    "addmm": ("ik", "kj", "ij"),
    "bmm": ("bik", "bkj", "bij"),
    "baddbmm": ("bik", "bkj", "bij"),
    "mv": ("ik", "k", "i"),
    "addmv": ("ik", "k", "i"),
    "dot": ("k", "k", ""),
    "vdot": ("k", "k", ""),
    "_int_mm": ("ik", "kj", "ij"),
}
"""The dimensions of the last two operands, and of the result; those that are not in the result are summed over."""


def _product(walk: _Walk, node: Node, given: Mapping[str, Any]) -> Rows:
    left, right, result = _PRODUCTS[called_name(node)]
    *bias, a, b = _tensors(given)
    inner: dict[int, Any] = {}
    for operand, letters in ((a, left), (b, right)):
        for dim, entries in walk.of(operand).inner.items():
            letter = letters[dim]
            if letter in result:
                inner = walk.union(Rows(inner), Rows({result.index(letter): entries}))
            elif 0 not in (walk.of(a).added.get(left.index(letter)), walk.of(b).added.get(right.index(letter))):
                raise MixesRowsError(f"it sums over the rows, which lie in dimension {dim} of {walk.name(operand)}")
            else:
                walk.union(
                    Rows({0: walk.of(a).inner.get(left.index(letter))}),
                    Rows({0: walk.of(b).inner.get(right.index(letter))}),
                )
    for each in bias:
        inner = walk.union(Rows(inner), walk.of(each).shifted(len(result) - len(_shape(each))))
    return Rows(inner, fresh=any(walk.of(each).fresh for each in (*bias, a, b)))


def _attention(walk: _Walk, node: Node, given: Mapping[str, Any]) -> tuple[Rows, ...]:
    """Batch and heads stay apart. A row that is a query must see no key of an added row."""
    query, key, value = (given[name] for name in ("query", "key", "value"))
    mask = given.get("attn_mask", given.get("attn_bias"))
    known = [walk.of(each) for each in (query, key, value)]
    if any(3 in one.inner for one in known):
        raise MixesRowsError("rows lie in the last dimension of a query, key or value, over which it sums")
    masked = walk.of(mask).shifted(4 - len(_shape(mask))) if _is_tensor(mask) else Rows()
    if 2 in known[1].inner or 2 in known[2].inner:
        hides = masked.added.get(3) in (
            (False,) if mask is not None and _value(mask).dtype == torch.bool else (-math.inf,)
        )
        is_causal = given["is_causal"] and all(walk.is_whole(each, 2) for each in (query, key, value))
        if not (is_causal or hides) or known[1].inner.get(2) != known[2].inner.get(2):
            raise MixesRowsError(
                "each query may attend to the keys of added rows. It is right with is_causal=True, or with a mask that "
                "is causal by its indices, such as torch.ones(n, n).tril() == 1; what an input masks is not known"
            )
    inner = walk.union(
        *(Rows({dim: n for dim, n in one.inner.items() if dim < 2 or (dim == 2 and one is known[0])}) for one in known),
        Rows({dim: n for dim, n in masked.inner.items() if dim < 3}),
    )
    if given.get("dropout_p"):
        walk.draws = True
    rows = Rows(inner, fresh=any(one.fresh for one in known) or 2 in inner)
    return tuple(rows if isinstance(one, torch.Tensor) and one.dim() > 2 else Rows() for one in _leaves(_value(node)))


def _as_strided(walk: _Walk, node: Node, given: Mapping[str, Any]) -> Rows:
    """Only where the entries stay in their order, as `reshape` uses it."""
    source = given["self"]
    if not (_is_row_major(source) and _is_row_major(node)):
        raise MixesRowsError("it may give the entries another order")
    return _reshape(walk, node, given)


def _is_row_major(node: Node) -> bool:
    """Whether a tensor starts where its memory does, and has its entries in the order of their indices."""
    shape, strides, follow = _shape(node), _value(node).stride(), sympy.S.One
    for size, stride in reversed(list(zip(shape, strides, strict=True))):
        if size != 1 and _size(stride) != follow:
            return False
        follow *= size
    return bool(_size(_value(node).storage_offset()) == 0)


def _dropout(walk: _Walk, node: Node, given: Mapping[str, Any]) -> Rows:  # noqa: ARG001 - as all rules
    return Rows(walk.of(given["input"]).inner)


def _create(walk: _Walk, node: Node, given: Mapping[str, Any]) -> Rows:
    """Each row is made alike, or from its index."""
    inner = {dim: sympy.S.One for dim, size in enumerate(_shape(node)) if walk.is_counted(size)}
    if any(_shape(node)[dim] != walk.rows for dim in inner):
        raise MixesRowsError(f"it makes a tensor of the size {_shape(node)}, in which rows cannot be told apart")
    if called_name(node) not in ("arange", "iota"):
        return Rows(inner, number=_constant(node, given))
    start, step = given.get("start", 0), given.get("step", 1)
    if any(isinstance(each, Node) and walk.reads(each) for each in (start, step)):
        raise MixesRowsError("it counts from a number that follows from the size")
    index = None
    if (start, step) == (0, 1) and _value(node).dtype in _COUNTING:
        index = {} if _shape(node) == (1,) else {0: 1}  # one entry may be expanded to many
    return Rows(inner, index=index, fresh=bool(inner))


def _look_up(walk: _Walk, node: Node, given: Mapping[str, Any]) -> Rows:  # noqa: ARG001 - as all rules
    """`index`, with a list of indices for the first dimensions of a tensor, and `embedding` and `index_select`."""
    table = given["weight"] if "weight" in given else given["self"]
    rank = len(_shape(table))
    if "index" in given:
        (dim,) = _dims(given["dim"], rank)
        indices = [None] * dim + [given["index"]]
    else:
        indices = [given["indices"]] if "weight" in given else list(given["indices"])
    to, placed = _placed(indices, rank)
    rows, index_rows = walk.of(table), []
    for dim, index in enumerate(indices):
        if index is None:
            continue
        one = walk.of(index).shifted(placed.stop - placed.start - len(_shape(index)))
        if dim in rows.inner and not (
            walk.is_whole(table, dim) and one.index is not None and [*one.index.values(), one.offset] == [1, 0]
        ):
            raise MixesRowsError(
                f"it looks up rows, which lie in dimension {dim} of {walk.name(table)}, by numbers that it is given"
            )
        if dim not in rows.inner:
            walk.looks_up(index, _shape(table)[dim])
        index_rows.append(one.shifted(placed.start))
    kept = replace(rows, index=None, added={}).moved(to)
    return Rows(walk.union(kept, *index_rows), fresh=rows.fresh)


def _placed(indices: Sequence[Any], rank: int) -> tuple[dict[int, int], range]:
    """Where ``x[indices]`` has the other dimensions of *x*, and where those of the indices, which are broadcast."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    wide = max(len(_shape(index)) for index in indices if index is not None)
    is_together = dims == list(range(dims[0], dims[-1] + 1))
    start = dims[0] if is_together else 0
    others = [dim for dim in range(rank) if dim not in dims]
    places = [place for place in range(len(others) + wide) if not start <= place < start + wide]
    return dict(zip(others, places, strict=True)), range(start, start + wide)


def _put(walk: _Walk, node: Node, given: Mapping[str, Any]) -> Rows:  # noqa: ARG001 - as all rules
    """`index_put`: each row of a tensor gets values at places that are the same for all rows."""
    table, indices, values = given["self"], given["indices"], given["values"]
    walk.clean(*(index for index in indices if index is not None))
    to, placed = _placed(indices, len(_shape(table)))
    rows = walk.of(table)
    if any(dim in rows.inner and index is not None for dim, index in enumerate(indices)):
        raise MixesRowsError(f"it writes to some rows of {walk.name(table)} by number")
    wide = len(to) + len(placed)
    back = {place: dim for dim, place in to.items()}
    given_rows = walk.of(values).shifted(wide - len(_shape(values)))
    if any(dim in placed for dim in given_rows.inner):
        raise MixesRowsError(f"it writes rows of {walk.name(values)} to places of {walk.name(table)} that are not rows")
    inner = walk.union(Rows(rows.inner), Rows(given_rows.moved(back).inner))
    return Rows(inner, fresh=rows.fresh or given_rows.fresh)


_Rule = Callable[[_Walk, Node, Mapping[str, Any]], Any]


def _rules(rule: _Rule, *names: str) -> dict[str, _Rule]:
    return dict.fromkeys(names, rule)


_RULES: dict[str, _Rule] = {
    **_rules(
        _pointwise, "_to_copy", "clone", "alias", "detach", "lift_fresh_copy", "copy", "where", "_conj", "full_like"
    ),
    **_rules(_pointwise, "empty_like", "zeros_like", "ones_like", "rand_like", "randn_like", "bernoulli"),
    **_rules(
        _along("dim", "self"), "sum", "mean", "amax", "amin", "any", "all", "prod", "var", "var_mean", "std", "argmax"
    ),
    **_rules(
        _along("dim", "self"), "argmin", "max", "min", "_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "topk"
    ),
    **_rules(
        _along("dim", "self"), "split", "split_with_sizes", "unbind", "logcumsumexp", "cummax", "cummin", "median"
    ),
    **_rules(_along("dim", "self"), "linalg_vector_norm", "kthvalue", "logsumexp"),
    **_rules(_along("dim", "self"), "_fft_r2c", "_fft_c2r", "_fft_c2c"),
    **_rules(_along("dims", "self"), "flip", "roll"),
    **_rules(_along("dim", "self", "src"), "slice_scatter"),
    **_rules(_along("dim", "tensors"), "cat"),
    **_rules(_along("dim", "self", "index"), "gather"),
    **_rules(_along("dim", "self", "index", "src"), "scatter_add", "scatter_reduce"),
    **_rules(_along(-1, "input"), "convolution"),
    **_rules(_along(3, "self"), "max_pool3d_with_indices", "avg_pool3d", "_adaptive_avg_pool3d", "reflection_pad3d"),
    **_rules(_along(2, "self"), "max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "reflection_pad2d"),
    **_rules(_along(2, "self"), "replication_pad2d", "upsample_nearest2d", "upsample_bilinear2d"),
    **_rules(
        _along(1, "self"), "avg_pool1d", "adaptive_avg_pool1d", "reflection_pad1d", "constant_pad_nd", "multinomial"
    ),
    **_rules(_dropout, "native_dropout"),
    **_rules(_reshape, "view", "_unsafe_view", "unsqueeze", "squeeze"),
    **_rules(_permute, "permute"),
    **_rules(_expand, "expand"),
    **_rules(_slice, "slice"),
    **_rules(_select, "select"),
    **_rules(_as_strided, "as_strided"),
    **_rules(_product, *_PRODUCTS),
    **_rules(
        _attention,
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    **_rules(_create, "full", "empty", "scalar_tensor", "rand", "randn", "randint", "arange", "iota"),
    **_rules(_look_up, "embedding", "index", "index_select", "_unsafe_index"),
    **_rules(_put, "index_put", "_unsafe_index_put"),
}
"""What an operator does with rows. Pointwise ones are known by their tag, and any other one is refused."""
