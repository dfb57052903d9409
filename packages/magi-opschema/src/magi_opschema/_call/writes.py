# SPDX-License-Identifier: Apache-2.0
"""Whether a body wrote into a Tensor that `mutates_args` does not name.

A Tensor counts the writes into it, and into the views that share its memory. An inference tensor does not, so its
contents are compared. Some writes are not counted: those of a Triton kernel, of NumPy, through `.data`, and of an
operator whose schema does not declare the write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from magi_opschema._model.layout import Flat
from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.tree import dotted
from magi_opschema._torch_compat import is_capturing, writes_counted


_MAX_BYTES = 2**24
"""The largest size in bytes of an inference tensor that is compared; if every call is checked, larger ones are too."""


@dataclass(frozen=True)
class Seen:
    """A Tensor among the arguments of a call, before the body ran."""

    path: str
    tensor: torch.Tensor
    version: int | None
    """None for a Tensor that counts no writes."""
    contents: torch.Tensor | None
    """A copy of the contents of a Tensor that counts no writes, if they can be compared."""
    sizes: tuple[tuple[int, ...], tuple[int, ...]] | None

    def is_written(self) -> bool:
        """True if something wrote into the Tensor since."""
        if self.version is not None:
            return writes_counted(self.tensor) != self.version
        if self.contents is None:
            return False
        return self.sizes != _sizes(self.tensor) or not torch.equal(self.contents, _contents(self.tensor))


def see_inputs(lowering: SignatureLowering, flat: Flat, *, thorough: bool) -> list[Seen]:
    """The Tensors that the body must not write into.

    Tensors that share memory with a Tensor of `mutates_args` are left out, because they may share the count of writes
    too. Tensors without memory are left out, because sharing cannot be detected for them.
    """
    named = [entry for entry in _named_tensors(lowering, flat) if _has_memory(entry[1])]
    mutated = {memory(tensor) for _, tensor, is_mutated in named if is_mutated}
    return [_see(path, tensor, thorough=thorough) for path, tensor, _ in named if memory(tensor) not in mutated]


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.untyped_storage().data_ptr() != 0


def _named_tensors(lowering: SignatureLowering, flat: Flat) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """The path of each Tensor, the Tensor, and whether `mutates_args` names it."""
    values = lowering.layout.open(flat)
    for slot, value in zip(lowering.slots, values, strict=True):
        if slot.leaves[0].is_tensor and value is not None:
            path = dotted(slot.leaves[0].path)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                yield path, tensor, bool(slot.alias)


def _see(path: str, tensor: torch.Tensor, *, thorough: bool) -> Seen:
    if not tensor.is_inference():
        return Seen(path, tensor, writes_counted(tensor), None, None)
    if not _is_comparable(tensor, thorough=thorough):
        return Seen(path, tensor, None, None, None)
    return Seen(path, tensor, None, _contents(tensor), _sizes(tensor))


def _sizes(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(tensor.shape), tensor.stride()


def _is_comparable(tensor: torch.Tensor, *, thorough: bool) -> bool:
    """True if the contents of *tensor* can be copied and are small enough, or *thorough* is set."""
    is_plain = type(tensor) in {torch.Tensor, torch.nn.Parameter} and tensor.layout is torch.strided
    is_small = thorough or tensor.numel() * tensor.element_size() <= _MAX_BYTES
    return is_plain and is_small and not tensor.is_quantized and not is_capturing(tensor)


def _contents(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the bytes of *tensor*, because as numbers, a nan would not equal itself."""
    resolved = tensor.resolve_conj().resolve_neg()
    return resolved.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def memory(tensor: torch.Tensor) -> object:
    """A value that is equal for two tensors that share memory; an empty tensor shares none with others."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr() or id(tensor)
