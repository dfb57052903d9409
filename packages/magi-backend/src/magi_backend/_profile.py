# SPDX-License-Identifier: Apache-2.0
"""What each kernel of a compiled graph costs on the device: its time, its bytes, its share of the bandwidth.

The generated module calls its kernels by name. For a few calls of the graph, each name stands for a function that runs
the kernel between two events of the stream, or between two readings of the clock on a CPU. Then the names stand for the
kernels again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ._records.log import generated_kernels
from .records import KernelRun


WARM_UPS, MEASURED = 2, 3
"""The numbers of calls of a graph before it is measured, in which kernels are tuned and loaded, and while it is
measured."""

_LIBRARY = "extern_kernels"


@dataclass(frozen=True)
class _Measured:
    """One run of one kernel, and the marks before and after it: events of a GPU, or seconds."""

    name: str
    bytes: int
    start: Any
    end: Any

    def seconds(self) -> float:
        """The time between both marks; it waits until the device has reached the second one."""
        if isinstance(self.start, float):
            return float(self.end - self.start)
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end)) / 1e3


@dataclass
class Meter:
    """Measures the kernels of one compiled graph, and calls *report* with the results once."""

    report: Callable[[tuple[KernelRun, ...]], None] = lambda _: None
    _calls: int = 0
    _runs: list[_Measured] = field(default_factory=list)
    _names: dict[str, Any] = field(default_factory=dict)

    def attach(self, compiled: Any, names: dict[str, Any]) -> None:
        """Measure *compiled*, whose generated module has *names*."""
        wanted = [name for name in (*generated_kernels(str(compiled.source_code)), _LIBRARY) if name in names]
        if not wanted or any(isinstance(names[name], _StandIn) for name in wanted):
            return  # code without Python cannot be measured; another graph with the same code may be measured already
        self._names = {name: names[name] for name in wanted}
        run = compiled.current_callable

        def measured(*args: Any, **kwargs: Any) -> Any:
            compiled.current_callable, self._calls = measured, self._calls + 1
            if self._calls == WARM_UPS + 1:
                names.update({name: _StandIn(name, kernel, self._runs) for name, kernel in self._names.items()})
            try:
                return run(*args, **kwargs)
            finally:
                if self._calls >= WARM_UPS + MEASURED:
                    names.update(self._names)
                    compiled.current_callable = run
                    if self._calls == WARM_UPS + MEASURED:
                        self.report(_summed(self._runs))

        compiled.current_callable = measured


class _StandIn:
    """What the generated module calls instead of a kernel, or of the library functions."""

    def __init__(self, name: str, kernel: Any, runs: list[_Measured]) -> None:
        self._name, self._kernel, self._runs = name, kernel, runs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._between_marks(self._name, self._kernel, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._kernel, name)
        if not callable(value) or (self._name != _LIBRARY and name != "run"):
            return value
        called = name if self._name == _LIBRARY else self._name
        return lambda *args, **kwargs: self._between_marks(called, value, args, kwargs)

    def _between_marks(self, name: str, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        sizes = {(tensor.data_ptr(), tensor.numel()): tensor.numel() * tensor.element_size() for tensor in tensors}
        start = _mark(on_gpu)
        result = kernel(*args, **kwargs)
        self._runs.append(_Measured(name, sum(sizes.values()), start, _mark(on_gpu)))
        return result


def _mark(on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _summed(runs: list[_Measured]) -> tuple[KernelRun, ...]:
    """The runs of each kernel summed up, with the median of its time, the slowest kernels first."""
    on_gpu = any(not isinstance(run.start, float) for run in runs)
    by_name: dict[str, list[_Measured]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    copied = copied_bytes_a_second("cuda" if on_gpu else "cpu") if runs else 0.0
    found = []
    for name, those in by_name.items():
        seconds = sorted(run.seconds() for run in those)[len(those) // 2]
        size = sorted(run.bytes for run in those)[len(those) // 2]
        share = size / seconds / copied if seconds and copied else 0.0
        found.append(KernelRun(name, max(len(those) // MEASURED, 1), seconds, size, share))
    return tuple(sorted(found, key=lambda run: -run.calls * run.seconds))


@functools.cache
def copied_bytes_a_second(device: str) -> float:
    """Bytes that *device*, "cuda" or "cpu", reads and writes in a second when it copies a tensor; measured once."""
    source = torch.empty(2**26 if device == "cuda" else 2**24, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        start = _mark(device == "cuda")
        target.copy_(source)
        best = min(best, _Measured("copy", 0, start, _mark(device == "cuda")).seconds())
    return 2 * source.numel() * source.element_size() / best
