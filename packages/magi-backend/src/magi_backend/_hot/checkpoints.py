# SPDX-License-Identifier: Apache-2.0
"""A recomputation runs the code that the forward ran.

``torch.utils.checkpoint`` runs a function again in the backward and expects that it saves the same tensors. In between,
code for a size may have been made or dropped. So each region remembers which code its calls ran, in order.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from . import _torch_compat


if TYPE_CHECKING:
    from collections.abc import Callable


class Choices:
    """The code that the calls of one graph ran inside checkpointed regions; it is forgotten with the region."""

    def __init__(self) -> None:
        self._taken: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._replayed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def take(self, hooks: Any, choose: Callable[[], Any], general: Any) -> Any:
        """The code to run under the saved-tensor *hooks*: *choose* decides in a forward, a recomputation repeats it.

        *general*, the code for any size, is used for hooks of ``torch.utils.checkpoint`` that do not show their region,
        so that forward and recomputation run the same code.
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
