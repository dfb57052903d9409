# SPDX-License-Identifier: Apache-2.0
"""Who gets to hear of a compilation: the collectors that are open where it starts, the log, and torch's trace."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from contextvars import ContextVar
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from magi_backend import _torch_compat

from .breaks import graph_break, recompilation
from .folder import EntryFile
from .graph_text import graph_text
from .hidden import without_fractions
from .records import CacheUse, CheckOutcome, Compilation, GraphRecord, OpUse, SizesOutcome, describe_input
from .run import ProcessFile, count_ours, process_file


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.fx import GraphModule

    from magi_backend._settings.options import Request


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
        self._keep()

    def _keep(self) -> None:
        """Write the record to its file, where it has one."""
        if self._file is not None:
            self._file.write(self.snapshot(), finished=self._finished)

    @property
    def keeps_texts(self) -> bool:
        """Whether graphs and code are wanted as text, for someone who reads the record."""
        return self.watched or self._file is not None

    def keep_text(self, text: str) -> str:
        """What to put into the record for *text*: itself, or what stands for a file that it is in."""
        return text if self.watched or self._file is None else self._file.folder.keep(text)

    def kept(self, gm: GraphModule) -> str:
        """What to put into the record for the text of *gm*; empty where nobody reads it."""
        return self.keep_text(graph_text(gm.graph)) if self.keeps_texts else ""

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

    def add_graph(self, graph: GraphRecord) -> None:
        """Append the record of one forward or backward graph."""
        with self._lock:
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
        for guard in graph.guards:
            logger.info("%s %s: guard %s: %s", self.label, graph.kind, guard.name, guard.guard)
        _torch_compat.trace_artifact("magi_backend", lambda: asdict(graph))
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


class Collector:
    """The compilations that started while it was open, in order."""

    def __init__(self, *, fresh: bool, eager_random: bool = False) -> None:
        self.fresh = fresh
        self.eager_random = eager_random
        """Whether the compilations are to draw eager's random numbers from here on."""
        self._logs: list[CompilationLog] = []

    def add(self, log: CompilationLog) -> None:
        """Keep *log*, which may still grow."""
        self._logs.append(log)

    def __len__(self) -> int:
        return len(self._logs)

    def discard(self, log: CompilationLog) -> None:
        """Forget *log*."""
        self._logs.remove(log)

    def compilations(self) -> tuple[Compilation, ...]:
        """A record of each compilation as it is now."""
        return tuple(replace(log.snapshot(), index=index) for index, log in enumerate(self._logs))


_collector: ContextVar[Collector | None] = ContextVar("magi_collector", default=None)


@contextlib.contextmanager
def collecting(collector: Collector) -> Iterator[None]:
    """Hand every compilation that starts in this context, on this thread, to *collector*."""
    token = _collector.set(collector)
    try:
        yield
    finally:
        _collector.reset(token)


class _Frame(threading.local):
    """The compilations of the function that Dynamo captures on this thread, which has not ended."""

    def __init__(self) -> None:
        self.logs: list[CompilationLog] = []
        self.files: set[ProcessFile] = set()


_frame = _Frame()


def _frame_ended(end: _torch_compat.FrameEnd) -> None:
    logs, _frame.logs = _frame.logs, []
    for log in logs:
        log.update(frame_seconds=end.seconds)
    for file in _frame.files:
        file.note(end)


@contextlib.contextmanager
def open_log(
    gm: GraphModule, example_inputs: Sequence[Any], request: Request, ops: tuple[OpUse, ...]
) -> Iterator[CompilationLog]:
    """The log of one compilation, filled in with times, cache use and a failure when it ends."""
    collector, report = _collector.get(), request.config.report
    index = len(collector) if collector is not None else 0
    compilation = Compilation(
        index=index,
        label=request.label or f"graph {index}",
        nodes=sum(node.op.startswith("call_") for node in gm.graph.nodes),
        inputs=tuple(describe_input(value) for value in example_inputs),
        ops=ops,
        settings=tuple((name, repr(value), request.config.origin(name)) for name, value in request.config.items()),
        capture_seconds=_torch_compat.capture_seconds(),
    )
    log = CompilationLog(
        compilation,
        fresh=collector is not None and collector.fresh,
        watched=collector is not None,
        eager_random=collector is not None and collector.eager_random,
        file=EntryFile(report) if report else None,
    )
    if collector is not None:
        collector.add(log)
    if log.keeps_texts:
        log.update(**_capture(gm), captured=log.kept(gm))
        _frame.logs.append(log)
        if report:
            _frame.files.add(process_file(report))
        _torch_compat.when_frames_end(_frame_ended)
    start, counts = time.perf_counter(), _torch_compat.cache_counts()
    try:
        yield log
    except _torch_compat.restarts():
        # Dynamo will capture the function again, with what it has learnt.
        log.forget()
        if collector is not None:
            collector.discard(log)
        raise
    except BaseException as exception:
        log.update(error=without_fractions(f"{type(exception).__name__}: {exception}"))
        raise
    finally:
        after = _torch_compat.cache_counts()
        used = {
            event: sum(after[key] - counts[key] for key in counts if key.endswith(event))
            for event in ("hit", "miss", "bypass")
        }
        log.finish(seconds=time.perf_counter() - start, cache=CacheUse(used["hit"], used["miss"], used["bypass"]))
    count_ours()


def _capture(gm: GraphModule) -> dict[str, Any]:
    """What Dynamo tells of the function that it captured *gm* from."""
    frame, stopped = _torch_compat.captured_frame(), _torch_compat.stopped_by(gm)
    return {
        "compile_id": frame.compile_id,
        "function": frame.function,
        "place": frame.place,
        "recompiled": recompilation(frame.recompiled),
        "stopped": None if stopped is None else graph_break(stopped),
    }
