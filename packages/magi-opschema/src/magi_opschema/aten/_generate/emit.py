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

Stubs have one signature for each variant, with every argument, so that a type checker resolves each call to one.
"""

from __future__ import annotations

import re

from magi_opschema.aten.errors import SchemaTypeError

from .choice import UNSET, Merged, MergedParameter, merge
from .schema import OPTIONS, Base, Overload, Parameter, Type, Variant, python_name


_INDENT = "    "

_ANNOTATIONS = {
    "Device": "Device",
    "Dimname": "str",
    "Generator": "Generator",
    "Layout": "layout",
    "MemoryFormat": "memory_format",
    "Scalar": "Scalar",
    "ScalarType": "dtype",
    "Storage": "UntypedStorage",
    "Stream": "Stream",
    "SymBool": "bool | SymBool",
    "SymInt": "int | SymInt",
    "Tensor": "Tensor",
    "bool": "bool",
    "float": "float",
    "int": "int",
    "str": "str",
}

_RUNTIME_KINDS = {
    "Dimname": "STR",  # up to torch 2.12
    "Scalar": "NUMBER",
    "ScalarType": "DTYPE",
    "SymInt": "INT",
    "Tensor": "TENSOR",
    "bool": "BOOL",
    "float": "FLOAT",
    "int": "INT",
    "str": "STR",
}


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
        arguments += [f"{p.schema_name}={_value(p, explicit)}" for p in given if p.kwarg_only]
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
    names = [p.schema_name for p in variant.out.outs]
    if variant.out_count == 0:
        return [*lines, call(variant.out, f"{names[0]}=list(out)"), "return out"]
    if variant.out_count == 1:
        return [*lines, call(variant.out, f"{names[0]}=out"), "return out"]
    unpacked = [f"out{position}" for position in range(len(names))]
    given = [f"{name}={value}" for name, value in zip(names, unpacked, strict=True)]
    return [*lines, f"{', '.join(unpacked)} = out", call(variant.out, *given), "return out"]


def _fresh(variant: Variant) -> str:
    """The text of empty outs for an overload that ATen has only in its out form, which resizes them."""
    like = next(p.name for p in variant.params if p.type.text == "Tensor")
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
    element = Type(type_.element)
    if element.text.removesuffix("?") not in _ANNOTATIONS and not element.is_list:
        msg = f"schema type {type_.text!r} has no Python annotation here; magi-opschema is older than this torch"
        raise SchemaTypeError(msg)
    if not type_.is_list:
        text = _ANNOTATIONS[element.text]
    else:
        inner = annotation(element)
        text = f"{inner} | Sequence[{inner}]" if type_.sized else f"Sequence[{inner}]"
    return f"{text} | None" if type_.optional else text


def union(types: tuple[Type, ...]) -> str:
    """The annotation of a parameter that has different types in different overloads."""
    parts = [part for type_ in types for part in re.split(r" \| (?![^\[]*\])", annotation(type_))]
    unique = list(dict.fromkeys(part for part in parts if part != "None"))
    return " | ".join([*unique, "None"] if "None" in parts else unique)


def runtime_kind(type_: Type) -> str:
    """The name of the runtime's check for a type, for example `maybe(INT)`."""
    of_lists = "INT_OR_LIST" if type_.sized else "LIST"
    kind = of_lists if type_.is_list else _RUNTIME_KINDS.get(type_.element, "ANY")
    return f"maybe({kind})" if type_.optional else kind


def returns_text(variant: Variant) -> str:
    """The annotation of the result of a variant."""
    if variant.out_count == 0:
        return "list[Tensor]"
    annotations = [annotation(r.type) for r in variant.leading.returns] or ["Tensor"] * variant.out_count
    return annotations[0] if len(annotations) == 1 else f"tuple[{', '.join(annotations)}]"


def out_text(variant: Variant) -> str:
    """The annotation of a variant's `out=` without its None."""
    if variant.out_count == 0:
        return "Sequence[Tensor]"
    return "Tensor" if variant.out_count == 1 else f"tuple[{', '.join(['Tensor'] * variant.out_count)}]"
