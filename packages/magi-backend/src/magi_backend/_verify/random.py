# SPDX-License-Identifier: Apache-2.0
"""The same random numbers for several runs, with the generators restored afterwards."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Replay:
    """The states of the generators of the CPU and of every GPU at one time."""

    cpu: torch.Tensor
    gpus: tuple[torch.Tensor, ...]

    def rewind(self) -> None:
        """Restore the generators."""
        torch.random.set_rng_state(self.cpu)
        for device, state in enumerate(self.gpus):
            torch.cuda.set_rng_state(state, device)

    def were_drawn(self) -> bool:
        """Whether random numbers were generated since."""
        now = _states()
        pairs = zip((self.cpu, *self.gpus), (now.cpu, *now.gpus), strict=True)
        return not all(torch.equal(before, after) for before, after in pairs)


def _states() -> Replay:
    gpus = tuple(torch.cuda.get_rng_state(device) for device in range(torch.cuda.device_count()))
    return Replay(torch.random.get_rng_state(), gpus)


@contextmanager
def replayed_random_numbers() -> Iterator[Replay]:
    """A context with the current states of the generators, to go back to; they are restored at the end.

    Example:
        >>> with replayed_random_numbers() as numbers:
        ...     first = torch.rand(2)
        ...     numbers.rewind()
        ...     torch.equal(torch.rand(2), first)
        True
    """
    # Without a list of devices `fork_rng` warns where there is more than one (torch/random.py).
    with torch.random.fork_rng(list(range(torch.cuda.device_count()))):
        yield _states()
