# SPDX-License-Identifier: Apache-2.0
"""The inputs of one call, and functions on all its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor


if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Sample:
    """Arguments in the schema's own names; `origin` says which provider made them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    origin: str
    dtype: torch.dtype

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Sample:
        """The same call with every tensor changed, including those in lists."""
        args = tuple(_map(value, change) for value in self.args)
        kwargs = {name: _map(value, change) for name, value in self.kwargs.items()}
        return Sample(args, kwargs, self.origin, self.dtype)

    def tensors(self) -> list[Tensor]:
        """Every tensor of the call."""
        found: list[Tensor] = []
        self.map_tensors(lambda t: (found.append(t), t)[1])  # type: ignore[func-returns-value]
        return found

    def without_generators(self) -> Sample:
        """The same call, with the default generator."""
        args = tuple(None if isinstance(value, torch.Generator) else value for value in self.args)
        kwargs = {n: None if isinstance(v, torch.Generator) else v for n, v in self.kwargs.items()}
        return Sample(args, kwargs, self.origin, self.dtype)

    def fresh(self) -> Sample:
        """Copies that a call may write to; generators start from the same state."""
        return self.map_tensors(lambda t: t.detach().clone())


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_map(item, change) for item in value)
    return value


def seed(sample: Sample) -> None:
    """Set the default generator, and one that the call passes, to the state from which both sides start."""
    torch.manual_seed(0)
    for value in (*sample.args, *sample.kwargs.values()):
        if isinstance(value, torch.Generator):
            value.manual_seed(0)
