# SPDX-License-Identifier: Apache-2.0
"""Copies of a function's inputs that are like the originals in all that a compiler may look at."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from magi_backend import _torch_compat


@dataclass(frozen=True)
class InputCopies:
    """Copies of a tree of inputs.

    Attributes:
        values: The tree, with copies in place of its tensors: same strides, same memory shared among them, same
            requirement of gradients and marks of dynamic dimensions.
        leaves: For each leaf of the tree, what to differentiate for it; None where no gradient is required.
    """

    values: Any
    leaves: tuple[torch.Tensor | None, ...]


def copy_inputs(tree: Any) -> InputCopies:
    """Copy every tensor of *tree*, in which each leaf that is none stays what it is."""
    flat, spec = pytree.tree_flatten(tree)
    sharing: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for value in flat:
        if isinstance(value, torch.Tensor):
            sharing[_torch_compat.storage_id(value)].append(value)
    bases: dict[int, torch.Tensor] = {}
    copies: list[Any] = []
    leaves: list[torch.Tensor | None] = []
    for value in flat:
        if not isinstance(value, torch.Tensor):
            copies.append(value)
            leaves.append(None)
            continue
        storage = _torch_compat.storage_id(value)
        if len(sharing[storage]) > 1:
            if storage not in bases:
                bases[storage] = _alone(_torch_compat.view_base(value))
            twin = bases[storage].as_strided(value.size(), value.stride(), value.storage_offset())
            copies.append(twin)
            leaves.append(None)
            continue
        leaf = _alone(value).requires_grad_(value.requires_grad)
        _torch_compat.copy_dynamic_marks(value, leaf)
        # Code may write to an input that is no leaf, though it requires a gradient.
        copies.append(leaf if value.is_leaf else leaf.clone())
        leaves.append(leaf if value.requires_grad else None)
    return InputCopies(pytree.tree_unflatten(copies, spec), tuple(leaves))


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, with the strides of *tensor*."""
    original = tensor.detach()
    if original.layout is not torch.strided or _torch_compat.is_wrapper(original):
        return original.clone()
    twin = torch.empty_strided(original.size(), original.stride(), dtype=original.dtype, device=original.device)
    return twin.copy_(original)
