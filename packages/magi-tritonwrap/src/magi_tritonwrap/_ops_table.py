# SPDX-License-Identifier: Apache-2.0
"""Which Python body an operator has, for operators that are seen through and for torch's own custom ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from ._torch_compat import qualified_name


if TYPE_CHECKING:
    from collections.abc import Callable


BODIES: dict[str, Callable[..., Any]] = {}
"""Bodies of the ops given to `make_see_through`, by qualified name."""


def body_of_op(value: object) -> Callable[..., Any] | None:
    """The body of an operator; None for anything else, and for operators written in C++."""
    if isinstance(value, CustomOpDef):
        return _body(value._opoverload)  # noqa: SLF001
    if isinstance(value, OpOverload):
        return _body(value)
    if isinstance(value, OpOverloadPacket) and hasattr(value, "default"):
        return _body(value.default)
    return None


def _body(op: OpOverload) -> Callable[..., Any] | None:
    name = qualified_name(op)
    if name in BODIES:
        return BODIES[name]
    definition = OPDEFS.get(name)
    return None if definition is None else definition._init_fn  # noqa: SLF001
