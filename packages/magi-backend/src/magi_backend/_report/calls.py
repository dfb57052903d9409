# SPDX-License-Identifier: Apache-2.0
"""What one explained call took, and how far it was from eager."""

from __future__ import annotations

from dataclasses import dataclass

from magi_backend._verify.compare import Difference


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
