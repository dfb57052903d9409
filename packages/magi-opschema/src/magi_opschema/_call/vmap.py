# SPDX-License-Identifier: Apache-2.0
"""torch.vmap over an op: by the user's rule, or one call for each element of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch


VmapRule: TypeAlias = Callable[..., tuple[Any, Any]]
"""`rule(info, in_dims, *flat) -> (flat outputs, their dims)`."""


def vmap_by_loop(info: Any, in_dims: Any, values: tuple[Any, ...], call: Callable[..., Any]) -> tuple[Any, Any]:
    """The outputs of *call* for each element of the batch, stacked along a new first dimension."""
    results = [call(*_element(values, in_dims, i)) for i in range(info.batch_size)]
    if not isinstance(results[0], tuple):
        return _stack(results)
    stacked = [_stack(column) for column in zip(*results, strict=True)]
    return tuple(value for value, _ in stacked), tuple(dim for _, dim in stacked)


def _element(values: tuple[Any, ...], in_dims: Any, i: int) -> list[Any]:
    return [_select(value, dim, i) for value, dim in zip(values, in_dims, strict=True)]


def _select(value: Any, dim: Any, i: int) -> Any:
    """Element *i* of a Tensor, or of each Tensor in a list, as a view, so that writes into it change the batch."""
    if isinstance(value, torch.Tensor):
        return value if dim is None else value.select(dim, i)
    if isinstance(value, list) and isinstance(dim, (list, tuple)):
        return [_select(item, item_dim, i) for item, item_dim in zip(value, dim, strict=True)]
    return value


def _stack(column: Any) -> tuple[Any, Any]:
    first = column[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(list(column)), 0
    return first, None
