# SPDX-License-Identifier: Apache-2.0
"""Tensors that a body makes in a run on fake tensors, and keeps for its next call.

They have no data. Another call, also one of compiled code, would compute with them, return them, or crash.
"""

from __future__ import annotations

import functools
import gc
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from magi_tritonwrap._torch_compat.tracing import base_of, is_fake
from magi_tritonwrap.errors import NoFakeError

from .addresses import FakeAddresses


_CACHE = type(functools.lru_cache(int))
_WHOLE = (torch.Tensor, torch.nn.Module, type, FunctionType, ModuleType)
"""Objects that are not searched for the Tensors of a result: they are no containers, but refer to many objects."""


class FakeRun(FakeAddresses):
    """The mode of a run of *fn* on the fake Tensors among *given*. It remembers, weakly, the ones that *fn* makes."""

    def __init__(self, fn: Callable[..., Any], given: Any) -> None:
        super().__init__()
        self._fn = fn
        self._given = {id(leaf) for leaf in tree_leaves(given)}
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        self._made += [weakref.ref(leaf) for leaf in tree_leaves(result) if is_fake(leaf)]
        return result

    def forget(self, returned: Any = None, error: BaseException | None = None) -> str:
        """End the run: nothing that it made may outlive it, except in what it *returned*.

        A cache of functools that kept a Tensor is emptied, and the result is a sentence on that, which is empty
        otherwise. The run then shows less than a call does, which would find the Tensor in the cache.

        Args:
            returned: what the run returned, which may live on.
            error: what it raised. Its traceback, which holds local variables, becomes a note if they hide what is kept.

        Raises:
            NoFakeError: something else keeps a Tensor.
        """
        known = self._given | _parts(returned)
        while self._kept(known) and error is not None:
            error.add_note("".join(traceback.format_tb(error.__traceback__)))
            traceback.clear_frames(error.__traceback__)  # a record of `logging` may have them too
            error = error.with_traceback(None).__context__
        if self._kept(known):
            gc.collect()
        if not (kept := self._kept(known)):
            return ""
        why = f"keeps a Tensor that it makes for its next call ({tuple(kept[0].shape)}, {kept[0].dtype})"
        _empty_caches(kept)
        del kept
        if self._kept(known):
            name = getattr(self._fn, "__qualname__", type(self._fn).__name__)
            raise NoFakeError(
                f"The body '{name}' {why}, and ran on fake tensors, which have no data. Make what keeps it anew. Pass "
                "the Tensor as an argument, make it in an eager call before the first trace, or register the op as an "
                "opaque custom op."
            )
        return f"it {why}; pass it as an argument"

    def _kept(self, known: set[int]) -> list[torch.Tensor]:
        made = (one() for one in self._made)
        return [tensor for tensor in made if tensor is not None and id(tensor) not in known]


def _parts(value: object) -> set[int]:
    """The ids of *value* and of all objects in it. It may be a record that torch's pytrees do not take apart."""
    found: set[int] = set()
    level = [value]
    while level and len(found) < 10_000:
        found.update(map(id, level))
        found.update(id(base_of(one)) for one in level if isinstance(one, torch.Tensor))
        level = gc.get_referents(*(one for one in level if not isinstance(one, _WHOLE)))
    return found


def _empty_caches(values: Sequence[object]) -> None:
    """Empty the caches of functools that hold one of *values*, by itself or inside of containers."""
    for _ in range(3):  # a tuple, in a dictionary, of a cache
        holders = [one for one in gc.get_referrers(*values) if one is not values]
        for one in holders:
            if type(one) is _CACHE:
                one.cache_clear()
        values = [one for one in holders if type(one) in (dict, list, tuple)]
