# SPDX-License-Identifier: Apache-2.0
"""Which sizes of a captured graph have a CUDA graph (``magi.graphs``).

torch records a graph for every size that comes, and keeps it. Here a `SizeTable` decides: its code for any size is the
compiled function called without a graph, and code of its own is a recording of it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from magi_backend._records.log import CompilationLog
from magi_backend._torch_compat import recording, state
from magi_backend._torch_compat.recording import Model, Recordable, Recording
from magi_backend.records import RecordingOutcome

from .captured import GraphInputs, Key, reason_of
from .ranks import Exchange
from .table import Size, SizeTable


AFTER = 3
"""The call with the same sizes from which on a graph may be recorded: that warms up, and the next call records."""

BEFORE_REPLAY = 2
"""How many runs of a recording warm up and record. Those that are timed come after them: the first replay is slow."""


@dataclass(eq=False)
class Part:
    """A compiled function that may be recorded: the code for any size, or for one, or a piece of either.

    Attributes:
        it: The function.
        plain: It, to be called without a graph.
        symbols: The symbols of the inputs that have one, by name.
        sizes: The sizes that it was compiled for, as text, or empty.
        ints: The positions of the inputs that are ints, once there was a call.
    """

    it: Recordable
    plain: Model
    symbols: Mapping[str, str]
    sizes: str
    ints: tuple[int, ...] | None = None


class RecordingTable(SizeTable):
    """The sizes of the calls of some parts, and which of them have a CUDA graph. A key is a part, and the ints."""

    noun: ClassVar[str] = "CUDA graph"
    instead: ClassVar[str] = "without a CUDA graph"
    setting: ClassVar[str] = "magi.graphs"

    def __init__(self, most: int, label: str, changed: Callable[[], None], exchange: Exchange | None = None) -> None:
        self._heirs: dict[Any, Key] = {}
        """Sizes that got code of their own when they had a graph, and that graph, in whose place theirs is recorded."""
        self._leaving: list[Recording] = []
        """Recordings that were dropped while their outputs were in use."""
        self._keeps_pool: Recording | None = None
        """The last one that was dropped. Without any recording torch would give its pool back, with live outputs."""
        self._gone: list[Part] = []
        """Parts that nobody can call any more."""
        super().__init__(
            GraphInputs((), (), (), differentiates=False),
            lambda part, inputs: part.plain(inputs),
            lambda key, _: cast("Any", key)[0].it.record(),
            hot_sizes=most,
            hot_after=AFTER,
            explicit=[],
            label=label,
            changed=changed,
        )
        if exchange is not None:
            self._blocked = (
                exchange.why or "what it exchanges with other ranks must be recorded by all in the same call"
            )

    def added(self, part: Part) -> Model:
        """*part* as it is called: with the graph of its sizes, or without one."""
        wanted = {*part.sizes.split(", ")} - {""}
        with self._lock:
            for key in self._hot() if wanted else ():
                if {*self.title(key).split(", ")} == wanted:
                    self._heirs[part,] = key
        find = self.codes.get

        def call(inputs: list[Any]) -> Any:
            if part.ints is None:
                part.ints = tuple(place for place, value in enumerate(inputs) if isinstance(value, int))
            key: Any = (part, *[inputs[place] for place in part.ints])
            code = find(key)
            if code is None or not recording.is_usable():
                return self._other(part, key, inputs)
            code.hits += 1
            return code.run(inputs)  # type: ignore[misc]

        weakref.finalize(call, self._gone.append, part)
        return call

    def _other(self, part: Part, key: Key, inputs: list[Any]) -> Any:
        """A call without a graph, or in which one is warmed up, recorded or timed."""
        if not recording.is_usable():
            self._waiting = "it was called on a thread that torch's CUDA graphs do not know"
            return part.plain(inputs)
        self._forget_gone()
        return self._run(self._made_now(key), key, (part, inputs))

    def _inputs_of(self, args: tuple[Any, ...]) -> list[Any]:
        _, inputs = args
        return inputs  # type: ignore[no-any-return]

    def _run(self, code: Size | None, key: Key, args: tuple[Any, ...]) -> Any:
        """Run a call. If it fails to be captured, it has not run on the device, and runs without a graph.

        So does the size from then on, whether it was the capture or the warm-up that failed.
        """
        made: Any = code.run if code is not None and self._others.get(key) is code else None
        if made is None or made.was_captured():
            return super()._run(code, key, args)
        part, inputs = args
        lock = state.compile_lock()
        # What another thread compiles may wait for the device, which a capture does not survive.
        if self._must_wait() or not lock.acquire(blocking=False):
            return part.plain(inputs)
        given = list(inputs)  # what is compiled empties its list
        try:
            return super()._run(code, key, args)
        except Exception as error:
            with self._lock:
                self._drop(key, self._others.pop(key), failed=reason_of(error))
            if not made.was_captured():
                raise  # it ran, and it may be an error of the model
            self._count_failure(key, reason_of(error), error)
        finally:
            lock.release()
        return part.plain(given)

    def _forget_gone(self) -> None:
        """Drop what nobody can call any more. Not when that happens, which may be in the middle of another call."""
        while self._gone:
            part: Any = self._gone.pop()
            with self._lock:
                self._heirs.pop((part,), None)
                for key in [key for key in self._hot() if key[0] is part]:
                    self._let_go(key)
                for key in [key for key in self._others if key[0] is part]:
                    del self._others[key]
        self._leaving = [each for each in self._leaving if not each.drop()]

    def _is_due(self, key: Key, size: Size) -> bool:
        return (key in self._heirs and not size.failed) or super()._is_due(key, size)

    def _make_room(self, key: Key, size: Size) -> None:
        """Drop the graph that the size had before it got code of its own, or the one that has earned least."""
        size.own, size.runs = math.inf, -BEFORE_REPLAY  # what an earlier graph took is not what this one takes
        old = self._heirs.pop(key, None)
        if old in self._hot():
            self._let_go(old)
        else:
            super()._make_room(key, size)

    def _drop(self, key: Key, code: Size, failed: str = "") -> None:
        made: Any = code.run
        super()._drop(key, code, failed)
        self._keeps_pool = made
        if not made.drop():
            self._leaving.append(made)

    def named(self, key: Any) -> tuple[tuple[str, int], ...]:
        """The ints in *key* with their names."""
        part, *numbers = key
        if part.sizes:
            pairs = (pair.split("=") for pair in part.sizes.split(", "))
            return tuple((name, int(number)) for name, number in pairs)
        # The sizes that a piece takes besides its inputs have no names.
        names = dict(enumerate(part.it.inputs))
        called = (names.get(place, f"size{place}") for place in part.ints or ())
        return tuple((part.symbols.get(name, name), number) for name, number in zip(called, numbers, strict=True))


@dataclass(eq=False)
class Recordings:
    """The CUDA graphs of one captured graph, at most *most* forward and as many backward."""

    most: int
    log: CompilationLog
    exchange: Exchange | None
    tables: dict[str, RecordingTable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        recording.know_thread()

    def wrap(self, it: Recordable, *, symbols: Mapping[str, str], sizes: str) -> Model:
        """*it* with graphs for some sizes; *symbols* are those of its inputs, and *sizes* those it is compiled for."""
        kind = "backward" if it.is_backward else "forward"
        if kind not in self.tables:
            self.tables[kind] = RecordingTable(
                self.most, f"{self.log.label} {kind}", self.log.write_counts, self.exchange
            )
            self.log.counts["recordings"] = self.outcome
        return self.tables[kind].added(Part(it, recording.without_graph(it), symbols, sizes))

    def outcome(self) -> tuple[RecordingOutcome, ...]:
        """What is known of both now."""
        return tuple(RecordingOutcome(kind, table.made, table.outcome()) for kind, table in [*self.tables.items()])
