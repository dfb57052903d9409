# SPDX-License-Identifier: Apache-2.0
"""What each pass did in each compilation, and who gets the records."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import deque
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from magi_passes import _torch_compat


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.fx import Graph


# The history is limited, so that a server that recompiles for months does not grow.
HISTORY = 10_000

logger = logging.getLogger("magi_passes")
_history: deque[PassRecord] = deque(maxlen=HISTORY)
_collectors: ContextVar[tuple[Collector, ...]] = ContextVar("magi_passes_collectors", default=())


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
        return f"{self.pass_name} {'ran' if self.ran else 'did not run'} on {self.graph}: {self.reason}{changes}"


@dataclass(frozen=True)
class Collector:
    """One block of `collect_records`: its list of records, and its observer."""

    records: list[PassRecord]
    observe: Callable[[str, Graph], None] | None = None


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
    token = _collectors.set((*_collectors.get(), collector))
    try:
        yield collector.records
    finally:
        _collectors.reset(token)


def active_collectors() -> tuple[Collector, ...]:
    """The `collect_records` blocks around this point."""
    return _collectors.get()


def publish(record: PassRecord, collectors: tuple[Collector, ...]) -> None:
    """Keep *record*, pass it to *collectors*, and log it."""
    _history.append(record)
    for collector in collectors:
        collector.records.append(record)
    logger.log(logging.INFO if record.ran else logging.DEBUG, "%s", record)


@contextlib.contextmanager
def observed(name: str, graph: Graph, collectors: tuple[Collector, ...]) -> Iterator[None]:
    """A context in which the pass *name* runs; the observers of *collectors* are called at its start and end."""
    observers = [collector.observe for collector in collectors if collector.observe is not None]
    for observe in observers:
        observe("", graph)
    yield
    for observe in observers:
        observe(name, graph)


def trace(records: list[PassRecord]) -> None:
    """Put the records of one graph into torch.compile's structured trace (TORCH_TRACE, tlparse)."""
    _torch_compat.compiling.trace_artifact(
        "magi_passes", lambda: json.dumps([_as_json(record) for record in records], indent=1)
    )


def _as_json(record: PassRecord) -> dict[str, object]:
    return {
        "pass": record.pass_name,
        "graph": record.graph,
        "ran": record.ran,
        "reason": record.reason,
        "config_changes": {key: [repr(old), repr(new)] for key, (old, new) in record.config_changes.items()},
        "seconds": round(record.seconds, 6),
    }
