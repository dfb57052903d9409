# SPDX-License-Identifier: Apache-2.0
"""The record of one compilation while it grows, its way to files and torch's trace, and the collectors that get it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import operator
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from magi_backend import _torch_compat
from magi_backend._register import registered
from magi_backend._settings import Request
from magi_backend.records import (
    CacheUse,
    CheckOutcome,
    Compilation,
    GraphBreak,
    GraphRecord,
    KernelRun,
    OpUse,
    describe_input,
)

from .folder import EntryFile, Folder, Process, file_stem, folder_of, from_plain, this_process, to_plain
from .hidden import graph_break, graph_text, recompilation, without_fractions


# "cpp_fused_add_0 = async_compile.cpp_pybinding(...)", "triton_poi_fused_1 = async_compile.triton('triton_...', ...)"
_KERNEL = re.compile(r"^(\w+) = async_compile\.\w+\(", re.MULTILINE)
# "buf3 = extern_kernels.convolution(...)", "torch.ops.aten.convolution_backward.default(...)"
_EXTERN = re.compile(r"\b(?:extern_kernels\.(\w+)|torch\.ops\.(\w+\.\w+))[.\w]*\(")
# "call_5_mylib_op_default_CUDA = getattr(torch.ops.mylib.op.default, 'magi_direct', ...", by magi-opschema
_DIRECT = re.compile(r"^(\w+) = getattr\((torch\.ops\.\w+\.\w+)\.\w+, 'magi_direct'", re.MULTILINE)


def op_uses(gm: GraphModule) -> tuple[OpUse, ...]:
    """Each operator registered through magi-opschema that *gm* calls, also in nested graphs, in order of appearance."""
    calls = Counter(node.target for node in _torch_compat.nodes.nodes_in(gm) if node.op == "call_function")
    return tuple(
        OpUse(
            name=definition.name,
            path=definition.path,
            calls=count,
            description=str(definition),
            boundary="subgraph_boundary" in definition.traits,
            compute_sensitive="compute_sensitive" in definition.traits,
            floats=tuple(
                ".".join(map(str, leaf.path))
                for leaf in definition.lowering.leaves
                if leaf.schema_type.startswith("float")
            ),
        )
        for target, count in calls.items()
        if (definition := registered(target)) is not None
    )


def generated_kernels(source: str) -> tuple[str, ...]:
    """The names of the kernels that Inductor's generated module *source* defines."""
    return tuple(_KERNEL.findall(source))


def external_calls(source: str) -> tuple[str, ...]:
    """The names of the library functions that Inductor's generated module *source* calls, one for each call."""
    direct = dict(_DIRECT.findall(source))
    called = re.sub(r"\b(\w+)\(", lambda found: f"{direct.get(found[1], found[1])}(", source) if direct else source
    return tuple(name or op for name, op in _EXTERN.findall(called))


_SOURCE = re.compile(r"^(\w+) = async_compile\.\w+\((.*?)(\x27{3}|\x22{3})(.*?)\3.*?\)\n", re.MULTILINE | re.DOTALL)


def kernel_sources(code: str) -> dict[str, str]:
    r"""The source of each kernel that the generated module *code* defines, by name.

    Example:
        >>> kernel_sources("cpp_fused_0 = async_compile.cpp_pybinding(['float*'], r'''\nvoid kernel();\n''')\n")
        {'cpp_fused_0': 'void kernel();'}
    """
    return {found[1]: found[4].strip("\n") for found in _SOURCE.finditer(code)}


def without_kernels(code: str) -> str:
    """The generated module *code* with the source of each kernel replaced by its name."""
    return _SOURCE.sub(lambda found: f"{found[1]} = …  # below, by itself\n", code)


logger = logging.getLogger("magi_backend")


@dataclass(eq=False)
class CompilationLog:
    """The record of one compilation while it grows. A backward may join it later and from another thread."""

    compilation: Compilation
    fresh: bool
    """Whether caches are bypassed, so that every graph is compiled and recorded."""
    watched: bool = False
    """Whether a collector will read it, so that calls are counted."""
    eager_random: bool = False
    """Whether the code uses the random numbers of eager mode, to be compared with it."""
    file: EntryFile | None = None
    _finished: bool = False
    counts: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """Return what is known of the calls, for fields of the record, each time that it is read or written."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _spending: threading.local = field(default_factory=threading.local)

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """A context whose time counts as that of the record; nested ones count once."""
        if getattr(self._spending, "inside", False):
            yield
            return
        self._spending.inside, start = True, time.perf_counter()
        try:
            yield
        finally:
            self._spending.inside = False
            with self._lock:
                spent = self.compilation.report_seconds + time.perf_counter() - start
                self.compilation = replace(self.compilation, report_seconds=spent)

    @property
    def keeps_texts(self) -> bool:
        """Whether graphs and code are kept as text, because the record will be read."""
        return self.watched or self.file is not None

    def kept(self, text: Callable[[], str]) -> str:
        """What to put into the record for a *text*: itself, or the reference to a file with it; empty if unread."""
        if not self.keeps_texts:
            return ""
        with self.spending():
            return text() if self.watched or self.file is None else self.file.folder.keep(text())

    def forget(self) -> None:
        """Remove the file of this record, and write no other one."""
        if self.file is not None:
            self.file.remove()
            self.file = None

    @property
    def label(self) -> str:
        """The name of what is compiled."""
        return self.compilation.label

    def _change(self, change: Callable[[Compilation], dict[str, Any]]) -> None:
        """Replace the fields that *change* has for the record, and write it to its file if it has one."""
        with self._lock:
            self.compilation = replace(self.compilation, **change(self.compilation))
        if self.file is not None:
            with self.spending():
                self.file.write(self.snapshot(), finished=self._finished)

    def update(self, **changes: Any) -> None:
        """Replace fields of the record."""
        self._change(lambda _: changes)

    def add_graph(self, graph: GraphRecord) -> None:
        """Append the record of one forward or backward graph."""
        for repair in graph.repairs:
            logger.info("%s %s: repair %s: %s", self.label, graph.kind, repair.name, repair.repair)
        # magi-passes logs and traces what the passes did.
        _torch_compat.compiling.trace_artifact(
            "magi_backend", lambda: {name: value for name, value in asdict(graph).items() if name != "passes"}
        )
        called = {name.replace(".", "::") for name in graph.externs}

        def joined(now: Compilation) -> dict[str, Any]:
            ops = (replace(op, stays=op.stays or op.name in called.union(now.pieces)) for op in now.ops)
            return {"graphs": (*now.graphs, graph), "ops": tuple(ops)}

        self._change(joined)

    def add_runs(self, graph: GraphRecord, runs: tuple[KernelRun, ...]) -> None:
        """Add what was measured of the kernels of *graph*."""
        self._change(lambda now: {"graphs": tuple(replace(g, runs=runs) if g is graph else g for g in now.graphs)})

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """A context for the work of the compilation, whose time, use of caches and failure it records."""
        start = time.perf_counter()
        try:
            with self.counting_caches():
                yield
        except BaseException as exception:
            self.update(error=without_fractions(f"{type(exception).__name__}: {exception}"))
            raise
        finally:
            self._finished, seconds = True, time.perf_counter() - start
            # A backward may still be added later.
            self._change(lambda now: {"inductor_seconds": sum(g.seconds for g in now.graphs), "seconds": seconds})

    @contextlib.contextmanager
    def counting_caches(self) -> Iterator[None]:
        """A context whose use of the caches is added to the record, which is written at its next change."""
        before = _torch_compat.compiling.cache_counts()
        try:
            yield
        finally:
            used = list(map(operator.sub, _torch_compat.compiling.cache_counts(), before))
            with self._lock:
                cache = CacheUse(*map(operator.add, astuple(self.compilation.cache), used))
                self.compilation = replace(self.compilation, cache=cache)

    def add_check(self, check: CheckOutcome) -> None:
        """Append the result of a comparison with eager."""
        logger.info("%s: %s", self.label, check)
        self._change(lambda now: {"checks": (*now.checks, check)})

    def detached(self) -> CompilationLog:
        """A log of the same compilation that nobody reads, for other compilations that it needs."""
        return CompilationLog(self.snapshot(), fresh=True, eager_random=self.eager_random)

    def write_counts(self) -> None:
        """Write the record once more if it counts, since calls go on after the last change of it."""
        if self.counts:
            self.update()

    def snapshot(self) -> Compilation:
        """The record as it is now."""
        with self._lock:
            compilation = self.compilation
        return replace(compilation, **{name: count() for name, count in self.counts.items()})


@dataclass(frozen=True)
class BrokenAt:
    """A graph break, and how often it happened."""

    at: GraphBreak
    times: int


@dataclass(frozen=True)
class GivenUp:
    """A function that Dynamo did not capture, or not again."""

    function: str
    place: str
    """Its file and first line."""
    reason: str
    """The first line of Dynamo's error."""
    times: int
    is_raised: bool = False
    """Whether the caller got that error."""

    @property
    def is_at_limit(self) -> bool:
        """Whether Dynamo compiles it no more; torch 2.10 writes recompile_limit."""
        return "recompile limit" in self.reason.replace("_", " ")

    @property
    def became(self) -> str:
        """What happened to it then."""
        if self.is_raised:
            return "failed"
        return "runs in Python where no graph fits" if self.is_at_limit else "runs in Python"


@dataclass(frozen=True)
class ProcessRecord:
    """What one process compiled, besides the graphs of this backend, and the functions that Dynamo did not capture."""

    process: Process
    others: int = 0
    """The number of graphs that other backends compiled."""
    breaks: tuple[BrokenAt, ...] = ()
    """The graph breaks of all functions, also of those for other backends."""
    given_up: tuple[GivenUp, ...] = ()


class ProcessFile:
    """The record of this process while it grows. Dynamo calls it for every function that it has captured."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._pid = os.getpid()
        self._path = folder.path / "processes" / f"{file_stem()}.json"
        self._lock = threading.Lock()
        self._breaks: Counter[GraphBreak] = Counter()
        self._given_up: Counter[GivenUp] = Counter()
        self._seen_breaks = 0
        self._written: ProcessRecord | None = None
        self.logs: weakref.WeakSet[CompilationLog] = weakref.WeakSet()
        """Those of the compilations in the folder whose code may still be called."""
        atexit.register(self._end)
        self.write()

    def note(self, end: _torch_compat.frames.FrameEnd) -> None:
        """Count what Dynamo did, and write the record if something is new."""
        if end.failure and not end.calls:
            reason = without_fractions(end.failure).splitlines()[0]
            with self._lock:
                self._given_up[GivenUp(end.function, end.place, reason, 1, end.is_raised)] += 1
        self.write()

    def _end(self) -> None:
        if os.getpid() == self._pid:
            for log in list(self.logs):
                log.write_counts()
            self.write()

    def write(self) -> None:
        """Write the record to its file if it has changed; a process that was forked since has a file of its own."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            found = _torch_compat.frames.graph_breaks()
            if len(found) < self._seen_breaks:  # torch._dynamo.reset() forgets them
                self._seen_breaks = 0
            self._breaks.update(map(graph_break, found[self._seen_breaks :]))
            self._seen_breaks = len(found)
            record = ProcessRecord(
                this_process(),
                max(_torch_compat.frames.captured_graphs() - _ours.total(), 0),
                tuple(BrokenAt(at, times) for at, times in self._breaks.items()),
                tuple(replace(what, times=times) for what, times in self._given_up.items()),
            )
            if record != self._written:
                self._written = record
                self._folder.write(self._path, json.dumps(to_plain(record)))


_ours: Counter[str] = Counter()


def count_ours() -> None:
    """Count a graph that Dynamo captured in this process for this backend, on record or not."""
    with _lock:
        _ours["graphs"] += 1


_lock = threading.Lock()


@functools.cache
def process_file(place: str, _: int) -> ProcessFile:
    """The record of this process, whose id tells it from one that it was forked from, in the folder *place*."""
    return ProcessFile(folder_of(place))


def processes(place: Path) -> Iterator[ProcessRecord]:
    """The records of the processes that wrote into the folder *place*, in the order in which they began."""
    for path in sorted((place / "processes").glob("*.json")):
        yield from_plain(ProcessRecord, json.loads(path.read_text()))


@dataclass(eq=False)
class Collector:
    """The compilations that started while it was open, in order."""

    fresh: bool = False
    eager_random: bool = False
    """Whether compilations use the random numbers of eager mode from here on."""
    dtypes: set[torch.dtype] = field(default_factory=set)
    """The dtypes of the tensors in the captured graphs."""
    logs: list[CompilationLog] = field(default_factory=list)
    """They may still grow."""

    def __len__(self) -> int:
        return len(self.logs)

    def compilations(self) -> tuple[Compilation, ...]:
        """A record of each compilation as it is now."""
        return tuple(replace(log.snapshot(), index=index) for index, log in enumerate(self.logs))


_collector: ContextVar[Collector | None] = ContextVar("magi_collector", default=None)


def collecting(collector: Collector) -> contextlib.AbstractContextManager[Collector]:
    """A context in which every compilation that starts on this thread is added to *collector*."""
    return _torch_compat.compiling.assigned(_collector, collector)


class _Frame(threading.local):
    """The compilations of the function that Dynamo is capturing on this thread."""

    def __init__(self) -> None:
        self.logs: list[CompilationLog] = []
        self.files: set[ProcessFile] = set()


_frame = _Frame()


def _frame_ended(end: _torch_compat.frames.FrameEnd) -> None:
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
    open_one, report = _collector.get(), request.config.report
    collector = Collector() if open_one is None else open_one
    index = len(collector)
    compilation = Compilation(
        index=index,
        label=request.label or f"graph {index}",
        nodes=sum(node.op.startswith("call_") for node in gm.graph.nodes),
        inputs=tuple(describe_input(value) for value in example_inputs),
        ops=ops,
        settings=tuple((name, repr(value), request.config.origin(name)) for name, value in request.config.items()),
        capture_seconds=_torch_compat.frames.capture_seconds(),
    )
    log = CompilationLog(
        compilation,
        fresh=collector.fresh,
        watched=open_one is not None,
        eager_random=collector.eager_random,
        file=EntryFile(report) if report else None,
    )
    collector.logs.append(log)
    if log.watched:
        collector.dtypes |= _torch_compat.nodes.dtypes_in(gm)
    if log.keeps_texts:
        with log.spending():
            log.update(**_capture(gm), captured=log.kept(lambda: graph_text(gm.graph)))
            _frame.logs.append(log)
            if report:
                with _lock:  # one file for all threads
                    file = process_file(report, os.getpid())
                file.logs.add(log)
                _frame.files.add(file)
            _torch_compat.frames.when_frames_end(_frame_ended)
    try:
        with log.compiling():
            yield log
    except _torch_compat.compiling.restarts():
        # Dynamo will capture the function again.
        log.forget()
        collector.logs.remove(log)
        raise
    count_ours()


def _capture(gm: GraphModule) -> dict[str, Any]:
    """What Dynamo reports about the function from which it captured *gm*."""
    frame, stopped = _torch_compat.frames.captured_frame(), _torch_compat.frames.stopped_by(gm)
    return vars(frame) | {
        "recompiled": recompilation(frame.recompiled, _torch_compat.nodes.static_sizes(gm)),
        "stopped": None if stopped is None else graph_break(stopped),
    }
