# SPDX-License-Identifier: Apache-2.0
"""A case for the measuring processes, which does what it is told. It is a module so that they can import it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from _workers import Row


def row(case: str, arm: str, *seconds: float) -> Row:
    return {"case": case, "arm": arm, "torch": "2.11.0+cu130", "seconds": list(seconds)}


def measure_as_told(what: str, *, commands: Iterator[str]) -> list[Row]:
    """A case for the processes: it measures, fails at once, fails while it measures, dies, or hangs."""
    if what == "fails":
        msg = "no such thing\nwith details"
        raise ValueError(msg)
    next(commands)
    if what == "dies":
        sys.exit(3)
    if what == "hangs":
        time.sleep(60)
    return [row("case", what, *(1.0 for _ in commands))]
