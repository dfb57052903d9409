# SPDX-License-Identifier: Apache-2.0
"""Show what is being compiled and for how long, on a terminal only."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ._settings import Request


_showing = threading.Lock()


@contextlib.contextmanager
def phase(request: Request, label: str, first: str) -> Iterator[Callable[[str], None]]:
    """A context that shows *label*, the phase and the time that passed, with a function that names the next phase.

    That may be called after the context has ended, for a graph that is compiled later, and then does nothing.
    """
    with contextlib.ExitStack() as stack:
        # A process shows one line: compilations on a second thread, or inside another one, show nothing.
        if not request.config.progress or not _showing.acquire(blocking=False):
            yield lambda _: None
            return
        stack.callback(_showing.release)

        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        if not console.is_terminal:
            yield lambda _: None
            return
        columns = (SpinnerColumn(), TextColumn("magi: {task.description}"), TimeElapsedColumn())
        progress = stack.enter_context(Progress(*columns, console=console, transient=True))
        task = progress.add_task(f"{label}, {first}", total=None)
        yield lambda name: progress.update(task, description=f"{label}, {name}")
