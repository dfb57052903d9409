# SPDX-License-Identifier: Apache-2.0
"""The memory of Tensors, and the count of writes into them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch


increment_version: Callable[[Iterable[torch.Tensor]], None] = torch._C._increment_version
"""Bump version counters; a no-op for inference tensors. The public torch.autograd.graph.increment_version is slower."""


def counting_writes() -> contextlib.AbstractContextManager[None]:
    """A context in which Tensors count the writes into them, also inside `below_adinplaceorview`."""
    key = torch._C.DispatchKey.ADInplaceOrView
    return torch._C._SetExcludeDispatchKeyGuard(key, False)


def writes_counted(tensor: torch.Tensor) -> int:
    """The version counter, which every write into the Tensor or a view increments; inference tensors have none."""
    return tensor._version


def storage_id(tensor: torch.Tensor) -> int:
    """A number that is equal for two Tensors, real or fake, that share memory."""
    return id(tensor) if tensor.layout is not torch.strided else int(tensor.untyped_storage()._cdata)


def is_capturing(tensor: torch.Tensor) -> bool:
    """True while a CUDA graph is captured on the Tensor's device, because then nothing can be read back."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
