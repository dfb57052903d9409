# SPDX-License-Identifier: Apache-2.0
"""Which calls run the body that launches kernels, by their device type and by what is registered now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from ._torch_compat.operators import fakes_of, has_composite_kernel, has_kernel_for_device, registration_of


if TYPE_CHECKING:
    from torch._ops import OpOverload


class Bodies:
    """Remembers what was registered for one operator: the device types of the see-through body, and the fakes.

    Where the see-through body is registered for every device type (a composite key), a body for a single type is
    another body. Without a composite key, the registrations that existed first belong to the see-through body, and
    those that were added or changed later belong to other bodies.
    """

    def __init__(self, op: OpOverload) -> None:
        self._op = op
        self._fakes = fakes_of(op)
        self._own = {} if has_composite_kernel(op) else registration_of(op)

    def are_of(self, op: OpOverload) -> bool:
        """Whether *op* is the operator that had these bodies, and not one that was registered by its name later.

        Its OpOverload does not tell. Torch makes another one after the finalizer of an earlier library, whenever that
        is collected, has cleared `torch.ops` (torch/library.py, `_clear_torch_ops_cache`), and it passes the first one
        as long as the dispatcher keeps the entry (aten/src/ATen/core/dispatch/OperatorEntry.h, `getPythonOp`). A fake
        is there for as long as its library is.
        """
        if not self._fakes:
            return op is self._op
        registered = fakes_of(op)
        return any(fake is other for fake in self._fakes for other in registered)

    def has_other_body(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments runs another body than the one with the launches."""
        device_type = _device_type(args, kwargs)
        if device_type is None or not has_kernel_for_device(self._op, device_type):
            return False
        now = registration_of(self._op).get(device_type)
        return device_type not in self._own or self._own[device_type] != now


def _device_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The device type that the dispatcher chooses for these arguments: that of an accelerator before "cpu"."""
    leaves = tree_leaves((args, kwargs))
    types = [leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)]
    types = types or [leaf.type for leaf in leaves if isinstance(leaf, torch.device)]
    accelerators = [device_type for device_type in types if device_type != "cpu"]
    return next(iter(accelerators or types), None)
