# SPDX-License-Identifier: Apache-2.0
"""The record of each graph of one piece that is compiled or comes from a cache.

Never less able than stock: what fails with our passes, options and repairs is compiled once more without them.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import magi_passes
from torch.fx import Graph, GraphModule

from . import _torch_compat
from ._passes import ActiveRepairs
from ._profile import Meter
from ._records.hidden import graph_text, hidden_in_code, without_fractions
from ._records.log import CompilationLog, external_calls, generated_kernels
from ._repairs._defect import Defect, repaired
from .errors import family
from .records import ConfigChange, FallBack, GraphChange, GraphRecord, PassOutcome, RepairOutcome


T = TypeVar("T")


@dataclass(eq=False)
class GraphLog:
    """Compiles the graphs of one piece with the repairs of *defects*, and writes a record of each to *log*."""

    log: CompilationLog
    title: str
    defects: tuple[Defect, ...]
    profiles: bool
    fell_back: FallBack | None = None
    _before: str = ""
    _changes: list[GraphChange] = field(default_factory=list)
    _pass_records: list[magi_passes.PassRecord] = field(default_factory=list)
    _repairs: Counter[str] = field(default_factory=Counter)
    _outcomes: tuple[PassOutcome, ...] = ()

    def able_as_stock(self, attempt: Callable[[], T], again: Callable[[FallBack], T], passes: Sequence[object]) -> T:
        """What *attempt* returns; if it fails where stock might not, what *again* returns, with a warning.

        *passes* are those that we added. If *again* fails too, its error is raised, which is that of stock Inductor.
        """
        try:
            return attempt()
        except Exception as error:
            if not _may_be_ours(error, passes):
                raise
            failed = without_fractions(f"{type(error).__name__}: {error}")
        # Those that ran on the last graph, or on the joint graph since, and one that raised an error.
        outcomes = (*self._outcomes, *self._new_outcomes())
        at_work = dict.fromkeys(each.name for each in outcomes if each.ran or each.reason.startswith("raised "))
        fell_back = FallBack(failed, tuple(at_work))
        result, name = again(fell_back), f"{self.log.label} {self.title}".strip()
        warnings.warn(
            f"{name} was {fell_back}. Results are right, but the code may be slower. Please report this with what "
            "MAGI_COMPILE_REPORT=FOLDER writes. MAGI_COMPILE_STRICT=1 raises the error instead.",
            stacklevel=2,
        )
        return result

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A context that collects what passes and caches do in its compilations, and in their later backwards."""
        observe = self._observe if self.log.keeps_texts else None
        joint = tuple(defect for defect in self.defects if defect.is_of_joint_graphs)
        with (
            magi_passes.collect_records(observe) as self._pass_records,
            self._seeing(self._note_cached),
            repaired(joint, lambda name: self._repairs.update([name])),
        ):
            yield

    def compiled(self, graph: GraphModule, kind: str, compile_graph: Callable[[], Any]) -> Any:
        """What *compile_graph* returns for *graph*; a record is written also if it raises."""
        nodes, symbols = sum(node.op == "call_function" for node in graph.graph.nodes), graph_symbols(graph)
        # Repairs of the joint graph are recorded with the forward, which is compiled first.
        repairs, self._repairs = self._repairs, Counter()
        given = self.log.kept(lambda: graph_text(graph.graph))
        before, meter = _torch_compat.frames.phase_seconds(), Meter()
        result, error, start, defects = None, "", time.perf_counter(), self.defects
        try:
            with (
                # What is compiled here has a record of its own.
                self._seeing(meter.attach if self.profiles else lambda *_: None),
                repaired(defects, lambda name: repairs.update([name])),
            ):
                result = compile_graph()
        except BaseException as exception:
            error = without_fractions(f"{type(exception).__name__}: {exception}")
            raise
        finally:
            seconds, after = time.perf_counter() - start, _torch_compat.frames.phase_seconds()
            self._outcomes, changes, self._changes = self._new_outcomes(), self._changes, []
            record = GraphRecord(
                kind=kind,
                nodes=nodes,
                symbols=symbols,
                passes=self._outcomes,
                repairs=tuple(
                    RepairOutcome(each.name, each.severity, each.effect, each.repair, repairs[each.name])
                    for each in defects
                    if repairs[each.name]
                ),
                seconds=seconds,
                piece=self.title,
                error=error,
                fell_back=self.fell_back,
                given=given,
                # Those of the joint graph count for the forward, which is compiled first.
                changed=tuple(changes),
                lowered=self.log.kept(lambda: graph_text(graph.graph)),
                phases=tuple((phase, after[phase] - before[phase]) for phase in after),
                **self._code(result),
            )
            self.log.add_graph(record)
            meter.report = partial(self.log.add_runs, record)
        return result

    def _seeing(self, see: Callable[..., None]) -> contextlib.AbstractContextManager[None]:
        return _torch_compat.compiling.seeing_loaded(see) if self.log.keeps_texts else contextlib.nullcontext()

    def _observe(self, name: str, graph: Graph) -> None:
        """Read *graph* before a pass if *name* is empty, otherwise after the pass *name*; keep both if it changed."""
        with self.log.spending():
            text = graph_text(graph)
            if name and text != self._before:
                before, kept = self._before, self.log.kept
                self._changes.append(GraphChange(name, kept(lambda: before), kept(lambda: text)))
            self._before = text

    def _note_cached(self, compiled: Any, names: dict[str, Any]) -> None:
        """Write the record of a graph from AOTAutograd's cache, of which only the code is known."""
        kind, code = _torch_compat.compiling.graph_kind(compiled.fx_kwargs), self._code(compiled)
        record = GraphRecord(kind, 0, (), (), (), seconds=0.0, piece=self.title, cached=True, **code)
        self.log.add_graph(record)
        if self.profiles:
            Meter(partial(self.log.add_runs, record)).attach(compiled, names)

    def _code(self, compiled: Any) -> dict[str, Any]:
        source = str(getattr(compiled, "source_code", None) or "")
        return {
            "kernels": generated_kernels(source),
            "externs": external_calls(source),
            "code": self.log.kept(lambda: hidden_in_code(source)),
            "unrecorded": _torch_compat.recording.why_unrecorded(compiled),
        }

    def _new_outcomes(self) -> tuple[PassOutcome, ...]:
        """What the passes did since the last call; those of the joint graph count for the forward, compiled first."""
        fresh = self._pass_records.copy()
        del self._pass_records[: len(fresh)]
        return tuple(
            PassOutcome(
                record.pass_name,
                record.ran,
                record.reason,
                tuple(ConfigChange(key, repr(old), repr(new)) for key, (old, new) in record.config_changes.items()),
                record.seconds,
            )
            for record in fresh
            if record.pass_name != ActiveRepairs.__name__  # it only represents the repairs
        )


def _may_be_ours(error: BaseException | None, passes: Sequence[object]) -> bool:
    """Whether *error* can come from what we changed: not from a pass of the user's, a wrong setting or a wrong op."""
    own = family()
    while error is not None:
        failed_pass = vars(error).get("failed_pass")
        if failed_pass is not None:
            return any(failed_pass is each for each in passes)
        if isinstance(error, own) or not _torch_compat.compiling.is_failure(error):
            return False
        error = getattr(error, "inner_exception", None) or error.__cause__
    return True


def graph_symbols(graph: GraphModule, meta: str = "val") -> tuple[str, ...]:
    """The free symbols in the sizes of the inputs of *graph*, in order of appearance.

    *meta* is the key of their values.
    """
    symbols: dict[str, None] = {}
    for placeholder in graph.graph.find_nodes(op="placeholder"):
        value = placeholder.meta.get(meta)
        for size in (*getattr(value, "shape", ()), value):
            expression = getattr(getattr(size, "node", None), "expr", None)
            symbols |= dict.fromkeys(sorted(map(str, getattr(expression, "free_symbols", ()))))
    return tuple(symbols)
