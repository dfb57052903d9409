# SPDX-License-Identifier: Apache-2.0
"""From a captured graph to a compiled callable: the settings, the passes, the repairs, and Inductor.

Every way into the backend ends in :func:`compile_request`. It calls Inductor's ``compile_fx`` with configuration
patches, so that caches, logs, tracing and CUDA graphs stay Inductor's own, and puts a wrapper around the compilation
of each forward and backward graph, which activates the repairs there and writes the record (`GraphLog`).

Never less able than stock: what fails with our passes, options and repairs is compiled once more without them.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import magi_tritonwrap
import torch
from magi_passes import MagiInductorPass, PassPipeline, PassRecord, collect_records
from torch.fx import Graph, GraphModule

from . import _torch_compat
from ._hot.buckets import with_buckets
from ._hot.entry import with_sizes
from ._hot.first_call import with_eager_first
from ._hot.ranks import exchange_of
from ._hot.recordings import Recordings
from ._passes import ActiveRepairs, chosen_passes
from ._profile import Meter
from ._progress import progress
from ._records.hidden import graph_text, hidden_in_code, without_fractions
from ._records.log import CompilationLog, count_ours, external_calls, generated_kernels, op_uses, open_log
from ._regions import piece_structure, regions
from ._repairs._defect import Defect, active_defects, repaired
from ._settings import Request
from ._split import boundary_overloads, compile_pieces, split_at, uncut_boundaries
from ._verify.blame import CheckedPiece, first_operator, input_names
from ._verify.compare import Difference
from ._warm import graph_facts, noted
from .errors import family
from .records import CheckOutcome, ConfigChange, FallBack, GraphChange, GraphRecord, PassOutcome, RepairOutcome


T = TypeVar("T")


@dataclass(frozen=True)
class _Job:
    """The compilation of one captured graph: the request, the log that records it, and what shows the progress."""

    request: Request
    log: CompilationLog
    show: Callable[[str], None]
    defects: tuple[Defect, ...]
    sensitive: tuple[str, ...]
    names: Mapping[str, str]
    recordings: Recordings | None
    sizes: str = ""

    def title(self, piece: str) -> str:
        """What to call *piece*, a name or empty, with the sizes that it is compiled for."""
        return f"{piece} {self.sizes}".strip()


def compile_request(gm: GraphModule, example_inputs: Sequence[Any], request: Request) -> Callable[..., Any]:
    """Compile the captured graph *gm* as *request* says."""
    config, defects, ops = request.config, active_defects(), op_uses(gm)
    sensitive = tuple(sorted(op.name for op in ops if op.compute_sensitive))
    with (
        open_log(gm, example_inputs, request, ops) as log,
        progress(gm, log.label, "capture", wanted=config.progress) as show,
    ):
        names = input_names(gm) if config.check else {}
        decides = config.hot_sizes or config.graphs or config.first_call == "eager"
        exchange = exchange_of(gm, config.boundary_ops) if decides else None
        recordings = Recordings(config.graphs, log, exchange) if config.graphs else None
        job = _Job(request, log, show, defects, sensitive, names, recordings)

        def compile_static(static: GraphModule, inputs: Sequence[Any], sizes: str) -> Callable[..., Any]:
            with progress(static, log.label, sizes, wanted=config.progress) as show, log.counting_caches():
                return _compile_graph(static, inputs, replace(job, show=show, sizes=sizes))

        padding = None
        if buckets := config.buckets:
            fallback = _torch_compat.compiling.inductor_value("fallback_random", request.inductor)
            eager_random = bool(fallback) or log.eager_random
            padding = with_buckets(gm, example_inputs, buckets, log, eager_random=eager_random)
        facts = None if log.fresh else graph_facts(gm, request, ops)  # caches are passed by then, so nothing is noted

        def compile_open(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            with noted(facts, log) as hot:
                general = partial(_compile_graph, job=job)
                padded = padding.padded_key if padding else None
                return with_sizes(gm, example_inputs, config, log, general, compile_static, hot, exchange, padded)

        def compile_beside(gm: GraphModule, example_inputs: Sequence[Any], _: str) -> Callable[..., Any]:
            with log.compiling():
                return compile_open(gm, example_inputs)

        answered = None
        if config.first_call == "eager":
            answered = with_eager_first(gm, example_inputs, log, compile_beside, exchange, strict=config.strict)
        answer = answered or compile_open(gm, example_inputs)
        return padding.around(answer) if padding else answer


def _compile_graph(gm: GraphModule, example_inputs: Sequence[Any], job: _Job) -> Callable[..., Any]:
    """Compile a whole graph, or its pieces between boundary operators."""
    named = boundary_overloads(job.request.config.boundary_ops)
    if not job.sizes and (uncut := uncut_boundaries(gm, named)):
        job.log.update(uncut=uncut)
        for sentence in uncut:
            warnings.warn(f"{job.log.label}: {sentence}", stacklevel=2)
    repeated = regions(gm, job.request.config, job.request.inductor)
    split = split_at(gm, named, repeated.blocks)
    if not job.sizes:
        found = (*repeated.found, *split.changed) if split else repeated.found
        job.log.update(regions=found, pieces=tuple(split.titles.values()) if split else ())
    if split is None:
        return _compile_checked(gm, lambda: _compile_piece(gm, example_inputs, job), job)
    made: dict[Hashable, Callable[..., Any]] = {}

    def compile_part(part: GraphModule, inputs: Sequence[Any], title: str) -> Callable[..., Any]:
        structure = piece_structure(part)

        def once() -> Callable[..., Any]:
            if structure not in made:
                made[structure] = _compile_piece(part, inputs, job, title)
            return made[structure]

        return _compile_checked(part, once, job, title)

    return compile_pieces(split, compile_part)


def _compile_checked(
    gm: GraphModule, compile_piece: Callable[[], Callable[..., Any]], job: _Job, piece: str = ""
) -> Callable[..., Any]:
    """Compile the piece *gm* by *compile_piece*; under ``magi.check`` its first call is compared with eager."""
    if not job.request.config.check:
        return compile_piece()
    eager = _torch_compat.nodes.graph_copy(gm)
    quiet = replace(job, log=job.log.detached(), show=lambda _: None)
    has_symbols = bool(graph_symbols(gm, "example_value"))

    def compile_part(part: GraphModule) -> Callable[..., Any]:
        def compile_inner(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            count_ours()
            return _compile_piece(graph, inputs, quiet, piece)

        return torch.compile(part, backend=compile_inner, dynamic=has_symbols)

    def report(title: str, differences: tuple[Difference, ...]) -> None:
        largest = max((difference.largest for difference in differences), default=0.0)
        job.log.add_check(CheckOutcome(title, len(differences), largest, all(d.agrees for d in differences)))

    start = time.perf_counter()
    compiled = compile_piece()
    return CheckedPiece(
        compiled,
        eager,
        job.title(piece) or job.log.label,
        names=job.names,
        blame=lambda args, gradients: first_operator(eager, args, compile_part, gradients=gradients),
        report=report,
        seconds=time.perf_counter() - start,
    )


def _compile_piece(gm: GraphModule, example_inputs: Sequence[Any], job: _Job, piece: str = "") -> Callable[..., Any]:
    """Compile one piece; unless the settings are strict, without our passes and repairs if it fails with them."""
    config, title = job.request.config, job.title(piece)
    passes = chosen_passes(config, gm, job.defects, job.sensitive)
    graphs = GraphLog(job.log, title, job.defects, profiles=config.profile)
    if config.strict:
        return _compile_by_inductor(gm, example_inputs, job, graphs, passes)
    # Inductor's passes before AOTAutograd, and those of the user's, change the graph in place.
    untouched = _torch_compat.nodes.graph_copy(gm)

    def again(fell_back: FallBack) -> Callable[..., Any]:
        stock = GraphLog(job.log, title, (), profiles=config.profile, fell_back=fell_back)
        return _compile_by_inductor(untouched, example_inputs, job, stock, ())

    return graphs.able_as_stock(lambda: _compile_by_inductor(gm, example_inputs, job, graphs, passes), again, passes)


def _compile_by_inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    job: _Job,
    graphs: GraphLog,
    passes: tuple[MagiInductorPass, ...],
) -> Callable[..., Any]:
    config = job.request.config
    inductor, aot_autograd = _torch_compat.compiling.configs()
    base = dict(job.request.inductor)
    if job.log.fresh:
        base.setdefault("force_disable_caches", True)
    if graphs.fell_back:
        base["force_disable_caches"] = True  # no cache may have what was compiled under one request by another
    if config.check or job.log.eager_random:
        base.setdefault("fallback_random", True)  # random numbers as in eager mode, otherwise dropout would differ
    # A CUDA graph is replayed as a whole, so its kernels cannot be measured. To say so again would be another key for
    # the caches of torch 2.11.
    if config.profile and _torch_compat.compiling.inductor_value("triton.cudagraphs", base):
        base["triton.cudagraphs"] = False
    if job.recordings is not None:
        base.setdefault("triton.cudagraphs", True)

    # A budget of exactly 0 makes the partitioner save nothing but inputs, whatever is marked; just above it, it saves
    # the marked tensors and as little else as it can.
    budget = config.memory_budget
    partitioner = {} if budget is None else {"activation_memory_budget": max(budget, 1e-6)}

    def recording(graph: Graph) -> contextlib.AbstractContextManager[None]:
        if job.recordings is None:
            return contextlib.nullcontext()
        values = {node.name: node.meta.get("val") for node in graph.find_nodes(op="placeholder")}
        symbols = {name: str(value) for name, value in values.items() if isinstance(value, torch.SymInt)}
        wrap = partial(job.recordings.wrap, symbols=symbols, sizes=job.sizes)
        return _torch_compat.recording.wrapping_recordable(wrap)

    def compile_graph(graph: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        kind = _torch_compat.compiling.graph_kind(kwargs)
        job.show(f"{graphs.title} {kind}".strip())

        def compiled(module: GraphModule) -> Any:
            with recording(module.graph):
                return graphs.compiled(
                    module, kind, lambda: _torch_compat.compiling.compile_graph(module, inputs, **kwargs)
                )

        # What fails in any other graph is compiled again from the captured graph, which costs no copy of this one.
        if kind != "backward" or config.strict or graphs.fell_back:
            return compiled(graph)
        untouched = _torch_compat.nodes.graph_copy(graph)

        def again(fell_back: FallBack) -> Any:
            graphs.fell_back, graphs.defects = fell_back, ()
            with PassPipeline(passes).left_out(), inductor.patch(force_disable_caches=True):
                return compiled(untouched)

        return graphs.able_as_stock(lambda: compiled(graph), again, passes)

    with (
        graphs.listening(),
        recording(Graph()),  # a graph from AOTAutograd's cache has no names of symbols
        magi_tritonwrap.unsupported_launches(config.on_unsupported),
        aot_autograd.patch(partitioner),
    ):
        options = PassPipeline(passes).inductor_options(base=base)
        return _torch_compat.compiling.compile_fx(gm, example_inputs, compile_graph, options)


@dataclass(eq=False)
class GraphLog:
    """Compiles the graphs of one piece with the repairs of *defects*, and writes a record of each to *log*.

    A graph that comes from a cache has a record too.
    """

    log: CompilationLog
    title: str
    defects: tuple[Defect, ...]
    profiles: bool
    fell_back: FallBack | None = None
    _before: str = ""
    _changes: list[GraphChange] = field(default_factory=list)
    _pass_records: list[PassRecord] = field(default_factory=list)
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
            collect_records(observe) as self._pass_records,
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
