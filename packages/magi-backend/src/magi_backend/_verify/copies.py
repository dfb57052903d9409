# SPDX-License-Identifier: Apache-2.0
"""Copies of a function's inputs that are like the originals in everything that a compiler may read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from magi_backend import _torch_compat

from .trees import leaves_of, with_leaves


@dataclass(frozen=True)
class InputCopies:
    """Copies of a tree of inputs.

    Attributes:
        values: The tree, with copies in place of its tensors: same strides, same memory shared among them, same
            requirement of gradients and marks of dynamic dimensions. Its lists, dicts and dataclasses are copies too.
        wanted: The tensor to differentiate by, for each tensor that requires a gradient, by its path.
    """

    values: Any
    wanted: dict[str, torch.Tensor]


def copy_inputs(tree: Any) -> InputCopies:
    """Copy every tensor of *tree*; other leaves stay as they are."""
    leaves = list(leaves_of(tree))
    copier = _Copier(Counter(_torch_compat.storage_id(leaf) for _, leaf in leaves if isinstance(leaf, torch.Tensor)))
    copies = [copier.copy(path, leaf) if isinstance(leaf, torch.Tensor) else leaf for path, leaf in leaves]
    remaining = iter(copies)
    return InputCopies(with_leaves(tree, lambda _: next(remaining)), copier.wanted)


@dataclass
class _Copier:
    """Copies tensors one after the other; those that share memory become views of one copy."""

    sharing: Counter[int]
    """The number of tensors in each storage."""
    bases: dict[int, torch.Tensor] = field(default_factory=dict)
    wanted: dict[str, torch.Tensor] = field(default_factory=dict)

    def copy(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of *tensor*, which is at *path*."""
        storage = _torch_compat.storage_id(tensor)
        if self.sharing[storage] > 1:
            if storage not in self.bases:
                self.bases[storage] = alone(_torch_compat.view_base(tensor))
            return self.bases[storage].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        leaf = alone(tensor).requires_grad_(tensor.requires_grad)
        _torch_compat.copy_dynamic_marks(tensor, leaf)
        if tensor.requires_grad:
            self.wanted[path] = leaf
        # Code may write to an input that is not a leaf, although it requires a gradient.
        return leaf if tensor.is_leaf else leaf.clone()


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, with the strides of *tensor*."""
    original = tensor.detach()
    if original.layout is not torch.strided or _torch_compat.is_wrapper(original):
        return original.clone()
    for dim in range(original.dim()):
        if original.stride(dim) == 0 and original.size(dim) > 1:
            original = original.narrow(dim, 0, 1)  # elements that share memory cannot be written separately
    twin = torch.empty_strided(original.size(), original.stride(), dtype=original.dtype, device=original.device)
    return twin.copy_(original).expand(tensor.size()) if twin.size() != tensor.size() else twin.copy_(original)
