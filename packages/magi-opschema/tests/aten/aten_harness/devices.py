# SPDX-License-Identifier: Apache-2.0
"""Inputs on the device of a kernel. Providers make them on the CPU, where ATen decides which of them it accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from magi_opschema.aten._torch_compat import arguments

from .samples import Sample


if TYPE_CHECKING:
    from collections.abc import Iterable

    from magi_opschema.aten._dispatch.kernels import Kernel

    from .subject import Subject


CPU = torch.device("cpu")


def device_of(kernels: Iterable[Kernel]) -> torch.device:
    """The default device on which kernels of one slot are tested: the CPU if one of them serves it."""
    devices = [kernel.devices for kernel in kernels]
    if not devices or any(types is None or "cpu" in types for types in devices):
        return CPU
    return torch.device(min(type_ for types in devices for type_ in types or ()))


def missing(device: torch.device) -> str | None:
    """Why *device* cannot be used here; None if it can."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch asserts that it was built with CUDA
        return f"{device} cannot be used here: {str(error).splitlines()[0]}"
    return None


def on_device(subject: Subject, sample: Sample, device: torch.device) -> Sample:
    """The same call on *device*: its tensors, its generators, and the device argument of a factory."""
    if device == CPU:
        return sample
    moved = sample.map_tensors(lambda t: t.to(device))
    args = tuple(_generator_on(value, device) for value in moved.args)
    kwargs = {name: _generator_on(value, device) for name, value in moved.kwargs.items()}
    if not sample.tensors() and any(a.name == "device" for a in arguments(subject.leading)):
        kwargs["device"] = device
    return Sample(args, kwargs, sample.origin, sample.dtype)


def _generator_on(value: Any, device: torch.device) -> Any:
    return torch.Generator(device) if isinstance(value, torch.Generator) else value
