# SPDX-License-Identifier: Apache-2.0
"""The form of a mutating op that writes into nothing, for graphs in which torch cannot express the write itself.

    mylib::fill              (Tensor x, Tensor(a0!) out) -> (Tensor, SymInt)
    mylib::fill__functional  (Tensor x, Tensor out) -> (Tensor, SymInt, Tensor)

AOTAutograd writes a mutating op as `auto_functionalized`. That refuses an op that returns anything else than Tensors
(torch/_higher_order_ops/auto_functionalize.py, `can_auto_functionalize`), and Inductor cannot compile it where such an
op has one output and gets nothing to write into, an empty list or None. There, a graph of ours has the functional form,
which returns new contents, and copies them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from magi_opschema._model.layout import Flat, as_output, as_tuple, tensors_in
from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.schema import NO_DEFAULT, schema_text


def needs_functional_form(lowering: SignatureLowering) -> bool:
    """True if torch cannot make every call of the mutating op that *lowering* describes functional."""
    returned = [leaf.schema_type for leaf in lowering.return_leaves]
    may_write_nothing = all(argument.schema_type != "Tensor" for argument in lowering.mutated)
    return bool(lowering.mutated) and (
        set(returned) - {"Tensor"} != set() or (len(returned) == 1 and may_write_nothing)
    )


def functional_schema(name: str, lowering: SignatureLowering) -> str:
    """The schema of the functional form: the same arguments, and an output more for each that is written."""
    arguments = tuple(replace(argument, alias="", default=NO_DEFAULT) for argument in lowering.arguments)
    written = [argument.schema_type for argument in lowering.arguments if argument.alias]
    return schema_text(name, arguments, (*(leaf.schema_type for leaf in lowering.return_leaves), *written))


def functional_body(lowering: SignatureLowering, op: Callable[..., Any]) -> Callable[..., Any]:
    """The body of the functional form, which is its fake too: *op*, called with copies of what it writes."""

    def functional(*args: Any, **kwargs: Any) -> Any:
        flat = list(_all_arguments(lowering, args, kwargs))
        for i in _written(lowering):
            flat[i] = _copy(flat[i])
        outputs = as_tuple(lowering.layout.apply(op, tuple(flat)), len(lowering.return_leaves))
        return as_output((*outputs, *(flat[i] for i in _written(lowering))))

    return functional


def functional_rule(lowering: SignatureLowering, functional: Callable[..., Any]) -> Callable[..., Any]:
    """What makes a call of the op functional: *functional*, its functional form, where torch has no way of its own."""
    count, written = len(lowering.return_leaves), _written(lowering)
    is_refused = {leaf.schema_type for leaf in lowering.return_leaves} - {"Tensor"} != set()

    def rule(*args: Any, **kwargs: Any) -> Any:
        flat = _all_arguments(lowering, args, kwargs)
        targets = [list(tensors_in(flat[i])) for i in written]
        if any(targets) and not is_refused:
            return NotImplemented
        outputs = as_tuple(lowering.layout.apply(functional, flat), count + len(written))
        for tensors, contents in zip(targets, outputs[count:], strict=True):
            for tensor, new in zip(tensors, tensors_in(contents), strict=True):
                tensor.copy_(new)
        return as_output(outputs[:count])

    return rule


def _written(lowering: SignatureLowering) -> list[int]:
    return [i for i, argument in enumerate(lowering.arguments) if argument.alias]


def _all_arguments(lowering: SignatureLowering, args: Flat, kwargs: dict[str, Any]) -> Flat:
    # An op with bundles has no defaults, so it is called with all arguments.
    return args if lowering.layout.bundles else lowering.layout.fill(args, kwargs)


def _copy(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_copy(item) for item in value]
    if value is None or value.layout is not torch.strided:
        return None if value is None else value.clone()
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
