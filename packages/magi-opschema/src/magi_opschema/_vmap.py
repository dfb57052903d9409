# SPDX-License-Identifier: Apache-2.0
"""torch.vmap over an op: by the user's rule, or one call for each element of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch


VmapRule: TypeAlias = Callable[..., tuple[Any, Any]]
"""`rule(info, in_dims, *flat) -> (flat outputs, their dims)`."""


def vmap_by_loop(info: Any, in_dims: Any, values: tuple[Any, ...], call: Callable[..., Any]) -> tuple[Any, Any]:
    """*call* for each element of the batch, the outputs stacked in front."""
    results = [call(*_element(values, in_dims, i)) for i in range(info.batch_size)]
    if not isinstance(results[0], tuple):
        return _stack(results)
    stacked = [_stack(column) for column in zip(*results, strict=True)]
    return tuple(value for value, _ in stacked), tuple(dim for _, dim in stacked)


def _element(values: tuple[Any, ...], in_dims: Any, i: int) -> list[Any]:
    return [
        value.select(dim, i) if isinstance(dim, int) and isinstance(value, torch.Tensor) else value
        for value, dim in zip(values, in_dims, strict=True)
    ]


def _stack(column: Any) -> tuple[Any, Any]:
    first = column[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(list(column)), 0
    return first, None
