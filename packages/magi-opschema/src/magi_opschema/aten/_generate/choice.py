# SPDX-License-Identifier: Apache-2.0
"""Which variant of a base a call means; the decision is made when code is generated.

Most bases merge into one Python signature whose body tests a few parameters:

    def sum(input, dim=UNSET, keepdim=UNSET, *, out=None, **options):
        if dim is UNSET and keepdim is UNSET:      # sum(Tensor self)
            ...
        ...                                        # sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False)

`merge` returns None if that is impossible, because one name is at two positions or one position has two names
(`arange(end)` and `arange(start, end)`, `max(x, dim)` and `max(x, other)`).
"""

from __future__ import annotations

import itertools as it
import re
from dataclasses import dataclass

from .schema import OPTIONS, Base, Parameter, Type, Variant


UNSET = "UNSET"
"""The name in generated code that stands for an argument that was not given."""

_NUMBERS = frozenset({"Scalar", "SymInt", "bool", "float", "int"})
_TESTS = {
    "Tensor": "isinstance({}, Tensor)",
    "list": "isinstance({}, (list, tuple))",
    "str": "isinstance({}, str)",
    "dtype": "isinstance({}, dtype)",
}


@dataclass(frozen=True)
class MergedParameter:
    """One parameter of the merged signature: `default` is Python text, `UNSET`, or None for a required one."""

    name: str
    types: tuple[Type, ...]
    default: str | None
    kwarg_only: bool


@dataclass(frozen=True)
class Branch:
    """One variant behind its condition; an empty condition always holds."""

    condition: str
    variant: Variant
    unexpected: tuple[str, ...]


@dataclass(frozen=True)
class Merged:
    """One signature for all variants of a base, and the branches of its body."""

    params: tuple[MergedParameter, ...]
    takes_options: bool
    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class _Test:
    """An expression that is true for calls of one variant and false for calls of another.

    `unset` and `given` name the parameters that are absent if it is true, and if it is false. `doubt` is 0 if every
    call is distinguished, and larger if some call fits both; tests with less doubt come first.
    """

    expression: str
    doubt: int
    unset: frozenset[str] = frozenset()
    unset_if_false: frozenset[str] = frozenset()


def _kinds(type_: Type) -> frozenset[str]:
    """The kinds of Python values that a type accepts, without None."""
    if type_.is_list:
        return frozenset({"list", "number"}) if type_.sized else frozenset({"list"})
    if type_.element in _NUMBERS:
        return frozenset({"number"})
    return frozenset({"dtype" if type_.element == "ScalarType" else type_.element})


def merge(base: Base) -> Merged | None:
    """One signature for every variant of *base*, or None if the variants cannot be merged."""
    positional = _positional_names(base)
    if positional is None:
        return None
    order = _order(list(base.variants))
    if order is None:
        return None
    words = {word for _, tests in order for test in tests for word in re.findall(r"\w+", test.expression)}
    tested = words - {"isinstance", "and", "or", "not", "is", "list", "tuple", "str", "dtype", "Tensor", UNSET}
    params = _merged_parameters(base, positional, tested)
    explicit = {param.name for param in params}
    leftover = any(p.name not in explicit for variant in base.variants for p in variant.params)
    return Merged(params, leftover, _branches(order, params))


def _positional_names(base: Base) -> list[str] | None:
    first = {p.name: p for v in reversed(base.variants) for p in reversed(v.params)}
    keyword_first = {name for name, p in first.items() if p.kwarg_only}
    rows = [[p.name for p in v.params if not p.kwarg_only and p.name not in keyword_first] for v in base.variants]
    names: list[str] = []
    for column in it.zip_longest(*rows):
        found = {name for name in column if name is not None}
        if len(found) != 1 or found & set(names):
            return None
        names += found
    for variant in base.variants:
        mine = [p for p in variant.params if not p.kwarg_only]
        # `add.Scalar(self, other, alpha)`: alpha becomes keyword-only only if nothing positional comes after it.
        moved = [p.name in keyword_first for p in mine]
        if moved != sorted(moved):
            return None
    return names


def _order(variants: list[Variant]) -> list[tuple[Variant, list[_Test]]] | None:
    """The variants, each with the tests against all later ones; the most certain and simplest ones come first."""
    remaining, ordered = list(variants), []
    while remaining:
        ranked = []
        for position, variant in enumerate(remaining):
            tests = [_tell_apart(variant, other) for other in remaining if other is not variant]
            found = [test for test in tests if test is not None]
            if len(found) == len(tests):
                ranked.append((sum(test.doubt for test in found), position, variant, found))
        if not ranked:
            return None
        _, _, variant, tests_of_it = min(ranked, key=lambda entry: entry[:2])
        ordered.append((variant, tests_of_it))
        remaining.remove(variant)
    return ordered


def _tell_apart(variant: Variant, other: Variant) -> _Test | None:
    mine = {p.name: p for p in variant.params}
    theirs = {p.name: p for p in other.params}
    by_kind = _kind_test(mine, theirs)
    if by_kind is not None and by_kind.doubt <= 1:
        return by_kind
    only_mine = [p for p in variant.params if p.name not in theirs and p.name not in OPTIONS]
    only_theirs = [p for p in other.params if p.name not in mine and p.name not in OPTIONS]
    if any(p.required for p in only_mine):
        names = frozenset(p.name for p in only_mine)
        expression = " or ".join(f"{p.name} is not {UNSET}" for p in only_mine)
        return _Test(expression, 0, unset_if_false=names)
    certain = any(p.required for p in only_theirs)
    if certain or (only_theirs and by_kind is None):
        expression = " and ".join(f"{p.name} is {UNSET}" for p in only_theirs)
        return _Test(expression, 0 if certain else 3, unset=frozenset(p.name for p in only_theirs))
    return by_kind


def _kind_test(mine: dict[str, Parameter], theirs: dict[str, Parameter]) -> _Test | None:
    differing = [
        (name, _kinds(mine[name].type), _kinds(theirs[name].type))
        for name in mine
        if name in theirs and not _kinds(mine[name].type) & _kinds(theirs[name].type)
    ]
    if not differing:
        return None
    certain = [entry for entry in differing if mine[entry[0]].required and theirs[entry[0]].required]
    chosen = certain[:1] or differing
    doubt = 0 if certain else 2
    if all(len(own) == 1 and own <= _TESTS.keys() for _, own, _ in chosen):
        return _Test(" or ".join(_TESTS[next(iter(own))].format(name) for name, own, _ in chosen), doubt)
    if all(len(foreign) == 1 and foreign <= _TESTS.keys() for _, _, foreign in chosen):
        refused = [f"not {_TESTS[next(iter(foreign))].format(name)}" for name, _, foreign in chosen]
        refused += [
            f"{name} is not None"
            for name, _, _ in chosen
            if theirs[name].type.optional and not mine[name].type.optional
        ]
        return _Test(" and ".join(refused), doubt + 1)
    return None


def _merged_parameters(base: Base, positional: list[str], tested: set[str]) -> tuple[MergedParameter, ...]:
    by_name: dict[str, list[Parameter]] = {}
    for variant in base.variants:
        for param in variant.params:
            by_name.setdefault(param.name, []).append(param)
    keyword = [
        name
        for name, params in by_name.items()
        if name not in positional and (name in tested or any(p.name != p.schema_name for p in params))
    ]
    merged = []
    optional = False
    for name in positional + keyword:
        params = by_name[name]
        kwarg_only = name in keyword
        defaults = {p.default_text for p in params if not p.required}
        default = defaults.pop() if len(defaults) == 1 else None
        if defaults or len(params) < len(base.variants) or (default is None and optional and not kwarg_only):
            default = UNSET
        optional = optional or default is not None
        merged.append(MergedParameter(name, tuple(dict.fromkeys(p.type for p in params)), default, kwarg_only))
    return tuple(merged)


def _conjunction(tests: list[_Test]) -> list[str]:
    """The conjunction of all *tests* without redundant parts: a parameter that is of some type is given."""
    parts: list[str] = []
    for test in tests:
        parts += [test.expression] if " or " in test.expression else test.expression.split(" and ")
    parts = list(dict.fromkeys(parts))
    of_a_type = [part for part in parts if part.startswith("isinstance(") and " or " not in part]
    given = {f"{part[len('isinstance(') :].split(',')[0]} is not {UNSET}" for part in of_a_type}
    return [part for part in parts if not given & set(part.split(" or "))]


def _branches(order: list[tuple[Variant, list[_Test]]], params: tuple[MergedParameter, ...]) -> tuple[Branch, ...]:
    branches = []
    known_unset: set[str] = set()
    for variant, tests in order:
        expressions = _conjunction(tests)
        wrapped = [f"({e})" if len(expressions) > 1 and " or " in e else e for e in expressions]
        unset = known_unset.union(*(test.unset for test in tests))
        own = {p.name for p in variant.params}
        unexpected = tuple(p.name for p in params if p.name not in own | unset)
        branches.append(Branch(" and ".join(wrapped), variant, unexpected))
        if len(expressions) == 1:
            known_unset |= tests[0].unset_if_false
    return tuple(branches)
