# SPDX-License-Identifier: Apache-2.0
"""What a body may ask of the address of a fake tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from magi_tritonwrap._torch_compat.tracing import is_fake


_ALIGNMENT = 16


class FakeAddress:
    """The address of a fake tensor, which begins *offset* bytes behind one that is a multiple of 16.

    A body may ask whether it is a multiple of 16 bytes, or of a part of that:

        if x.data_ptr() % 16 == 0:  # a kernel that loads 16 bytes at once

    All memory that an allocator of torch gives begins at such an address, and Inductor copies an input that was aligned
    at compilation and is not at a call (`copy_misaligned_inputs` in `torch/_inductor/utils.py`). So the answer follows
    from where a tensor begins in its memory; if that is symbolic, it is guarded. Nothing else is known of an address.
    """

    def __init__(self, offset: Any) -> None:
        self._offset = offset

    def __mod__(self, by: object) -> Any:
        if isinstance(by, int) and by > 0 and _ALIGNMENT % by == 0:
            return int(self._offset % by)  # a guard on the remainder, where the offset is symbolic
        return self._refuse(by)

    def __and__(self, mask: object) -> Any:
        return self % (mask + 1) if isinstance(mask, int) else self._refuse(mask)

    __rand__ = __and__

    def __add__(self, further: object) -> Any:
        return FakeAddress(self._offset + further) if isinstance(further, int | torch.SymInt) else self._refuse(further)

    __radd__ = __add__

    def __or__(self, other: object) -> Any:
        # `(x.data_ptr() | y.data_ptr()) % 16` asks whether both are aligned.
        return FakeAddress(self % _ALIGNMENT | other % _ALIGNMENT) if isinstance(other, FakeAddress) else self._refuse()

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError(f"of the data pointer of a fake tensor, only the remainder by {_ALIGNMENT} is known")

    __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __rshift__ = __lshift__ = __xor__ = __invert__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _refuse
    __hash__ = __int__ = __index__ = __float__ = __str__ = __repr__ = __format__ = _refuse


class FakeAddresses(TorchFunctionMode):
    """A mode in which `data_ptr` of a fake tensor is a `FakeAddress`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.data_ptr and args[0].layout is torch.strided and is_fake(args[0]):
            return FakeAddress(args[0].storage_offset() * args[0].element_size())
        return func(*args, **(kwargs or {}))
