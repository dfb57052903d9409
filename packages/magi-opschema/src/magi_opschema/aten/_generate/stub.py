# SPDX-License-Identifier: Apache-2.0
"""Stubs: one signature for each variant, with every argument, so that a type checker resolves each call to one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .choice import merge
from .python_text import annotation, default_of, out_text, returns_text


if TYPE_CHECKING:
    from .schema import Base, Variant


def stub_base(base: Base) -> str:
    """The stub of one base."""
    merged = merge(base)
    # In the order of the tests in the function's body: a signature that fits more calls comes after narrower ones.
    variants = base.variants if merged is None else [branch.variant for branch in merged.branches]
    signatures = [_signature(base, variant) for variant in variants]
    if len(signatures) == 1:
        return signatures[0]
    return "".join(f"@overload\n{signature}" for signature in signatures)


def _signature(base: Base, variant: Variant) -> str:
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
