# SPDX-License-Identifier: Apache-2.0
"""Tensors whose numbers follow from their positions alone, such as the masks that libraries make, as formulas.

    q, k = torch.arange(n)[:, None], torch.arange(n)[None, :]
    mask = k <= q

The number of ``k`` at (i0, i1) is ``i1``, that of ``q`` is ``i0``, and ``mask`` is true where ``i0 - i1`` is at least
0. Operators on such tensors are read as they are called, on fake tensors. What is not understood has no formula.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


aten = torch.ops.aten
Number: TypeAlias = Any  # bool, int, float or torch.SymInt
_NUMBERS = (bool, int, float)
_COUNTS = (torch.int32, torch.int64)  # other integers may overflow


@dataclass(frozen=True)
class Affine:
    """At the index (i0, i1, ...), a tensor holds ``constant`` and ``steps[d]`` times i_d for each dimension d."""

    constant: Number
    steps: Mapping[int, int]

    def at(self, indices: Mapping[int, Affine]) -> Affine:
        """The formula in which *indices* stand for the index of each dimension."""
        found = Affine(self.constant, {})
        for dim, step in self.steps.items():
            found = found.plus(indices[dim], step)
        return found

    def plus(self, other: Affine, times: int = 1) -> Affine:
        """The sum of this and *times* of *other*."""
        dims = self.steps.keys() | other.steps.keys()
        steps = {dim: self.steps.get(dim, 0) + times * other.steps.get(dim, 0) for dim in dims}
        return Affine(self.constant + times * other.constant, {dim: step for dim, step in steps.items() if step})

    def lowest(self, shape: Sequence[Any]) -> Number:
        """The least number in a tensor of *shape*."""
        return self.constant + sum(step * (shape[dim] - 1) for dim, step in self.steps.items() if step < 0)


@dataclass(frozen=True)
class Where:
    """A tensor holds *inside* where all *conditions* are at least 0, and *outside* elsewhere."""

    conditions: tuple[Affine, ...]
    inside: Number
    outside: Number

    def at(self, indices: Mapping[int, Affine]) -> Where:
        """The formula in which *indices* stand for the index of each dimension."""
        return Where(tuple(condition.at(indices) for condition in self.conditions), self.inside, self.outside)


Formula: TypeAlias = Affine | Where


def _simplified(formula: Formula, shape: Sequence[Any]) -> Formula:
    """*formula* without conditions that hold, or fail, for each index of a tensor of *shape*."""
    if isinstance(formula, Affine):
        return formula
    conditions = tuple(c for c in formula.conditions if not statically_known_true(c.lowest(shape) >= 0))
    if not conditions or formula.inside == formula.outside:
        return Affine(formula.inside, {})
    if any(statically_known_true(_opposite(c).lowest(shape) >= 0) for c in conditions):
        return Affine(formula.outside, {})
    if len(conditions) == 1 and formula.inside < formula.outside:
        return Where((_opposite(conditions[0]),), formula.outside, formula.inside)
    return Where(conditions, formula.inside, formula.outside)


def _is_exact(formula: Formula, dtype: torch.dtype) -> bool:
    """Whether a tensor of *dtype* holds the numbers of *formula* as they are, and what is computed from them."""
    numbers = (formula.inside, formula.outside) if isinstance(formula, Where) else (formula.constant,)
    if dtype in _COUNTS:
        return all(isinstance(n, torch.SymInt) or (isinstance(n, int) and abs(n) < 2**31) for n in numbers)
    exact = (0, 1, math.inf, -math.inf) if dtype.is_floating_point else (0, 1)
    return not getattr(formula, "steps", None) and all(type(n) in _NUMBERS and n in exact for n in numbers)


def _opposite(condition: Affine) -> Affine:
    """What is at least 0 where *condition*, an integer, is less than 0."""
    return Affine(-1, {}).plus(condition, -1)


class Formulas:
    """The formulas of the tensors that operators made, as far as they are known.

    A call that changes a tensor in place ends what is known, since it changes every view of it.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Formula]] = {}  # with the tensor, so that no other gets its id
        self._is_reliable = True

    def of(self, tensor: Tensor) -> Formula | None:
        """The formula of *tensor*; None if it has none."""
        return self._known[id(tensor)][1] if self._is_reliable and id(tensor) in self._known else None

    def note(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Find the formula of *out*, which *op* has returned for these arguments."""
        self._is_reliable &= not op._schema.is_mutable  # noqa: SLF001
        rule = _RULES.get(op.overloadpacket)
        if rule is None or not self._is_reliable or not isinstance(out, Tensor):
            return
        formula = rule(self, out, *args, **kwargs)
        if formula is not None and _is_exact(formula, out.dtype):
            self._known[id(out)] = (out, _simplified(formula, out.shape))

    def read(self, value: Any, out: Tensor) -> Formula | None:
        """The formula of *value*, a tensor or a number, as an operand that is expanded to the shape of *out*."""
        if not isinstance(value, Tensor):
            return Affine(value, {})
        formula = self.of(value)
        return None if formula is None else _expanded(formula, value.shape, out.shape)


def _is_number(formula: Formula | None) -> TypeGuard[Affine]:
    """Whether a tensor holds the same number everywhere, which is not a symbol."""
    return isinstance(formula, Affine) and not formula.steps and type(formula.constant) in _NUMBERS


def _equal(a: Number, b: Number) -> bool:
    return statically_known_true(a == b)


def _index(dim: int) -> Affine:
    return Affine(0, {dim: 1})


def _expanded(formula: Formula, old: Sequence[Any], new: Sequence[Any]) -> Formula | None:
    """*formula* of a tensor of shape *old* expanded to *new*, with more dimensions in front; None if it is repeated."""
    if isinstance(formula, Affine) and not formula.steps:
        return formula
    added, indices = len(new) - len(old), dict[int, Affine]()
    for dim, size in enumerate(old):
        if _equal(size, 1):
            indices[dim] = Affine(0, {})
        elif _equal(size, new[dim + added]):
            indices[dim] = _index(dim + added)
        else:
            return None
    return formula.at(indices)


Rule: TypeAlias = Callable[..., Formula | None]
"""Called with the `Formulas`, the result, and the arguments of the operator."""
_RULES: dict[Any, Rule] = {}


def _rule(*ops: Any) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(ops, rule))
        return rule

    return add


def _filled(find: Callable[[Sequence[Any]], Number]) -> Rule:
    return lambda _formulas, _out, *args, **_kwargs: Affine(find(args), {})


_rule(aten.zeros, aten.new_zeros, aten.zeros_like)(_filled(lambda _: 0))
_rule(aten.ones, aten.new_ones, aten.ones_like)(_filled(lambda _: 1))
_rule(aten.scalar_tensor)(_filled(lambda args: args[0]))
_rule(aten.full, aten.full_like)(_filled(lambda args: args[1]))
_rule(aten.new_full)(_filled(lambda args: args[2]))


@_rule(aten.arange)
def _arange(_: Formulas, __: Tensor, *bounds: Any, **___: Any) -> Formula | None:
    start, step = (0, 1) if len(bounds) == 1 else (*bounds, 1)[:3:2]
    return Affine(start, {0: step}) if isinstance(start, (int, torch.SymInt)) and type(step) is int else None


@_rule(aten.add)
def _add(formulas: Formulas, out: Tensor, a: Any, b: Any, *, alpha: Any = 1) -> Formula | None:
    left, right = formulas.read(a, out), formulas.read(b, out)
    if isinstance(left, Affine) and isinstance(right, Affine) and type(alpha) is int and out.dtype in _COUNTS:
        return left.plus(right, alpha)
    return _of_numbers(lambda x, y: x + alpha * y, left, right)


@_rule(aten.sub)
def _subtract(formulas: Formulas, out: Tensor, a: Any, b: Any, *, alpha: Any = 1) -> Formula | None:
    return _add(formulas, out, a, b, alpha=-alpha)


@_rule(aten.rsub)
def _subtract_from(formulas: Formulas, out: Tensor, a: Any, b: Any, alpha: Any = 1) -> Formula | None:
    return _add(formulas, out, b, a, alpha=-alpha)


@_rule(aten.mul)
def _multiply(formulas: Formulas, out: Tensor, a: Any, b: Any) -> Formula | None:
    return _of_numbers(operator.mul, formulas.read(a, out), formulas.read(b, out))


def _of_numbers(fn: Callable[[Number, Number], Number], a: Formula | None, b: Formula | None) -> Formula | None:
    """The formula of *fn* of the numbers of *a* and *b*, one of which holds the same number everywhere."""
    if _is_number(a):
        return _each(lambda number: fn(a.constant, number), b)
    if _is_number(b):
        return _each(lambda number: fn(number, b.constant), a)
    return None


def _each(fn: Callable[[Number], Number], formula: Formula | None) -> Formula | None:
    if isinstance(formula, Where):
        return Where(formula.conditions, fn(formula.inside), fn(formula.outside))
    return Affine(fn(formula.constant), {}) if _is_number(formula) else None


# What has to be at least 0 for the difference of two integers.
_CONDITIONS: dict[Any, Callable[[Affine], tuple[Affine, ...]]] = {
    operator.ge: lambda difference: (difference,),
    operator.gt: lambda difference: (difference.plus(Affine(1, {}), -1),),
    operator.le: lambda difference: (Affine(0, {}).plus(difference, -1),),
    operator.lt: lambda difference: (_opposite(difference),),
    operator.eq: lambda difference: (difference, Affine(0, {}).plus(difference, -1)),
}


def _comparison(compare: Callable[[Number, Number], bool]) -> Rule:
    def rule(formulas: Formulas, out: Tensor, a: Any, b: Any) -> Formula | None:
        left, right = formulas.read(a, out), formulas.read(b, out)
        by_number = _of_numbers(compare, left, right)
        if by_number is not None or not isinstance(left, Affine) or not isinstance(right, Affine):
            return by_number
        difference = left.plus(right, -1)
        if not isinstance(difference.constant, (int, torch.SymInt)):
            return None
        if compare is not operator.ne:
            return Where(_CONDITIONS[compare](difference), True, False)
        equal = _simplified(Where(_CONDITIONS[operator.eq](difference), True, False), out.shape)
        return _each(operator.not_, equal) if _is_number(equal) else None

    return rule


for _op in ("ge", "gt", "le", "lt", "eq", "ne"):
    _rule(getattr(aten, _op))(_comparison(getattr(operator, _op)))


def _connective(decisive: bool) -> Rule:
    """The rule of *and*, for which False is decisive, and of *or*, for which True is."""

    def rule(formulas: Formulas, out: Tensor, a: Any, b: Any) -> Formula | None:
        left, right = formulas.read(a, out), formulas.read(b, out)
        if out.dtype is not torch.bool:  # bits of integers
            return None
        for one, other in ((left, right), (right, left)):
            if _is_number(one):
                return one if bool(one.constant) is decisive else other
        if decisive or not isinstance(left, Where) or not isinstance(right, Where) or left.outside or right.outside:
            return None
        return Where((*left.conditions, *right.conditions), True, False)

    return rule


_rule(aten.bitwise_and, aten.logical_and)(_connective(decisive=False))
_rule(aten.bitwise_or, aten.logical_or)(_connective(decisive=True))


@_rule(aten.bitwise_not, aten.logical_not)
def _not(formulas: Formulas, out: Tensor, x: Tensor) -> Formula | None:
    return _each(operator.not_, formulas.of(x)) if out.dtype is torch.bool else None


@_rule(aten.where)
def _choose(formulas: Formulas, out: Tensor, where: Tensor, a: Any = 0, b: Any = 0) -> Formula | None:
    condition, left, right = (formulas.read(each, out) for each in (where, a, b))
    if _is_number(condition):
        return left if condition.constant else right
    if not _is_number(left) or not _is_number(right):
        return None
    return _each(lambda number: left.constant if number else right.constant, condition)


@_rule(aten.masked_fill)
def _fill(formulas: Formulas, out: Tensor, x: Tensor, where: Tensor, value: Any) -> Formula | None:
    return _choose(formulas, out, where, value, x)


def _triangle(sign: int) -> Rule:
    def rule(formulas: Formulas, out: Tensor, x: Tensor, diagonal: int = 0) -> Formula | None:
        formula, row, column = formulas.of(x), out.dim() - 2, out.dim() - 1
        if not _is_number(formula):
            return None
        kept = Affine(sign * diagonal, {row: sign, column: -sign})
        return Where((kept,), formula.constant, 0)

    return rule


_rule(aten.tril)(_triangle(1))
_rule(aten.triu)(_triangle(-1))


@_rule(aten.cumsum)
def _running_sum(formulas: Formulas, _out: Tensor, x: Tensor, *_: Any, **__: Any) -> Formula | None:
    formula = formulas.of(x)
    return Affine(0, {}) if _is_number(formula) and formula.constant == 0 else None


@_rule(aten.flip, aten.roll)
def _moved(formulas: Formulas, _out: Tensor, x: Tensor, *_: Any, **__: Any) -> Formula | None:
    formula = formulas.of(x)
    return formula if _is_number(formula) else None


@_rule(aten._to_copy)  # noqa: SLF001
def _converted(formulas: Formulas, out: Tensor, x: Tensor, **_: Any) -> Formula | None:
    formula = formulas.of(x)
    if isinstance(formula, Affine) and not _is_number(formula):
        return formula
    return _each(bool if out.dtype is torch.bool else float if out.dtype.is_floating_point else _integer, formula)


def _integer(number: Number) -> Number:
    return int(number) if math.isfinite(number) else math.nan


@_rule(aten.clone, aten.alias, aten.detach, aten.expand, aten.repeat)
def _same(formulas: Formulas, out: Tensor, x: Tensor, *_: Any, **__: Any) -> Formula | None:
    return formulas.read(x, out)


@_rule(aten.unsqueeze, aten.squeeze, aten.view, aten._unsafe_view)  # noqa: SLF001
def _viewed(formulas: Formulas, out: Tensor, x: Tensor, *_: Any) -> Formula | None:
    """What only adds or drops dimensions of size 1."""
    formula, old, new = formulas.of(x), _wide(x), _wide(out)
    if x.dtype is not out.dtype:  # `x.view(dtype)` reads the bytes as other numbers
        return None
    if _is_number(formula):
        return formula
    kept = list(zip(old, new, strict=False))
    if formula is None or len(old) != len(new) or not all(_equal(x.shape[a], out.shape[b]) for a, b in kept):
        return None
    first = dict.fromkeys(range(x.dim()), Affine(0, {}))
    return formula.at({**first, **{a: _index(b) for a, b in kept}})


def _wide(x: Tensor) -> list[int]:
    """The dimensions of *x* whose size is not known to be 1."""
    return [dim for dim, size in enumerate(x.shape) if not _equal(size, 1)]


@_rule(aten.permute)
def _permuted(formulas: Formulas, _out: Tensor, x: Tensor, dims: Sequence[int]) -> Formula | None:
    formula = formulas.of(x)
    return None if formula is None else formula.at({dim % x.dim(): _index(place) for place, dim in enumerate(dims)})


@_rule(aten.transpose)
def _transposed(formulas: Formulas, out: Tensor, x: Tensor, a: int, b: int) -> Formula | None:
    dims = list(range(x.dim()))
    dims[a], dims[b] = dims[b], dims[a]
    return _permuted(formulas, out, x, dims)


@_rule(aten.slice)
def _sliced(
    formulas: Formulas, _out: Tensor, x: Tensor, dim: int = 0, start: Any = None, _end: Any = None, step: Any = 1
) -> Formula | None:
    formula, dim = formulas.of(x), dim % x.dim()
    first = 0 if start is None else _position(start, x.shape[dim])
    if formula is None or first is None or type(step) is not int:
        return None
    return formula.at({**_own_indices(x), dim: Affine(first, {dim: step})})


@_rule(aten.select)
def _selected(formulas: Formulas, _out: Tensor, x: Tensor, dim: int, index: Any) -> Formula | None:
    formula, place, dim = formulas.of(x), _position(index, x.shape[dim]), dim % x.dim()
    if formula is None or place is None:
        return None
    later = {each: _index(each - 1) for each in range(dim + 1, x.dim())}
    return formula.at({**_own_indices(x), **later, dim: Affine(place, {})})


def _own_indices(x: Tensor) -> dict[int, Affine]:
    return {dim: _index(dim) for dim in range(x.dim())}


def _position(index: Any, size: Any) -> Number | None:
    """*index* counted from the beginning; None if it is not known whether it is negative."""
    if statically_known_true(index >= 0):
        return index
    return size + index if statically_known_true(index < 0) and statically_known_true(size + index >= 0) else None


@_rule(aten.index, aten._unsafe_index)  # noqa: SLF001
def _looked_up(formulas: Formulas, out: Tensor, x: Tensor, indices: Sequence[Tensor | None]) -> Formula | None:
    formula = formulas.of(x)
    if formula is None or _is_number(formula):
        return formula
    places = {}
    for dim, index in enumerate(indices):
        place = None if index is None else formulas.read(index, out)
        if not isinstance(place, Affine) or not statically_known_true(place.lowest(out.shape) >= 0):
            return None
        places[dim] = place
    return formula.at(places) if len(places) == x.dim() else None


@_rule(aten.cat)
def _joined(formulas: Formulas, _out: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> Formula | None:
    """The formula of the last of *tensors*, counted from the front, if those before it hold what it would there."""
    (*earlier, end), dim = tensors, dim % tensors[0].dim()
    last, begin = formulas.of(end), 0
    for x in reversed(earlier):
        begin = begin - x.shape[dim]  # counted from where the last one begins
        formula, place = formulas.of(x), Affine(0, {}) if _equal(x.shape[dim], 1) else _index(dim)
        if not isinstance(formula, Affine) or not isinstance(last, Affine):
            return None
        difference = formula.at({**_own_indices(x), dim: place}).plus(
            last.at({**_own_indices(x), dim: place.plus(Affine(begin, {}))}), -1
        )
        if difference.steps or not _equal(difference.constant, 0):
            return None
    return None if last is None else last.at({**_own_indices(end), dim: Affine(begin, {dim: 1})})
