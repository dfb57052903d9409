# SPDX-License-Identifier: Apache-2.0
"""The record of one compilation while it grows, with what each pass did, and its way to files and trace of torch."""

from __future__ import annotations

import contextlib
import logging
import operator
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

import magi_opschema
from magi_opschema.errors import UnknownOpError
from torch.fx import GraphModule

from magi_backend import _torch_compat
from magi_backend.records import CacheUse, CheckOutcome, Compilation, GraphRecord, KernelRun, OpUse

from .folder import EntryFile
from .hidden import graph_text, without_fractions


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


def registered(target: object) -> magi_opschema.OpDef | None:
    """The definition of the operator that a graph node calls; None if it was not registered with magi-opschema."""
    if not _torch_compat.nodes.is_operator(target):
        return None
    try:
        return magi_opschema.op_def(target)
    except UnknownOpError:
        return None


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

    def keep_text(self, text: str) -> str:
        """What to put into the record for *text*: *text* itself, or the reference to a file with it."""
        if self.watched or self.file is None:
            return text
        with self.spending():
            return self.file.folder.keep(text)

    def kept(self, gm: GraphModule) -> str:
        """What to put into the record for the text of *gm*; empty if nobody reads it."""
        if not self.keeps_texts:
            return ""
        with self.spending():
            return self.keep_text(graph_text(gm.graph))

    def forget(self) -> None:
        """Remove the file of this record, and write no other one."""
        if self.file is not None:
            self.file.remove()
            self.file = None

    def finish(self, **changes: Any) -> None:
        """Replace fields of the record when the backend has returned; a backward may still be added later."""
        self._finished = True
        with self._lock:
            inductor = sum(graph.seconds for graph in self.compilation.graphs)
        self.update(inductor_seconds=inductor, **changes)

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
            self.finish(seconds=time.perf_counter() - start)

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
