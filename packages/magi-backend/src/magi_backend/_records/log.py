# SPDX-License-Identifier: Apache-2.0
"""The record of one compilation while it grows, and who gets to hear of it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from magi_backend import _torch_compat

from .graph_text import graph_text
from .records import CheckOutcome, Compilation, GraphRecord, KernelRun, SizesOutcome


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import GraphModule

    from .folder import EntryFile


logger = logging.getLogger("magi_backend")


class CompilationLog:
    """The record of one compilation while it grows. A backward may join it later and from another thread."""

    def __init__(
        self,
        compilation: Compilation,
        *,
        fresh: bool,
        watched: bool = False,
        eager_random: bool = False,
        file: EntryFile | None = None,
    ) -> None:
        self._compilation = compilation
        self._lock = threading.Lock()
        self._sizes: Callable[[], SizesOutcome] | None = None
        self.fresh = fresh
        """Whether caches are to be passed by, so that every graph is compiled and recorded."""
        self.watched = watched
        """Whether someone will read it, so that calls are worth counting."""
        self.eager_random = eager_random
        """Whether the code is to draw eager's random numbers, to be compared with it."""
        self._file = file
        self._finished = False
        self._spending = threading.local()

    def _keep(self) -> None:
        """Write the record to its file, where it has one."""
        if self._file is not None:
            with self.spending():
                self._file.write(self.snapshot(), finished=self._finished)

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time inside as the record's own; one inside another counts once."""
        if getattr(self._spending, "inside", False):
            yield
            return
        self._spending.inside, start = True, time.perf_counter()
        try:
            yield
        finally:
            self._spending.inside = False
            with self._lock:
                spent = self._compilation.report_seconds + time.perf_counter() - start
                self._compilation = replace(self._compilation, report_seconds=spent)

    @property
    def keeps_texts(self) -> bool:
        """Whether graphs and code are wanted as text, for someone who reads the record."""
        return self.watched or self._file is not None

    def keep_text(self, text: str) -> str:
        """What to put into the record for *text*: itself, or what stands for a file that it is in."""
        if self.watched or self._file is None:
            return text
        with self.spending():
            return self._file.folder.keep(text)

    def kept(self, gm: GraphModule) -> str:
        """What to put into the record for the text of *gm*; empty where nobody reads it."""
        if not self.keeps_texts:
            return ""
        with self.spending():
            return self.keep_text(graph_text(gm.graph))

    def forget(self) -> None:
        """Remove its file, and write no other."""
        if self._file is not None:
            self._file.remove()
            self._file = None

    def finish(self, **changes: Any) -> None:
        """Replace fields of the record, the backend having returned; a backward may join it yet."""
        self._finished = True
        with self._lock:
            inductor = sum(graph.seconds for graph in self._compilation.graphs)
        self.update(inductor_seconds=inductor, **changes)

    @property
    def label(self) -> str:
        """The name of what is compiled."""
        return self._compilation.label

    def add_graph(self, graph: GraphRecord) -> int:
        """Append the record of one forward or backward graph; its place among the graphs."""
        with self._lock:
            place = len(self._compilation.graphs)
            self._compilation = replace(self._compilation, graphs=(*self._compilation.graphs, graph))
        for outcome in graph.passes:
            logger.info(
                "%s %s: %s %s: %s",
                self.label,
                graph.kind,
                outcome.name,
                "ran" if outcome.ran else "did not run",
                outcome.reason,
            )
        for repair in graph.repairs:
            logger.info("%s %s: repair %s: %s", self.label, graph.kind, repair.name, repair.repair)
        _torch_compat.trace_artifact("magi_backend", lambda: asdict(graph))
        self._keep()
        return place

    def add_runs(self, place: int, runs: tuple[KernelRun, ...]) -> None:
        """Say what was measured of the kernels of the graph at *place*."""
        with self._lock:
            graphs = list(self._compilation.graphs)
            graphs[place] = replace(graphs[place], runs=runs)
            self._compilation = replace(self._compilation, graphs=tuple(graphs))
        self._keep()

    def add_check(self, check: CheckOutcome) -> None:
        """Append what was compared with eager."""
        with self._lock:
            self._compilation = replace(self._compilation, checks=(*self._compilation.checks, check))
        logger.info("%s: %s", self.label, check)
        self._keep()

    def update(self, **changes: Any) -> None:
        """Replace fields of the record."""
        with self._lock:
            self._compilation = replace(self._compilation, **changes)
        self._keep()

    def detached(self) -> CompilationLog:
        """A log of the same compilation that nobody reads, for what is compiled on its behalf."""
        return CompilationLog(self.snapshot(), fresh=True, eager_random=self.eager_random)

    def count_sizes(self, sizes: Callable[[], SizesOutcome]) -> None:
        """Ask *sizes* for what the calls were, each time that the record is read."""
        self._sizes = sizes

    def snapshot(self) -> Compilation:
        """The record as it is now."""
        with self._lock:
            compilation = self._compilation
        return compilation if self._sizes is None else replace(compilation, sizes=self._sizes())
