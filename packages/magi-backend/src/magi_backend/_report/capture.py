# SPDX-License-Identifier: Apache-2.0
"""What a report says of a capture that took long, which is time of torch and not of the backend."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from magi_backend._records.records import Compilation

SLOW = 30.0
"""Seconds from which on the report mentions the time of a capture."""


def capture_line(compilation: Compilation) -> str:
    """A line on how long Dynamo traced, and what helps if sizes are symbols; empty for a fast capture."""
    if compilation.capture_seconds < SLOW:
        return ""
    said = f"Dynamo traced for {compilation.capture_seconds:.0f} s before it called the backend."
    symbols = sorted({symbol for given in compilation.inputs for symbol in re.findall(r"\bs\d+\b", given)})
    if not symbols:
        return said
    return (
        f"{said} Sizes are symbols ({', '.join(symbols)}), and questions about them can take most of that, as in "
        "models that cut images into windows. Let only the batch vary: torch._dynamo.mark_dynamic(images, 0), and "
        "torch.compile(..., dynamic=False)."
    )
