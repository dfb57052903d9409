# SPDX-License-Identifier: Apache-2.0
"""The configuration of a Triton kernel, chosen in the calls that run the kernel, so that none waits for a benchmark."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import state


ROUNDS = 2
"""How many launches of each configuration are timed; of one that is much slower than another, the first."""

MUCH_SLOWER = 1.5

APART = 16
"""After the first launch, one in so many tries a configuration; the others run what was the fastest so far."""


class InTurn:
    """Tries the configurations of *kernel* in its launches, one now and then, and leaves it the fastest.

    A ``CachingAutotuner`` has a launcher for each configuration, and its first call runs all of them many times. This
    stands in their place as the only one. Each launch is one that the model asked for, on its arguments, so nothing is
    copied, restored or run twice, and what is measured is the kernel among its neighbours. A configuration may be three
    times as slow as another, so not every launch tries one, and kernels do not try theirs in the same call.

    Attributes:
        launches: How many launches of any kernel were of one that is not tuned yet.
        kernels: How many kernels were tuned in this way.
    """

    launches = kernels = 0
    _is_static = False  # what torch 2.13 asks before it binds the launcher to a kernel

    def __init__(self, kernel: Any, launchers: Sequence[Any]) -> None:
        self._kernel = kernel
        self._launchers = list(launchers)
        self._left = self._launchers * ROUNDS
        self._times: dict[Any, float] = {}
        self._running: tuple[Any, Any, Any] | None = None
        self._lock = threading.Lock()
        InTurn.kernels += 1
        self._count = InTurn.kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launchers[0], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        InTurn.launches += 1
        if torch.cuda.is_current_stream_capturing():
            return self._fastest()(*args, **kwargs)  # no event can be read or timed
        with self._lock:
            if self._kernel.launchers == [self]:
                self._count += 1
                self._read_time()
                if self._left and self._running is None and (not self._times or self._count % APART == 0):
                    return self._timed(args, kwargs)
                if not self._left and self._running is None:
                    self._leave_fastest(args)
        return self._fastest()(*args, **kwargs)

    def _fastest(self) -> Any:
        return min(self._times, key=self._times.__getitem__) if self._times else self._launchers[0]

    def _read_time(self) -> None:
        """Note what the configuration took that was launched last, if the device has finished it."""
        if self._running is None or not self._running[2].query():
            return
        launcher, start, end = self._running
        self._running = None
        self._times[launcher] = min(start.elapsed_time(end), self._times.get(launcher, math.inf))
        limit = MUCH_SLOWER * min(self._times.values())
        self._left = [each for each in self._left if self._times.get(each, 0.0) <= limit]

    def _timed(self, args: Any, kwargs: Any) -> Any:
        """Launch the next configuration between two events. One that cannot be launched is left out."""
        while self._left:
            launcher = self._left.pop(0)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            try:
                result = launcher(*args, **kwargs)
            except Exception:
                if len(self._launchers) == 1:
                    raise
                self._launchers.remove(launcher)
                self._times.pop(launcher, None)
                self._left = [each for each in self._left if each is not launcher]
                continue
            end.record()
            self._running = launcher, start, end
            return result
        return self._fastest()(*args, **kwargs)

    def _leave_fastest(self, args: Any) -> None:
        """Choose as a ``CachingAutotuner`` does, by these times."""
        kernel = self._kernel
        kernel.benchmark_all_configs = lambda *_, **__: self._times
        kernel.autotune_to_one_config(*args)
        del kernel.benchmark_all_configs
        if hasattr(kernel, "_cached_launcher"):
            kernel._cached_launcher = None  # this object (2.13)


def spills(kernel: Any, launcher: Any) -> bool:
    """Whether *kernel*, a ``CachingAutotuner``, leaves *launcher* out, as ``bench`` does: it spills registers."""
    most: int = kernel.inductor_meta.get("spill_threshold", 32 if torch.version.hip else 16)
    return not kernel.custom_kernel and (launcher.n_spills or 0) > most


PRECOMPILE = "torch._inductor.runtime.triton_heuristics:CachingAutotuner.precompile"


def precompile(original: Callable[..., Any], kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """`PRECOMPILE` (2.10 to 2.15): code that is made beside the calls tunes its kernels in them.

    Not where a recorded CUDA graph would keep what its first calls ran, nor where Inductor searches around the fastest.
    """
    result = original(kernel, *args, **kwargs)
    if not state.is_beside_others.get() or len(kernel.launchers) < 2 or kernel.device_props.type not in ("cuda", "hip"):
        return result
    searches = ("coordinate_descent_tuning", "combo_tuning_groups")
    if not (torch._inductor.config.triton.cudagraphs or any(map(kernel.inductor_meta.get, searches))):
        unspilled = [each for each in kernel.launchers if not spills(kernel, each)]
        kernel.launchers = [InTurn(kernel, unspilled or kernel.launchers)]
    return result
