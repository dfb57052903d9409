# SPDX-License-Identifier: Apache-2.0
"""The configuration of a Triton kernel, chosen in the calls that run the kernel, so that none waits for a benchmark."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import state


ROUNDS = 2
"""How many launches of each configuration are timed."""


class InTurn:
    """Launches the configurations of *kernel* in turn, one a launch, and leaves it the fastest.

    A ``CachingAutotuner`` has a launcher for each configuration, and its first call runs all of them many times. This
    stands in their place as the only one. Each launch is one that the model asked for, on its arguments, so nothing is
    copied, restored or run twice, and what is measured is the kernel among its neighbours.

    Attributes:
        launches: How many launches of any kernel ran in turn.
    """

    launches = 0
    _is_static = False  # what torch 2.13 asks before it binds the launcher to a kernel

    def __init__(self, kernel: Any, launchers: Sequence[Any]) -> None:
        self._kernel = kernel
        self._launchers = list(launchers)
        self._runs: list[tuple[Any, Any, Any]] = []
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launchers[0], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return self._launchers[0](*args, **kwargs)  # no event can be read or timed
        InTurn.launches += 1
        with self._lock:
            if self._kernel.launchers == [self] and len(self._runs) >= ROUNDS * len(self._launchers):
                self._leave_fastest(args)
            if self._kernel.launchers != [self]:
                return self._kernel.launchers[0](*args, **kwargs)
            return self._launched(args, kwargs)

    def _launched(self, args: Any, kwargs: Any) -> Any:
        """Launch the next configuration between two events. One that cannot be launched is left out."""
        while True:
            launcher = self._launchers[len(self._runs) % len(self._launchers)]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            try:
                result = launcher(*args, **kwargs)
            except Exception:
                if len(self._launchers) == 1:
                    raise
                self._launchers.remove(launcher)
                self._runs = [run for run in self._runs if run[0] is not launcher]
                continue
            end.record()
            self._runs.append((launcher, start, end))
            return result

    def _leave_fastest(self, args: Any) -> None:
        """Choose as a ``CachingAutotuner`` does, by these times, if the device has finished what was timed."""
        if not all(end.query() for _, _, end in self._runs):
            return
        times = {
            launcher: min(start.elapsed_time(end) for other, start, end in self._runs if other is launcher)
            for launcher in self._launchers
        }
        kernel = self._kernel
        kernel.benchmark_all_configs = lambda *_, **__: times
        kernel.autotune_to_one_config(*args)
        del kernel.benchmark_all_configs
        if hasattr(kernel, "_cached_launcher"):
            kernel._cached_launcher = None  # this object (2.13)


PRECOMPILE = "torch._inductor.runtime.triton_heuristics:CachingAutotuner.precompile"


def precompile(original: Callable[..., Any], kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """`PRECOMPILE` (2.10 to 2.15): code that is made beside the calls tunes its kernels in them.

    Not where a recorded CUDA graph would keep what its first calls ran, nor where Inductor searches around the fastest.
    """
    result = original(kernel, *args, **kwargs)
    if not state.is_beside_others() or len(kernel.launchers) < 2 or kernel.device_props.type not in ("cuda", "hip"):
        return result
    searches = ("coordinate_descent_tuning", "combo_tuning_groups")
    if not (torch._inductor.config.triton.cudagraphs or any(map(kernel.inductor_meta.get, searches))):
        most = kernel.inductor_meta.get("spill_threshold", 16)
        unspilled = [each for each in kernel.launchers if kernel.custom_kernel or (each.n_spills or 0) <= most]
        kernel.launchers = [InTurn(kernel, unspilled or kernel.launchers)]
    return result
