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
    tensors = {id(leaf): leaf for _, leaf in leaves if isinstance(leaf, torch.Tensor)}
    copier = _Copier(Counter(map(_torch_compat.storage_id, tensors.values())))
    copies = [copier.copy(path, leaf) if isinstance(leaf, torch.Tensor) else leaf for path, leaf in leaves]
    remaining = iter(copies)
    return InputCopies(with_leaves(tree, lambda _: next(remaining)), copier.wanted)


@dataclass
class _Copier:
    """Copies tensors one after the other; those that share memory become views of one copy of all of it.

    A tensor does not lead to all of it: one that was detached, or made in inference mode, does not know of which tensor
    it is a view.
    """

    sharing: Counter[int]
    """The number of different tensors in each storage."""
    bases: dict[int, torch.Tensor] = field(default_factory=dict)
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    wanted: dict[str, torch.Tensor] = field(default_factory=dict)

    def copy(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of *tensor*, which is at *path*; one that is at several places has one copy."""
        if id(tensor) not in self.copies:
            with torch.inference_mode(tensor.is_inference()):
                self.copies[id(tensor)] = self._copied(path, tensor)
        return self.copies[id(tensor)]

    def _copied(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        storage = _torch_compat.storage_id(tensor)
        if self.sharing[storage] > 1:
            if storage not in self.bases:
                self.bases[storage] = _bytes_of_storage(tensor).clone()
            memory = _as_dtype(self.bases[storage], tensor.dtype)
            return memory.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        leaf = alone(tensor).requires_grad_(tensor.requires_grad)
        _torch_compat.copy_dynamic_marks(tensor, leaf)
        if tensor.requires_grad:
            self.wanted[path] = leaf
        # Code may write to an input that is not a leaf, although it requires a gradient.
        return leaf if tensor.is_leaf else leaf.clone()


def _bytes_of_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All the memory that *tensor* is in, as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _as_dtype(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as a tensor of *dtype*, without those at the end that are less than an element."""
    return memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def state_of(tensor: torch.Tensor) -> object:
    """A value that is equal for *tensor* later if nobody has written to it in the meantime.

    Torch counts writes, but not those to a tensor made in inference mode, of which it is the contents.
    """
    if not tensor.is_inference():
        return _torch_compat.version(tensor)
    if _torch_compat.is_wrapper(tensor):
        inner = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        return tuple(state_of(getattr(tensor, name)) for name in inner)
    return _Contents(tensor.detach().clone())


@dataclass(frozen=True, eq=False)
class _Contents:
    tensor: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Contents) and torch.equal(_bits(self.tensor), _bits(other.tensor))

    __hash__ = None  # type: ignore[assignment]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of *tensor*, because NaN is not equal to itself."""
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.layout is torch.strided else tensor


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
