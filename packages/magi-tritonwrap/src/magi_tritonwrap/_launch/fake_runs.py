# SPDX-License-Identifier: Apache-2.0
"""The modes in which a body runs on fake tensors: what it may ask of an address, and what it keeps.

A tensor that a body makes in such a run and keeps for its next call has no data. Another call, also one of compiled
code, would compute with it, return it, or crash.
"""

from __future__ import annotations

import functools
import gc
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from magi_tritonwrap._torch_compat.tracing import base_of, is_fake
from magi_tritonwrap.errors import NoFakeError


_ALIGNMENT = 16
_CACHE = type(functools.lru_cache(int))
_WHOLE = (torch.Tensor, torch.nn.Module, type, FunctionType, ModuleType)
"""Objects that are not searched for the Tensors of a result: they are no containers, but refer to many objects."""


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
