# SPDX-License-Identifier: Apache-2.0
"""What one explained call cost, and how far its results were from eager."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from magi_backend._verify.compare import Difference


@dataclass(frozen=True)
class CallRecord:
    """One explained call.

    Attributes:
        inputs: Shape and dtype of each tensor argument.
        first_seconds: The time of the compiled call with the compilations that it caused, forward and backward.
        later_seconds: The times of the same call, run again.
        eager_seconds: The times of the same call without the compiler, including the first one.
        compilations: The number of graphs that the backend compiled for the call.
        graph_breaks: Where and why Dynamo gave up tracing, and continued after it, during the first call.
        differences: Every output, and every gradient if there are any, compared with eager.
        layouts: A line for each output whose strides differ from eager's.
        random: Which random numbers the two sides used; empty if they used none.
        again: Whether the function had been compiled before, and was compiled again for the report.
    """

    inputs: tuple[str, ...]
    first_seconds: float
    later_seconds: tuple[float, ...]
    eager_seconds: tuple[float, ...]
    compilations: int
    graph_breaks: tuple[str, ...]
    differences: tuple[Difference, ...]
    layouts: tuple[str, ...] = ()
    random: str = ""
    again: bool = False

    def largest(self, *, gradients: bool) -> Difference | None:
        """The output, or the gradient, that is furthest from eager; None when there is none."""
        chosen = [d for d in self.differences if d.name.startswith("gradient") == gradients]
        return max(chosen, key=lambda d: (not d.agrees, d.largest), default=None)

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """The differences from eager that exceed the tolerance."""
        return tuple(difference for difference in self.differences if not difference.agrees)

    def lines(self) -> tuple[str, ...]:
        """Lines about the call to add to its row in a table: differences, graph breaks and other unusual results."""
        wrong = [f"DIFFER: {_said(difference)}" for difference in self.wrong]
        if wrong:
            wrong.append('Which operator is to blame: compile with options={"magi.check": True}, and call it once.')
        breaks = [f"Graph break at {text}" for text in self.graph_breaks]
        again = ["It had been compiled before; for this report it was compiled again."] * self.again
        return (*breaks, *again, *([self.random] if self.random else []), *self.layouts, *wrong)


def _said(difference: Difference) -> str:
    if difference.note:
        return f"{difference.name}: {difference.note}"
    allowed = f"{difference.tolerance.atol:.1g} + {difference.tolerance.rtol:.1g} x the value"
    return f"{difference.name} by {difference.largest:.1e} (allowed: {allowed})"


def spread(seconds: tuple[float, ...]) -> str:
    """The median of *seconds* as text, with the smallest and the largest."""
    if not seconds:
        return "not run"
    median = statistics.median(seconds)
    return shown(median) if len(seconds) == 1 else f"{shown(median)} ({shown(min(seconds))} to {shown(max(seconds))})"


def shown(seconds: float) -> str:
    """*seconds* as text in a suitable unit."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def counted(number: int, thing: str) -> str:
    """``1 kernel``, ``2 kernels``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
