# SPDX-License-Identifier: Apache-2.0
"""A recomputation runs the code that the forward ran.

``torch.utils.checkpoint`` runs a function again in the backward and expects that it saves the same tensors. Between
the two, code may have been made for a size, or dropped. So each region remembers what its calls took, in order.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from . import _torch_compat


if TYPE_CHECKING:
    from collections.abc import Callable


class Choices:
    """What the calls of one graph took inside checkpointed regions; forgotten with the region."""

    def __init__(self) -> None:
        self._taken: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._replayed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def take(self, hooks: Any, choose: Callable[[], Any], general: Any) -> Any:
        """What to run under the saved-tensor *hooks*: *choose* in a forward, in a recomputation what that took.

        *general*, the code for any size, is for hooks of ``torch.utils.checkpoint`` that do not tell their region:
        forward and recomputation then agree by never choosing.
        """
        region = _torch_compat.checkpoint_region(hooks)
        if region is None:
            return choose()
        if region.frame is None:
            return general
        if not region.recomputes:
            taken = choose()
            self._taken.setdefault(region.frame, []).append(taken)
            return taken
        place = self._replayed.get(region.hook, 0)
        self._replayed[region.hook] = place + 1
        taken_then = self._taken.get(region.frame, [])
        return taken_then[place] if place < len(taken_then) else general
