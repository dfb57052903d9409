# SPDX-License-Identifier: Apache-2.0
"""Which Python body an operator has, for operators whose body the compiler sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from magi_tritonwrap._torch_compat import (
    body_of_custom_op,
    body_of_torch_triton_op,
    overload_of,
    qualified_name,
    torch_triton_ops,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


BODIES: dict[str, Callable[..., Any]] = {}
"""Bodies of the ops given to `make_see_through`, by qualified name."""
INNER_BODIES: dict[str, Callable[..., Any]] = {}
"""Bodies of `custom_op`s that are seen through where the body of another op calls them, and opaque elsewhere."""


def as_overload(value: object) -> OpOverload | None:
    """The operator that *value* stands for: itself, what `custom_op` returned, or the default of a packet."""
    if isinstance(value, CustomOpDef):
        return overload_of(value)
    if isinstance(value, OpOverloadPacket):
        value = getattr(value, "default", None)
    return value if isinstance(value, OpOverload) else None


def body_of_op(value: object) -> Callable[..., Any] | None:
    """The body that a compiled graph sees in place of an operator, wherever it is called; None for anything else."""
    op = as_overload(value)
    return None if op is None else _seen_body(qualified_name(op))


def body_of_inner_op(value: object) -> Callable[..., Any] | None:
    """The body that a compiled graph sees in place of an operator inside another op's body."""
    op = as_overload(value)
    return None if op is None else body_of_op(op) or INNER_BODIES.get(qualified_name(op))


def body_of_whole_op(value: object) -> Callable[..., Any] | None:
    """The body of a `torch.library.custom_op` that is opaque to the compiler; None for anything else."""
    op = as_overload(value)
    return None if op is None or _seen_body(qualified_name(op)) else body_of_custom_op(qualified_name(op))


def bodies_mentioned(names: frozenset[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Bodies of the operators that code can reach as `torch.ops.namespace.name`, given the names it mentions."""
    if "ops" not in names:
        return
    for name in sorted({*BODIES, *INNER_BODIES, *torch_triton_ops()}):
        namespace, _, op = name.partition("::")
        if namespace in names and op.partition(".")[0] in names:
            body = _seen_body(name) or INNER_BODIES.get(name)
            if body is not None:
                yield name, body


def _seen_body(name: str) -> Callable[..., Any] | None:
    return BODIES[name] if name in BODIES else body_of_torch_triton_op(name)
