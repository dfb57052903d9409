# SPDX-License-Identifier: Apache-2.0
"""The kernels that a call runs on the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from collections.abc import Callable


def kernels_of(call: Callable[[], object]) -> list[Any]:
    """The profiler's events of *call* on the GPU, each with its `name` and its `device_time` in microseconds."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        call()
        torch.cuda.synchronize()
    return [event for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
