# SPDX-License-Identifier: Apache-2.0
"""Flat twins of functions at the user's signature, compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.schema import python_type

from .functions import Checked, Purpose, TwinCalls, emit_refusals, emit_twin
from .reject import writer_of
from .source import compile_source


def compile_twin(
    lowering: SignatureLowering, fn: Callable[..., Any], purpose: Purpose, checked: Checked | None = None
) -> Callable[..., Any]:
    """The flat twin of *fn* for one *purpose*."""
    compiled = functools.cache(functools.partial(compile_refusals, lowering))

    def refuse(*args: Any, **kwargs: Any) -> None:
        compiled()(*args, **kwargs)

    twin = compile_source(emit_twin(lowering, purpose, TwinCalls(fn, refuse, checked)))
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
