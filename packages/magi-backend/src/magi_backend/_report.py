# SPDX-License-Identifier: Apache-2.0
"""What happened when a function was compiled and run, to read in a terminal, in a browser, or in a program."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from rich.console import RenderableType

    from ._compare import Difference
    from ._records import Compilation


@dataclass(frozen=True)
class CallRecord:
    """One explained call.

    Attributes:
        inputs: Shape and dtype of each tensor argument.
        first_seconds: The compiled call, with the compilations that it caused, forward and backward.
        next_seconds: The same call again, the faster of two.
        eager_seconds: The same call without the compiler, the faster of two.
        compilations: How many graphs the call made the backend compile.
        graph_breaks: Why Dynamo gave up tracing, and continued after it, during the first call.
        differences: Every output, and every gradient where there are any, against eager.
    """

    inputs: tuple[str, ...]
    first_seconds: float
    next_seconds: float
    eager_seconds: float
    compilations: int
    graph_breaks: tuple[str, ...]
    differences: tuple[Difference, ...]

    def largest(self, *, gradients: bool) -> Difference | None:
        """The output, or the gradient, that is furthest from eager; None when there is none."""
        chosen = [d for d in self.differences if d.name.startswith("gradient") == gradients]
        return max(chosen, key=lambda d: (not d.agrees, d.largest), default=None)


@dataclass(frozen=True)
class Report:
    """What :func:`explain` found.

    Attributes:
        target: Name of the explained function or module.
        torch: Version of torch.
        calls: The explained calls so far.
        compilations: Every graph that the backend compiled for them.
    """

    target: str
    torch: str
    calls: tuple[CallRecord, ...]
    compilations: tuple[Compilation, ...]

    @property
    def agrees(self) -> bool:
        """Whether every output and gradient of every call agrees with eager."""
        return all(difference.agrees for call in self.calls for difference in call.differences)

    def to_text(self, width: int = 120) -> str:
        """The report as plain text, at most *width* columns wide."""
        from ._report_text import as_text

        return as_text(self, width)

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON; infinite differences become the string "inf"."""
        return json.dumps(_plain(dataclasses.asdict(self)), indent=indent)

    def to_html(self) -> str:
        """The report as one HTML page that needs no other file."""
        from ._report_html import as_html

        return as_html(self)

    def __str__(self) -> str:
        return self.to_text()

    def __rich__(self) -> RenderableType:
        from ._report_text import as_renderable

        return as_renderable(self)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
