# SPDX-License-Identifier: Apache-2.0
"""Which Python body an operator has, for operators whose body the compiler sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from magi_tritonwrap._torch_compat import body_of_torch_triton_op, overload_of, qualified_name, torch_triton_ops


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


BODIES: dict[str, Callable[..., Any]] = {}
"""Bodies of the ops given to `make_see_through`, by qualified name."""


def body_of_op(value: object) -> Callable[..., Any] | None:
    """The body that a compiled graph sees in place of an operator; None for opaque operators and anything else."""
    if isinstance(value, CustomOpDef):
        return _body(qualified_name(overload_of(value)))
    if isinstance(value, OpOverload):
        return _body(qualified_name(value))
    if isinstance(value, OpOverloadPacket) and hasattr(value, "default"):
        return _body(qualified_name(value.default))
    return None


def bodies_mentioned(names: frozenset[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Bodies of the operators that code can reach as `torch.ops.namespace.name`, given the names it mentions."""
    if "ops" not in names:
        return
    for name in sorted({*BODIES, *torch_triton_ops()}):
        namespace, _, op = name.partition("::")
        body = _body(name) if namespace in names and op.partition(".")[0] in names else None
        if body is not None:
            yield name, body


def _body(name: str) -> Callable[..., Any] | None:
    return BODIES[name] if name in BODIES else body_of_torch_triton_op(name)
