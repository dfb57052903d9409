# SPDX-License-Identifier: Apache-2.0

"""A fragment of a real model, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


EVERY = "every"
"""All sizes are symbols, as under ``torch.compile(dynamic=True)``."""

HEIGHT_AND_WIDTH = "height and width"
"""Only the dimensions H and W are symbols, marked as dynamic."""


@dataclass(frozen=True)
class Argument:
    """A Tensor argument: its dimensions by name or number, how it lies in memory, and what it holds.

    The layout is contiguous, channels_last, or frames_first: a video whose frames lie as images, one after the other.
    """

    dims: str
    layout: str = "contiguous"
    values: str = "normal"  # or zeros


@dataclass(frozen=True)
class Fragment:
    """A module of `model`, how the model calls it, and at which sizes.

    `module` is a path and a class, and `line` where that class begins. Strings among `options`, its parameters, may
    name a size. `call` names one of `_fragment_calls.CALLS`, and `empty_caches` says how many caches it finds empty.
    `tiny` replaces `sizes` where a run has only to show that it works.
    """

    name: str
    model: str
    module: str
    line: int
    options: Mapping[str, Any]
    arguments: tuple[Argument, ...]
    sizes: Mapping[str, int]
    tiny: Mapping[str, int]
    symbolic: str = EVERY
    call: str = "plain"
    empty_caches: int = 0
