# SPDX-License-Identifier: Apache-2.0
"""The collectors that are open where a compilation starts, and its log from the start to the end."""

from __future__ import annotations

import contextlib
import threading
import time
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from magi_backend import _torch_compat

from .breaks import graph_break, recompilation
from .folder import EntryFile
from .hidden import without_fractions
from .log import CompilationLog
from .records import CacheUse, Compilation, OpUse, describe_input
from .run import ProcessFile, count_ours, process_file


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch.fx import GraphModule

    from magi_backend._settings.options import Request


class Collector:
    """The compilations that started while it was open, in order."""

    def __init__(self, *, fresh: bool, eager_random: bool = False) -> None:
        self.fresh = fresh
        self.eager_random = eager_random
        """Whether compilations use the random numbers of eager mode from here on."""
        self.dtypes: set[torch.dtype] = set()
        """The dtypes of the tensors in the captured graphs."""
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
    """A context in which every compilation that starts on this thread is added to *collector*."""
    token = _collector.set(collector)
    try:
        yield
    finally:
        _collector.reset(token)


class _Frame(threading.local):
    """The compilations of the function that Dynamo is capturing on this thread."""

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
    """A context with the log of one compilation; times, cache use and a failure are filled in at its end."""
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
        collector.dtypes |= _torch_compat.dtypes_in(gm)
    if log.keeps_texts:
        with log.spending():
            log.update(**_capture(gm), captured=log.kept(gm))
            _frame.logs.append(log)
            if report:
                _frame.files.add(process_file(report))
            _torch_compat.when_frames_end(_frame_ended)
    start, counts = time.perf_counter(), _torch_compat.cache_counts()
    try:
        yield log
    except _torch_compat.restarts():
        # Dynamo will capture the function again.
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
    """What Dynamo reports about the function from which it captured *gm*."""
    frame, stopped = _torch_compat.captured_frame(), _torch_compat.stopped_by(gm)
    return {
        "compile_id": frame.compile_id,
        "function": frame.function,
        "place": frame.place,
        "recompiled": recompilation(frame.recompiled),
        "stopped": None if stopped is None else graph_break(stopped),
    }
