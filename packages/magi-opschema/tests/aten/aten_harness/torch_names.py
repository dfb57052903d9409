# SPDX-License-Identifier: Apache-2.0
"""The private torch names that only the harness uses, one function for each quirk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def op_database() -> list[Any]:
    """The entries of torch's test database, each with the samples of one operator (torch 2.10 to 2.15).

    Raises:
        ImportError: numpy or expecttest, which it needs, is missing.
    """
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def resolve_overload(base: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The overload that `torch.ops.aten.<base>` would call, `default` for the unnamed one (torch 2.10 to 2.15).

    It is None if no overload accepts these arguments, for which the resolution raises an error.
    """
    try:
        name = torch._C._jit_resolve_packet(f"aten::{base}", *args, **kwargs)
    except (RuntimeError, TypeError):
        return None
    return str(name) or "default"


def default_tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """The relative and absolute tolerance of `torch.testing.assert_close` (torch 2.10 to 2.15)."""
    rtol, atol = torch.testing._comparison.default_tolerances(dtype)
    return rtol, atol


def compile_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """*function*, compiled from scratch without graph breaks, even if a size depends on data (torch 2.10 to 2.15)."""
    torch._dynamo.reset()

    def call(*args: Any) -> Any:
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
            return compiled(*args)

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    return call
