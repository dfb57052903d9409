# SPDX-License-Identifier: Apache-2.0
"""The line on a terminal that says what is being compiled, for how long by now, and how long it may still take.

How long it may take is known from earlier compilations, which a file in Inductor's cache directory remembers. Those of
the same graph say most; else each call in the graph is expected to take as long as in others. What comes from a cache
is done sooner.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from . import _torch_compat
from ._records.folder import write_whole


MOST_KEPT = 200
"""How many graphs the file remembers: those that were compiled last."""

_showing = threading.Lock()
"""Held while a process shows its one line: compilations on a second thread, or inside another one, show nothing."""


@contextlib.contextmanager
def progress(gm: GraphModule, label: str, first: str, *, wanted: bool) -> Iterator[Callable[[str], None]]:
    """A context that shows *label*, the phase and the time if that is *wanted*, with a function to name the next phase.

    That may be called after the context has ended, for a graph that is compiled later, and then does nothing.
    """
    with contextlib.ExitStack() as stack:
        if not wanted or not _showing.acquire(blocking=False):
            yield lambda _: None
            return
        stack.callback(_showing.release)

        from rich.console import Console
        from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
        from rich.text import Text

        console = Console(stderr=True)
        if not console.is_terminal:
            yield lambda _: None
            return
        names = [_torch_compat.nodes.called_name(node) for node in gm.graph.nodes if node.op.startswith("call_")]
        key = hashlib.sha256(f"{first} {names}".encode()).hexdigest()[:16]
        expected = expected_seconds(key, len(names), _read())

        class TimeLeft(ProgressColumn):
            def render(self, task: Task) -> Text:
                return Text(time_left(expected, task.elapsed or 0.0))

        columns = (SpinnerColumn(), TextColumn("magi: {task.description}"), TimeElapsedColumn(), TimeLeft())
        shown = stack.enter_context(Progress(*columns, console=console, transient=True))
        task = shown.add_task(f"{label}, {first}", total=None)
        start = time.monotonic()
        yield lambda name: shown.update(task, description=f"{label}, {name}")
        _remember(key, len(names), time.monotonic() - start)


def expected_seconds(key: str, calls: int, known: dict[str, list[float]]) -> float | None:
    """How long a graph of so many *calls* may take to compile, from what is *known*: for each graph calls and seconds.

    Example:
        >>> expected_seconds("ViT", 200, {"Llama": [100, 10.0]})
        20.0
    """
    if key in known:
        return known[key][1]
    return calls * statistics.median(seconds / each for each, seconds in known.values()) if known else None


def time_left(expected: float | None, elapsed: float) -> str:
    """What the line says of the seconds that are left of those that were *expected*; nothing if there are none."""
    left = 0.0 if expected is None else expected - elapsed
    return f"about {left:.0f} s left" if left >= 1 else ""


def _file() -> Path:
    return Path(_torch_compat.compiling.inductor_cache(), "magi_seconds.json")


def _read() -> dict[str, list[float]]:
    """What the file remembers; nothing if there is none, or if something else has written to it."""
    try:
        found: Any = json.loads(_file().read_text())
        return {str(key): [max(1, int(calls)), float(seconds)] for key, (calls, seconds) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _remember(key: str, calls: int, seconds: float) -> None:
    """Write *seconds* to the file, unless it took far less than before, as what a cache has does."""
    known = _read()
    before = known.pop(key, None)
    known[key] = [calls, seconds if before is None or seconds > before[1] / 4 else before[1]]
    with contextlib.suppress(OSError):  # a full disk, or a folder that may not be written to
        _file().parent.mkdir(parents=True, exist_ok=True)
        write_whole(_file(), json.dumps(dict(list(known.items())[-MOST_KEPT:])).encode())
