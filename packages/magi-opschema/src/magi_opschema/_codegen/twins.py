# SPDX-License-Identifier: Apache-2.0
"""Flat twins of functions at the user's signature, compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.schema import python_type
from magi_opschema.errors import ReturnValueError

from .functions import Checked, emit_refusals, emit_twin
from .reject import rejections, writer_of
from .source import compile_source


Purpose = Literal["lowered", "kernel", "fake"]

_DOCS: dict[Purpose, str] = {
    "lowered": "The body of {name} at its flat signature.",
    "kernel": "The body of {name} as the dispatcher calls it; the first real call is checked.",
    "fake": "The fake of {name} at its flat signature.",
}


def compile_twin(
    lowering: SignatureLowering, fn: Callable[..., Any], purpose: Purpose, checked: Checked | None = None
) -> Callable[..., Any]:
    """The flat twin of *fn* for one *purpose*."""
    to = writer_of(lowering, is_description=purpose == "fake")
    reject_output = rejections(lowering.title, lowering.location, returned=ReturnValueError)
    compiled = functools.cache(functools.partial(compile_refusals, lowering))

    def refuse(*args: Any, **kwargs: Any) -> None:
        compiled()(*args, **kwargs)

    doc = _DOCS[purpose].format(name=lowering.name)
    title = f"{purpose} {fn.__module__}.{fn.__qualname__}"
    twin = compile_source(emit_twin(lowering, fn, purpose, doc, to, title, reject_output, refuse, checked))
    if purpose == "lowered":
        twin.__annotations__ = _annotations(lowering)
    return twin


def _annotations(lowering: SignatureLowering) -> dict[str, Any]:
    """The annotations of the flat signature, for torch.library.infer_schema and other readers."""
    returned = [python_type(leaf.schema_type) for leaf in lowering.return_leaves]
    output = None if lowering.returns is None else returned[0] if len(returned) == 1 else tuple[tuple(returned)]  # type: ignore[misc]
    return {**{known.name: python_type(known.schema_type) for known in lowering.arguments}, "return": output}


def compile_refusals(lowering: SignatureLowering) -> Callable[..., None]:
    """A function at the flat signature that only checks the values."""
    return compile_source(emit_refusals(lowering, writer_of(lowering), f"values {lowering.name}"))
