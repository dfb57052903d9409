# SPDX-License-Identifier: Apache-2.0
"""The compilation in progress: what a pass is told of it, what passes did, and who gets the records."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch.fx import Graph, GraphModule

from magi_passes import _torch_compat
from magi_passes.errors import UnknownConfigKeyError

from .declared import check_types, nearest


# The history is limited, so that a server that recompiles for months does not grow.
HISTORY = 10_000

logger = logging.getLogger("magi_passes")
_history: deque[PassRecord] = deque(maxlen=HISTORY)


@dataclass(frozen=True)
class Reason:
    """The answer of `MagiInductorPass.is_applicable`.

    Truthy exactly when the pass applies, so ``if reason:`` reads as it should.

    Example:
        >>> reason = Reason(False, "no placeholder carries a free symbol")
        >>> bool(reason)
        False
        >>> print(reason)
        no placeholder carries a free symbol

    Attributes:
        applies: Whether the pass is to run.
        text: One short sentence for the record, without a full stop.
    """

    applies: bool
    text: str

    def __post_init__(self) -> None:
        check_types(self)  # the record would not show the truth of an *applies* that is not a bool

    def __bool__(self) -> bool:
        return self.applies

    def __str__(self) -> str:
        return self.text


class _Values(dict[str, Any]):
    """Inductor's configuration, in which the nearest key is part of the error for one that does not exist."""

    def __missing__(self, key: str) -> Any:
        release = _torch_compat.config.torch_version()
        msg = f"Inductor's configuration has no key {key!r} in torch {release}.{nearest(str(key), self)}"
        raise UnknownConfigKeyError(msg)


def _values(overrides: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """The configuration as `read_overrides` returned it; as it is now for None."""
    state = _torch_compat.config.read_overrides() if overrides is None else overrides
    return MappingProxyType(_Values(_torch_compat.config.config_values(state)))


@dataclass(frozen=True)
class PassContext:
    """One compilation of one graph, as seen by `MagiInductorPass.is_applicable`.

    Every field has a default, so that a pass can be asked about a graph outside of any compilation:

    >>> PassContext().graph
    'graph'
    >>> PassContext(torch_version="2.10.0").torch_release
    (2, 10)

    Attributes:
        graph: Name of the graph in records and logs, such as ``3_forward`` or ``3_inference``.
        compile_id: Dynamo's id of the compilation, such as ``0/1``; None when Dynamo did not start it.
        is_backward: Whether this is the backward graph of a training step.
        is_inference: Whether no gradient will be asked for.
        is_subgraph: Whether the graph is the body of a higher-order operator inside the graph that is compiled.
        hook: The Inductor option that runs the pass, such as ``post_grad_custom_post_pass``; empty when a caller
            other than a pipeline runs it.
        example_inputs: The inputs the graph is compiled for: real tensors, fake tensors, ints or SymInts.
        user_keys: The Inductor keys that the user set and that no pass may change.
        config: Every Inductor key with its value when the compilation started. Read-only.
        torch_version: The running torch release.
    """

    graph: str = "graph"
    compile_id: str | None = None
    is_backward: bool = False
    is_inference: bool = True
    is_subgraph: bool = False
    hook: str = "post_grad_custom_post_pass"
    example_inputs: Sequence[Any] = ()
    user_keys: frozenset[str] = frozenset()
    config: Mapping[str, Any] = field(default_factory=_values)
    torch_version: str = field(default_factory=_torch_compat.config.torch_version)

    @property
    def torch_release(self) -> tuple[int, int]:
        """Major and minor number of `torch_version`, for comparisons."""
        return _torch_compat.config.numbers_of(self.torch_version)[:2]


@dataclass(frozen=True)
class PassRecord:
    """One pass, asked about one graph.

    Attributes:
        pass_name: Class name of the pass.
        graph: Name of the graph, such as ``0_forward``; ``<n>`` counts Inductor's graphs in this process.
        ran: Whether the pass was called and returned.
        reason: Why it ran or did not, in words.
        config_changes: Inductor key -> (value before, value after), without changes that a setting of the user
            overruled.
        seconds: Wall time of the predicate and of the pass.
        compile_id: Dynamo's id of the compilation, such as ``0/0``; None when Dynamo did not start it.
        hook: The Inductor option that the pass was reached through; empty when a caller
            other than a pipeline ran it.
    """

    pass_name: str
    graph: str
    ran: bool
    reason: str
    config_changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    seconds: float = 0.0
    compile_id: str | None = None
    hook: str = ""

    def __str__(self) -> str:
        """One line, as the logger `magi_passes` prints it."""
        changes = "".join(f"; {key}: {old!r} -> {new!r}" for key, (old, new) in self.config_changes.items())
        verb = "ran" if self.ran else "failed" if self.reason.startswith("raised ") else "did not run"
        return f"{self.pass_name} {verb} on {self.graph}: {self.reason}{changes}"


@dataclass(frozen=True)
class Collector:
    """One block of `collect_records`: its list of records, and its observer."""

    records: list[PassRecord]
    observe: Callable[[str, Graph], None] | None = None


@dataclass(frozen=True)
class Call:
    """One call of `compile_fx`, for the graphs that it compiles and for backward graphs that are compiled later."""

    hooks: tuple[object, ...] = ()
    """The pipelines' hooks that this call put into its options."""
    collectors: tuple[Collector, ...] = ()
    """The collectors that get the records: those that were active when the call began."""
    graphs: list[str] = field(default_factory=list)
    """Names of the graphs that Inductor compiled; none if AOTAutograd's cache had all of them."""


@dataclass(frozen=True)
class GraphCompilation:
    """The compilation of one graph by Inductor."""

    gm: GraphModule
    known: PassContext
    """What each pass is told, but for its hook, the user's keys and the configuration."""
    asked: list[str] = field(default_factory=list)
    """Names of the hooks that Inductor called so far; none when it found the graph in a cache."""
    changed: set[str] = field(default_factory=set)
    """The keys that passes have changed so far."""
    memos: dict[str, dict[Any, Any]] = field(default_factory=dict)
    """What changes of code generation remember, by their names in `_torch_compat`; none that is not wanted."""

    @functools.cached_property
    def start(self) -> Mapping[str, Any]:
        """The overrides of the configuration just before the first pass of this package was asked.

        It is read when it is first needed, so a compilation without such a pass costs nothing.
        """
        self.memos["tilings"] = {}
        _torch_compat.kernels.install_tilings(functools.partial(memo_of_current, "tilings"))
        _torch_compat.grids.install_grids(functools.partial(memo_of_current, "tilings"))
        _torch_compat.memory.install_orders(functools.partial(memo_of_current, "tilings"))
        return _torch_compat.config.read_overrides()

    @functools.cached_property
    def config(self) -> Mapping[str, Any]:
        """Every key with its value in that configuration."""
        return _values(self.start)

    @property
    def has_passes(self) -> bool:
        """Whether a pass of this package takes part in this compilation."""
        return "start" in vars(self)


@dataclass(frozen=True)
class State:
    """What is in progress in one thread or context.

    Attributes:
        collectors: The blocks of `collect_records` around this point.
        call: The call of `compile_fx` that the compilation belongs to; None if it is not known.
        compilation: The compilation of one graph.
        scope: The overrides of the configuration that an open scope will restore.
        scoped: Whether that is a scope of a pipeline with passes.
        context: The context of the pass that is being run.
    """

    collectors: tuple[Collector, ...] = ()
    call: Call | None = None
    compilation: GraphCompilation | None = None
    scope: Mapping[str, Any] | None = None
    scoped: bool = False
    context: PassContext | None = None

    @property
    def start(self) -> Mapping[str, Any] | None:
        """The overrides of the configuration that will be restored; None if a change of it would never be undone."""
        return self.scope if self.compilation is None else self.compilation.start

    @property
    def receivers(self) -> tuple[Collector, ...]:
        """The collectors that get the records of the passes that run now."""
        return self.collectors if self.call is None else self.call.collectors


_state: ContextVar[State] = ContextVar("magi_passes_state", default=State())  # noqa: B039 - it is frozen


def current() -> State:
    """What is in progress here."""
    return _state.get()


@contextlib.contextmanager
def within(**changes: Any) -> Iterator[None]:
    """A context in which fields of the `State` have other values; its end gives back those fields only."""
    before = {name: getattr(current(), name) for name in changes}
    _state.set(replace(current(), **changes))
    try:
        yield
    finally:
        _state.set(replace(current(), **before))


def memo_of_current(name: str) -> dict[Any, Any] | None:
    """The memo *name* of the compilation in progress; None if it has none."""
    compilation = current().compilation
    return None if compilation is None else compilation.memos.get(name)


def current_context() -> PassContext | None:
    """The context of the pass that is being run, for passes that need it inside `__call__`; None outside of one."""
    return current().context


def context_of(
    graph: Graph, hook: str, declared: Iterable[str], user_keys: frozenset[str] = frozenset()
) -> PassContext:
    """The context of *graph* now, for passes at *hook* that may change the *declared* keys.

    To *user_keys*, those that the user set in the options, those that differ from Inductor's default are added.
    """
    compile_id = _torch_compat.compiling.current_compile_id()
    start, compilation = current().start, current().compilation
    if start is None:
        return PassContext(hook=hook, user_keys=user_keys, compile_id=compile_id)
    config = _values(start) if compilation is None else compilation.config
    user_keys |= {key for key in declared if config[key] != _torch_compat.config.default_of(key)}
    if compilation is None:
        return PassContext(hook=hook, user_keys=user_keys, compile_id=compile_id, config=config)
    is_subgraph = graph is not compilation.gm.graph
    return replace(compilation.known, hook=hook, user_keys=user_keys, config=config, is_subgraph=is_subgraph)


def pass_records() -> list[PassRecord]:
    """Every record of this process, oldest first; the last 10,000 are kept."""
    return list(_history)


@contextlib.contextmanager
def collect_records(observe: Callable[[str, Graph], None] | None = None) -> Iterator[list[PassRecord]]:
    """Collect the records of the compilations that start inside the ``with`` block.

    The list also gets the records of backward graphs that belong to those compilations, which are compiled later and
    perhaps on another thread.

    Args:
        observe: Called with an empty name and the graph before a pass works on it, and with the name of the pass and
            the graph afterwards. A pass that does not apply is not observed. Hooks that the user put next to the
            passes are; their name is that of their class or function.

    Example:
        >>> with collect_records() as records:
        ...     pass  # compiled = torch.compile(model, options=pipeline.inductor_options()); compiled(x)
        >>> records
        []
    """
    collector = Collector([], observe)
    with within(collectors=(*current().collectors, collector)):
        yield collector.records


def publish(record: PassRecord) -> None:
    """Keep *record*, pass it to the collectors, and log it."""
    _history.append(record)
    for collector in current().receivers:
        collector.records.append(record)
    logger.info("%s", record)


@contextlib.contextmanager
def observed(name: str, graph: Graph) -> Iterator[None]:
    """A context in which the pass *name* runs; the observers of collectors are called at its start and end."""
    observers = [collector.observe for collector in current().receivers if collector.observe is not None]
    for observe in observers:
        observe("", graph)
    yield
    for observe in observers:
        observe(name, graph)


def trace(records: list[PassRecord]) -> None:
    """Put the records of one graph into torch.compile's structured trace (TORCH_TRACE, tlparse)."""

    def text() -> str:
        listed = [
            {
                "pass": record.pass_name,
                "graph": record.graph,
                "ran": record.ran,
                "reason": record.reason,
                "config_changes": {key: [repr(old), repr(new)] for key, (old, new) in record.config_changes.items()},
                "seconds": round(record.seconds, 6),
            }
            for record in records
        ]
        return json.dumps(listed, indent=1)

    _torch_compat.compiling.trace_artifact("magi_passes", text)
