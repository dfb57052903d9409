# SPDX-License-Identifier: Apache-2.0
"""The same random numbers for several runs, and nothing of it left behind."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def replayed_random_numbers() -> Iterator[Callable[[], None]]:
    """Put the generators of the CPU and of every GPU back at the end; in between the value does so when it is called.

    Example:
        >>> with replayed_random_numbers() as rewind:
        ...     first = torch.rand(2)
        ...     rewind()
        ...     torch.equal(torch.rand(2), first)
        True
    """
    # Without a list of devices `fork_rng` warns where there is more than one (torch/random.py).
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices):
        cpu, gpus = torch.random.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]

        def rewind() -> None:
            torch.random.set_rng_state(cpu)
            for device, state in zip(devices, gpus, strict=True):
                torch.cuda.set_rng_state(state, device)

        yield rewind
