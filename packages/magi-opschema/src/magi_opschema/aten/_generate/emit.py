# SPDX-License-Identifier: Apache-2.0
"""The generated functions.

One function for each base. Its first line chooses where the calls go: to the dispatcher's own callables, to ATen's
`OpOverload`s while Dynamo traces, because it can inline those, or to the slots after a kernel is registered:

    def sub(input, other, *, out=None, **options):
        aten = _sub.traced if tracing() else _sub.eager
        if isinstance(other, Tensor):
            if out is None:
                return aten.Tensor(input, other, **options)
            aten.out(input, other, **options, out=out)
            return out
        ...

Which variant a call means is decided when code is generated. Most bases merge into one Python signature whose body
tests a few parameters:

    def sum(input, dim=UNSET, keepdim=UNSET, *, out=None, **options):
        if dim is UNSET and keepdim is UNSET:      # sum(Tensor self)
            ...
        ...                                        # sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False)

`merge` returns None if that is impossible, because one name is at two positions or one position has two names
(`arange(end)` and `arange(start, end)`, `max(x, dim)` and `max(x, other)`).

Stubs have one signature for each variant, with every argument, so that a type checker resolves each call to one.
"""

from __future__ import annotations

import itertools as it
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from magi_opschema.aten.errors import SchemaTypeError

from .schema import OPTIONS, Base, Overload, Parameter, Variant, is_optional, python_name, takes_one


if TYPE_CHECKING:
    from torchgen.model import Type  # type: ignore[import-untyped]


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
    if type_.is_list_like():
        return frozenset({"list", "number"}) if takes_one(type_) else frozenset({"list"})
    name = str(type_).removesuffix("?")
    return frozenset({"number" if name in _NUMBERS else "dtype" if name == "ScalarType" else name})


def merge(base: Base) -> Merged | None:
    """One signature for every variant of *base*, or None if the variants cannot be merged."""
    positional, order = _positional_names(base), _order(base.variants)
    if positional is None or order is None:
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


def _order(variants: tuple[Variant, ...]) -> list[tuple[Variant, list[_Test]]] | None:
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
            if is_optional(theirs[name].type) and not is_optional(mine[name].type)
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
        if name not in positional and (name in tested or any(p.name != p.argument.name for p in params))
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


_INDENT = "    "

_TYPES = {
    "Device": ("Device", "ANY"),
    "Dimname": ("str", "STR"),  # up to torch 2.12
    "Generator": ("Generator", "ANY"),
    "Layout": ("layout", "ANY"),
    "MemoryFormat": ("memory_format", "ANY"),
    "Scalar": ("Scalar", "NUMBER"),
    "ScalarType": ("dtype", "DTYPE"),
    "Storage": ("UntypedStorage", "ANY"),
    "Stream": ("Stream", "ANY"),
    "SymBool": ("bool | SymBool", "ANY"),
    "SymInt": ("int | SymInt", "INT"),
    "Tensor": ("Tensor", "TENSOR"),
    "bool": ("bool", "BOOL"),
    "float": ("float", "FLOAT"),
    "int": ("int", "INT"),
    "str": ("str", "STR"),
}
"""The annotation of each schema type, and the name of the runtime's check for it."""


def emit_base(base: Base) -> str:
    """The source of one base: its cell of overloads, and its function."""
    pairs = ""
    for variant in base.variants:
        names = (f'"{o.attribute}"' if o is not None else "None" for o in (variant.functional, variant.out))
        pairs += f"{_INDENT}({', '.join(names)}),\n"
    cell = f'_{base.function} = op(\n{_INDENT}"{base.name}",\n{pairs})\n'
    merged = merge(base)
    if merged is not None:
        return f"{cell}\n\n{_function(base, merged, base.function)}"
    # A function for each variant, and one that chooses by the arguments at run time.
    blocks, candidates = [cell], []
    for variant in base.variants:
        name = f"_{base.function}__{python_name(variant.leading.attribute)}"
        alone = Base(base.name, (variant,))
        blocks += [_function(alone, signature, name) for signature in [merge(alone)] if signature is not None]
        candidates.append(_candidate(variant, name))
    listed = "".join(f"{_INDENT}{candidate},\n" for candidate in candidates)
    blocks.append(f'_{base.function}__choice = Choice(\n{_INDENT}"{base.canonical}",\n{listed})\n')
    signature = f"*args: Any, out: {_outs(base.variants)} | None = None, **kwargs: Any"
    lines = [f"def {base.function}({signature}) -> {_returns(base.variants)}:", *_indented(_docstring(base))]
    lines += _indented([f"return _{base.function}__choice.pick(args, kwargs)(*args, **kwargs, out=out)"])
    return "\n\n".join([*blocks, "\n".join(lines) + "\n"])


def _function(base: Base, merged: Merged, name: str) -> str:
    """The source of the function *name*, which chooses between the variants of *base*."""
    spelt = [
        f"{p.name}: {union(p.types)}{'' if p.default is None else f' = {p.default}'}"
        for p in sorted(merged.params, key=lambda p: p.kwarg_only)
    ]
    positional = sum(not p.kwarg_only for p in merged.params)
    spelt[positional:positional] = ["*", f"out: {_outs(base.variants)} | None = None"]
    spelt += ["**options: Any"] if merged.takes_options else []
    lines = [f"def {name}({', '.join(spelt)}) -> {_returns(base.variants)}:"]
    lines += _indented(_docstring(base)) if name == base.function else []
    lines += _indented([f"aten = _{base.function}.traced if tracing() else _{base.function}.eager"])
    explicit = {param.name: param for param in merged.params}
    for branch in merged.branches:
        body = _body(branch.variant, explicit, takes_options=merged.takes_options)
        if branch.unexpected:
            names = ", ".join(f"{name}={name}" for name in branch.unexpected)
            body.insert(0, f'refuse("{branch.variant.leading.qualified}", {names})')
        lines += _indented([f"if {branch.condition}:", *_indented(body)] if branch.condition else body)
    return "\n".join(lines) + "\n"


def _candidate(variant: Variant, name: str) -> str:
    def spec(params: list[Parameter]) -> str:
        return "{" + ", ".join(f'"{p.name}": {runtime_kind(p.type)}' for p in params) + "}"

    required = [p for p in variant.params if p.required]
    optional = [p for p in variant.params if not p.required]
    keyword = [p for p in variant.params if p.kwarg_only]
    names = "{" + ", ".join(f'"{p.name}"' for p in keyword) + "}" if keyword else "set()"
    return f"Candidate({name}, required={spec(required)}, optional={spec(optional)}, keyword={names})"


def _docstring(base: Base) -> list[str]:
    lines = [f'"""ATen\'s `{base.canonical}`.', ""]
    for variant in base.variants:
        lines.append(variant.leading.schema)
        if variant.functional is not None:
            lines.append(f"    out=: {variant.out.qualified if variant.out is not None else 'composed'}")
    return [*lines, '"""']


def _body(variant: Variant, explicit: dict[str, MergedParameter], *, takes_options: bool) -> list[str]:
    def call(overload: Overload, *outs: str) -> str:
        given = [p for p in overload.params if p.name in explicit]
        arguments = [_value(p, explicit) for p in given if not p.kwarg_only]
        arguments += [f"{p.argument.name}={_value(p, explicit)}" for p in given if p.kwarg_only]
        options = ["**options"] if takes_options else []
        return f"aten.{python_name(overload.attribute)}({', '.join([*arguments, *options, *outs])})"

    if variant.out is None:
        result = call(variant.leading)
        return [f"if out is None:\n{_INDENT}return {result}", f"return write_out({result}, out)"]
    out_params = {p.name for p in variant.out.params}
    missing = f"out = {_fresh(variant)}" if variant.functional is None else f"return {call(variant.functional)}"
    lines = [f"if out is None:\n{_INDENT}{missing}"]
    if any(p.name in OPTIONS and p.name not in out_params for p in variant.params):
        lines.append("options = out_options(out, options)")
    names = [p.argument.name for p in variant.out.outs]
    if variant.out_count == 0:
        return [*lines, call(variant.out, f"{names[0]}=list(out)"), "return out"]
    if variant.out_count == 1:
        return [*lines, call(variant.out, f"{names[0]}=out"), "return out"]
    unpacked = [f"out{position}" for position in range(len(names))]
    given = [f"{name}={value}" for name, value in zip(names, unpacked, strict=True)]
    return [*lines, f"{', '.join(unpacked)} = out", call(variant.out, *given), "return out"]


def _fresh(variant: Variant) -> str:
    """The text of empty outs for an overload that ATen has only in its out form, which resizes them."""
    like = next(p.name for p in variant.params if str(p.type) == "Tensor")
    tensors = [f"{like}.new_empty(0)"] * variant.out_count
    return tensors[0] if len(tensors) == 1 else f"({', '.join(tensors)})"


def _value(parameter: Parameter, explicit: dict[str, MergedParameter]) -> str:
    merged = explicit[parameter.name]
    if merged.default == UNSET and not parameter.required:
        return f"{parameter.default_text} if {parameter.name} is {UNSET} else {parameter.name}"
    return parameter.name


def _outs(variants: tuple[Variant, ...]) -> str:
    return " | ".join(dict.fromkeys(map(out_text, variants)))


def _returns(variants: tuple[Variant, ...]) -> str:
    return " | ".join(dict.fromkeys(map(returns_text, variants)))


def _indented(lines: list[str]) -> list[str]:
    return [_INDENT + part if part else part for line in lines for part in line.split("\n")]


def stub_base(base: Base) -> str:
    """The stub of one base."""
    merged = merge(base)
    # In the order of the tests in the function's body: a signature that fits more calls comes after narrower ones.
    variants = base.variants if merged is None else [branch.variant for branch in merged.branches]
    signatures = []
    for variant in variants:
        positional, keyword = parameter_texts(variant)
        # A type checker requires parameters without a default first; after the star, any order is allowed.
        parts = [*positional, "*", f"out: {out_text(variant)} | None = None", *keyword]
        body = "".join(f"    {part},\n" for part in parts)
        signatures.append(f"def {base.function}(\n{body}) -> {returns_text(variant)}: ...\n")
    return signatures[0] if len(signatures) == 1 else "".join(f"@overload\n{text}" for text in signatures)


def parameter_texts(variant: Variant) -> tuple[list[str], list[str]]:
    """The positional and the keyword-only parameters of a variant, each with its annotation and default."""
    texts: tuple[list[str], list[str]] = ([], [])
    for p in variant.params:
        text = f"{p.name}: {annotation(p.type)}"
        texts[p.kwarg_only].append(text if p.required else f"{text} = {p.default_text}")
    return texts


def annotation(type_: Type) -> str:
    """The Python annotation of a schema type: `int[2]?` is `int | Sequence[int] | None`."""
    if (listed := type_.is_list_like()) is not None:
        inner = annotation(listed.elem)
        text = f"{inner} | Sequence[{inner}]" if takes_one(type_) else f"Sequence[{inner}]"
    elif (text := _TYPES.get(str(type_).removesuffix("?"), ("", ""))[0]) == "":
        msg = f"schema type {str(type_)!r} has no Python annotation here; magi-opschema is older than this torch"
        raise SchemaTypeError(msg)
    return f"{text} | None" if is_optional(type_) else text


def union(types: tuple[Type, ...]) -> str:
    """The annotation of a parameter that has different types in different overloads."""
    parts = [part for type_ in types for part in re.split(r" \| (?![^\[]*\])", annotation(type_))]
    unique = list(dict.fromkeys(part for part in parts if part != "None"))
    return " | ".join([*unique, "None"] if "None" in parts else unique)


def runtime_kind(type_: Type) -> str:
    """The name of the runtime's check for a type, for example `maybe(INT)`."""
    if type_.is_list_like():
        kind = "INT_OR_LIST" if takes_one(type_) else "LIST"
    else:
        _, kind = _TYPES.get(str(type_).removesuffix("?"), ("", "ANY"))
    return f"maybe({kind})" if is_optional(type_) else kind


def returns_text(variant: Variant) -> str:
    """The annotation of the result of a variant."""
    if variant.out_count == 0:
        return "list[Tensor]"
    annotations = [annotation(r.type) for r in variant.leading.function.func.returns] or ["Tensor"] * variant.out_count
    return annotations[0] if len(annotations) == 1 else f"tuple[{', '.join(annotations)}]"


def out_text(variant: Variant) -> str:
    """The annotation of a variant's `out=` without its None."""
    if variant.out_count == 0:
        return "Sequence[Tensor]"
    return "Tensor" if variant.out_count == 1 else f"tuple[{', '.join(['Tensor'] * variant.out_count)}]"
