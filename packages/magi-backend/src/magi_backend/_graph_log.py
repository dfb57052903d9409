# SPDX-License-Identifier: Apache-2.0
"""The record of each graph of one piece that is compiled or comes from a cache."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import magi_passes

from . import _torch_compat
from ._passes import ActiveRepairs
from ._profile import Meter
from ._records.hidden import graph_text, hidden_in_code, without_fractions
from ._records.log import external_calls, generated_kernels
from ._repairs._defect import repaired
from .records import ConfigChange, FallBack, GraphChange, GraphRecord, PassOutcome, RepairOutcome


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import Graph, GraphModule

    from ._records.log import CompilationLog
    from ._repairs._defect import Defect


class GraphLog:
    """Compiles the graphs of one piece with the repairs of *defects*, and writes a record of each to *log*.

    Once *fell_back* is set, it compiles without repairs.
    """

    def __init__(
        self,
        log: CompilationLog,
        title: str,
        defects: tuple[Defect, ...],
        *,
        profiles: bool,
        fell_back: FallBack | None = None,
    ) -> None:
        self._log = log
        self.title = title
        self._defects = defects
        self._profiles = profiles and log.keeps_texts
        self._before = ""
        self._changes: list[GraphChange] = []
        self._pass_records: list[magi_passes.PassRecord] = []
        self._repairs: Counter[str] = Counter()
        self._outcomes: tuple[PassOutcome, ...] = ()
        self.fell_back = fell_back

    @property
    def label(self) -> str:
        """The name of what is compiled, with that of the piece."""
        return f"{self._log.label} {self.title}".strip()

    def passes_at_work(self) -> tuple[str, ...]:
        """The passes that ran on the last graph, or on the joint graph since, and one that raised an error."""
        outcomes = (*self._outcomes, *self._new_outcomes())
        return tuple(dict.fromkeys(each.name for each in outcomes if each.ran or each.reason.startswith("raised ")))

    @property
    def _repaired(self) -> tuple[Defect, ...]:
        return () if self.fell_back else self._defects

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A context that collects what passes and caches do in its compilations, and in their later backwards."""
        observe = self._observe if self._log.keeps_texts else None
        joint = tuple(defect for defect in self._repaired if defect.is_of_joint_graphs)
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
        given, before, meter = self._log.kept(graph), _torch_compat.frames.phase_seconds(), Meter()
        result, error, start, defects = None, "", time.perf_counter(), self._repaired
        try:
            with (
                # What is compiled here has a record of its own.
                self._seeing(meter.attach if self._profiles else lambda *_: None),
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
                lowered=self._log.kept(graph),
                phases=tuple((phase, after[phase] - before[phase]) for phase in after),
                **self._code(result),
            )
            self._log.add_graph(record)
            meter.report = partial(self._log.add_runs, record)
        return result

    def _seeing(self, see: Callable[..., None]) -> contextlib.AbstractContextManager[None]:
        return _torch_compat.compiling.seeing_loaded(see) if self._log.keeps_texts else contextlib.nullcontext()

    def _observe(self, name: str, graph: Graph) -> None:
        """Read *graph* before a pass if *name* is empty, otherwise after the pass *name*; keep both if it changed."""
        with self._log.spending():
            text = graph_text(graph)
            if name and text != self._before:
                keep = self._log.keep_text
                self._changes.append(GraphChange(name, keep(self._before), keep(text)))
            self._before = text

    def _note_cached(self, compiled: Any, is_backward: bool, names: dict[str, Any]) -> None:
        """Write the record of a graph from AOTAutograd's cache, of which only the code is known."""
        kind, code = "backward" if is_backward else "forward", self._code(compiled)
        record = GraphRecord(kind, 0, (), (), (), seconds=0.0, piece=self.title, cached=True, **code)
        self._log.add_graph(record)
        if self._profiles:
            Meter(partial(self._log.add_runs, record)).attach(compiled, is_backward, names)

    def _code(self, compiled: Any) -> dict[str, Any]:
        source, code = str(getattr(compiled, "source_code", None) or ""), ""
        if self._log.keeps_texts:
            with self._log.spending():
                code = self._log.keep_text(hidden_in_code(source))
        return {"kernels": generated_kernels(source), "externs": external_calls(source), "code": code}

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
