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

from .choice import UNSET, Branch, Merged, MergedParameter, merge
from .python_text import annotation, default_of, out_text, returns_text, runtime_kind, union
from .schema import OPTIONS, Base, Overload, Parameter, Variant


_INDENT = "    "


def emit_base(base: Base) -> str:
    """The source of one base: its cell of overloads, and its function."""
    pairs = "".join(f"{_INDENT}{_pair(variant)},\n" for variant in base.variants)
    cell = f'_{base.function} = op(\n{_INDENT}"{base.name}",\n{pairs})\n'
    merged = merge(base)
    return cell + "\n\n" + (_emit_merged(base, merged) if merged is not None else _emit_choice(base))


def _emit_merged(base: Base, merged: Merged) -> str:
    params = [_merged_text(param) for param in merged.params if not param.kwarg_only]
    keyword = [_merged_text(param) for param in merged.params if param.kwarg_only]
    signature = _signature(params, keyword, base.variants, takes_options=merged.takes_options)
    explicit = {param.name: param for param in merged.params}
    lines = [f"def {base.function}({signature}) -> {_all_returns(base.variants)}:"]
    lines += _indented(_docstring(base.canonical, base.variants))
    lines += _indented([_place(base)])
    for branch in merged.branches:
        body = _unexpected(branch) + _body(branch.variant, explicit, takes_options=merged.takes_options)
        lines += _indented([f"if {branch.condition}:", *_indented(body)] if branch.condition else body)
    return "\n".join(lines) + "\n"


def _emit_choice(base: Base) -> str:
    """The source of a function for each variant, and of one that chooses by the arguments at run time."""
    blocks, candidates = [], []
    for variant in base.variants:
        name = f"_{base.function}__{variant.leading.attribute}"
        blocks.append(_emit_variant(base, variant, name))
        candidates.append(_candidate(variant, name))
    listed = "".join(f"{_INDENT}{candidate},\n" for candidate in candidates)
    blocks.append(f'_{base.function}__choice = Choice(\n{_INDENT}"{base.canonical}",\n{listed})\n')
    signature = f"*args: Any, out: {_all_outs(base.variants)} | None = None, **kwargs: Any"
    lines = [f"def {base.function}({signature}) -> {_all_returns(base.variants)}:"]
    lines += _indented(_docstring(base.canonical, base.variants))
    lines += _indented([f"return _{base.function}__choice.pick(args, kwargs)(*args, **kwargs, out=out)"])
    return "\n\n".join([*blocks, "\n".join(lines) + "\n"])


def _emit_variant(base: Base, variant: Variant, name: str) -> str:
    params = [p for p in variant.params if not p.kwarg_only or p.name != p.schema_name]
    explicit = {
        p.name: MergedParameter(p.name, (p.type,), None if p.required else default_of(p), p.kwarg_only) for p in params
    }
    takes_options = len(params) < len(variant.params)
    positional = [_merged_text(param) for param in explicit.values() if not param.kwarg_only]
    keyword = [_merged_text(param) for param in explicit.values() if param.kwarg_only]
    signature = _signature(positional, keyword, (variant,), takes_options=takes_options)
    lines = [f"def {name}({signature}) -> {_all_returns((variant,))}:"]
    lines += _indented([_place(base), *_body(variant, explicit, takes_options=takes_options)])
    return "\n".join(lines) + "\n"


def _candidate(variant: Variant, name: str) -> str:
    def spec(params: list[Parameter]) -> str:
        return "{" + ", ".join(f'"{p.name}": {runtime_kind(p.type)}' for p in params) + "}"

    required = [p for p in variant.params if p.required]
    optional = [p for p in variant.params if not p.required]
    keyword = [p for p in variant.params if p.kwarg_only]
    names = "{" + ", ".join(f'"{p.name}"' for p in keyword) + "}" if keyword else "set()"
    return f"Candidate({name}, required={spec(required)}, optional={spec(optional)}, keyword={names})"


def _pair(variant: Variant) -> str:
    names = (None if overload is None else overload.name or "default" for overload in (variant.functional, variant.out))
    return "({}, {})".format(*(f'"{name}"' if name is not None else "None" for name in names))


def _place(base: Base) -> str:
    return f"aten = _{base.function}.traced if tracing() else _{base.function}.eager"


def _signature(positional: list[str], keyword: list[str], variants: tuple[Variant, ...], *, takes_options: bool) -> str:
    parts = [*positional, "*", f"out: {_all_outs(variants)} | None = None", *keyword]
    return ", ".join([*parts, "**options: Any"] if takes_options else parts)


def _merged_text(param: MergedParameter) -> str:
    text = f"{param.name}: {union(param.types)}"
    if param.default is None:
        return text
    return f"{text} = {param.default}"


def _docstring(canonical: str, variants: tuple[Variant, ...]) -> list[str]:
    lines = [f'"""ATen\'s `{canonical}`.', ""]
    for variant in variants:
        lines.append(variant.leading.schema)
        if variant.functional is not None:
            lines.append(f"    out=: {variant.out.qualified if variant.out is not None else 'composed'}")
    return [*lines, '"""']


def _unexpected(branch: Branch) -> list[str]:
    if not branch.unexpected:
        return []
    names = ", ".join(f"{name}={name}" for name in branch.unexpected)
    return [f'refuse("{branch.variant.leading.qualified}", {names})']


def _body(variant: Variant, explicit: dict[str, MergedParameter], *, takes_options: bool) -> list[str]:
    def call(overload: Overload, *outs: str) -> str:
        given = [p for p in overload.params if p.name in explicit]
        arguments = [_value(p, explicit) for p in given if not p.kwarg_only]
        arguments += [f"{p.schema_name}={_value(p, explicit)}" for p in given if p.kwarg_only]
        options = ["**options"] if takes_options else []
        return f"aten.{overload.attribute}({', '.join([*arguments, *options, *outs])})"

    if variant.out is None:
        result = call(variant.leading)
        return [f"if out is None:\n{_INDENT}return {result}", f"return write_out({result}, out)"]
    missing = f"out = {_fresh(variant)}" if variant.functional is None else f"return {call(variant.functional)}"
    lines = [f"if out is None:\n{_INDENT}{missing}"]
    if any(p.name in OPTIONS and p.name not in variant.out_params for p in variant.params):
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
        return f"{default_of(parameter)} if {parameter.name} is {UNSET} else {parameter.name}"
    return parameter.name


def _all_outs(variants: tuple[Variant, ...]) -> str:
    return " | ".join(dict.fromkeys(out_text(variant.out_count) for variant in variants))


def _all_returns(variants: tuple[Variant, ...]) -> str:
    return " | ".join(dict.fromkeys(returns_text(variant.leading.returns, variant.out_count) for variant in variants))


def _indented(lines: list[str]) -> list[str]:
    return [_INDENT + part if part else part for line in lines for part in line.split("\n")]


def stub_base(base: Base) -> str:
    """The stub of one base."""
    merged = merge(base)
    # In the order of the tests in the function's body: a signature that fits more calls comes after narrower ones.
    variants = base.variants if merged is None else [branch.variant for branch in merged.branches]
    signatures = [_stub_signature(base, variant) for variant in variants]
    if len(signatures) == 1:
        return signatures[0]
    return "".join(f"@overload\n{signature}" for signature in signatures)


def _stub_signature(base: Base, variant: Variant) -> str:
    positional = [p for p in variant.params if not p.kwarg_only]
    keyword = [p for p in variant.params if p.kwarg_only]
    parts = []
    for p in [*positional, *keyword]:
        text = f"{p.name}: {annotation(p.type)}"
        parts.append(text if p.required else f"{text} = {default_of(p)}")
    out = f"out: {out_text(variant.out_count)} | None = None"
    # A type checker requires parameters without a default first; after the star, any order is allowed.
    parts[len(positional) : len(positional)] = ["*", out]
    returns = returns_text(variant.leading.returns, variant.out_count)
    body = "".join(f"    {part},\n" for part in parts)
    return f"def {base.function}(\n{body}) -> {returns}: ...\n"
