# SPDX-License-Identifier: Apache-2.0
"""Flat twins of functions at the user's signature, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._checks import CallCheck
from ._emit import Writer
from ._functions import emit_lowered, emit_refusals
from ._lowering import SignatureLowering
from ._reject import rejections
from ._source import compile_source
from .errors import ReturnValueError


_DOCS = {
    "lowered": "The body of {name} at its flat signature.",
    "kernel": "The body of {name} as the dispatcher calls it; the first real call is checked.",
    "fake": "The fake of {name} at its flat signature.",
}


def compile_lowered(
    lowering: SignatureLowering, fn: Callable[..., Any], purpose: str, check: CallCheck | None = None
) -> Callable[..., Any]:
    """The flat twin of *fn* for one *purpose*: `lowered`, `kernel` or `fake`."""
    to = Writer(lowering.prefix, rejections(lowering.name, lowering.location))
    reject_output = rejections(lowering.name, lowering.location, returned=ReturnValueError)
    to.is_description = purpose == "fake"
    doc = _DOCS[purpose].format(name=lowering.name)
    title = f"{purpose} {fn.__module__}.{fn.__qualname__}"
    return compile_source(emit_lowered(lowering, fn, purpose, doc, to, title, reject_output, check))


def compile_refusals(lowering: SignatureLowering) -> Callable[..., None]:
    """The check of values that a function at the flat signature makes, on its own."""
    to = Writer(lowering.prefix, rejections(lowering.name, lowering.location))
    return compile_source(emit_refusals(lowering, to, f"values {lowering.name}"))
