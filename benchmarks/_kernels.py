# SPDX-License-Identifier: Apache-2.0
"""The kernels that a call runs on the GPU."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_KINDS = {
    "layout_copies": ("nchwtonhwc", "nhwctonchw", "nchw2nhwc", "nhwc2nchw", "tensortransform"),
    "convolution": ("conv", "fprop", "implicit", "winograd"),
    "matrix": ("gemm", "cutlass", "matmul", "nvjet", "flash", "fmha", "attention"),
}


def kernels_of(call: Callable[[], object]) -> list[Any]:
    """The profiler's events of *call* on the GPU, each with its `name` and its `device_time` in microseconds."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        call()
        torch.cuda.synchronize()
    return [event for event in profiler.events() or () if event.device_type == DeviceType.CUDA]


def kind_of_kernel(name: str) -> str:
    """What a GPU kernel is, by its name."""
    lowered = name.lower()
    if lowered.startswith("triton_"):
        return "triton"
    return next((kind for kind, parts in _KINDS.items() if any(part in lowered for part in parts)), "other")


def by_kind(kernels: Sequence[Any]) -> dict[str, Any]:
    """Seconds and launches of *kernels* by kind, for a row."""
    seconds, launches = Counter[str](), Counter[str]()
    for kernel in kernels:
        kind = kind_of_kernel(kernel.name)
        seconds[kind] += kernel.device_time * 1e-6
        launches[kind] += 1
    return {"seconds_by_kind": dict(seconds), "launches": dict(launches)}


def by_name(kernels: Sequence[Any], most: int = 60) -> dict[str, dict[str, float]]:
    """Seconds and launches of *kernels* by the beginning of their name, the longest ones first."""
    seconds, launches = Counter[str](), Counter[str]()
    for kernel in kernels:
        seconds[kernel.name[:160]] += kernel.device_time * 1e-6
        launches[kernel.name[:160]] += 1
    return {name: {"seconds": spent, "launches": launches[name]} for name, spent in seconds.most_common(most)}
