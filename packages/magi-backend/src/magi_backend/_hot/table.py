# SPDX-License-Identifier: Apache-2.0
"""Which sizes have code of their own, or a CUDA graph, and what happens in a call that finds none.

Sizes are counted to find those that come back; nothing here grows without bound. The first `hot_sizes` of them get code
as soon as they are due. After that, code is made only out of a budget: a share of the time of the calls that ran the
code for any size, and what code for single sizes has gained, less the time of all compilations. So whatever order the
sizes come in, and however many are forgotten, the calls and compilations together take at most ``1 + SHARE`` times what
the code for any size alone would take, or no more than `hot_sizes` codes were made.

``torch.utils.checkpoint`` runs a function again in the backward and expects that it saves the same tensors. In between,
code for a size may have been made or dropped, so each region remembers which code its calls ran, in order.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, ClassVar

from magi_backend._torch_compat import state, symbols, values
from magi_backend._torch_compat.tuning import InTurn
from magi_backend.records import SizesOutcome, SizeUse

from .background import jobs
from .captured import GraphInputs, Key, Run, make_dispatch, reason_of, why_not_now
from .ranks import Exchange, Round


logger = logging.getLogger("magi_backend")

MOST_SIZES = 64
"""How many sizes without code of their own are remembered; the least recently used one is forgotten first."""

SHARE = 0.1
"""How much of the time of the code for any size may be lost, to compilations or to code that is slower."""

RUNS, MOST_RUNS = 3, 8
"""How many runs of new code are timed; more of them if it seems slower than the code for any size."""

CALLS_APART = 16
"""Of the calls after the first ones, at most one in so many waits for the accelerator, to time it."""

MOST_FAILURES = 3
"""After so many sizes for which no code could be made, no more code is tried for the graph."""

COMES_BACK = 3
"""With at least so many calls with the same sizes, the report gives advice."""


class Choices:
    """The code that the calls of one graph ran inside checkpointed regions; it is forgotten with the region."""

    def __init__(self) -> None:
        self._taken: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._replayed: weakref.WeakKeyDictionary[Any, Iterator[Any]] = weakref.WeakKeyDictionary()

    def take(self, hooks: Any, choose: Callable[[], Any]) -> Any:
        """The code to run under the saved-tensor *hooks*: *choose* decides in a forward, a recomputation repeats it.

        None, the code for any size, is used for hooks of ``torch.utils.checkpoint`` that do not show their region, so
        that forward and recomputation run the same code.
        """
        region = state.checkpoint_region(hooks)
        if region is None:
            return choose()
        frame, recomputes = region
        if frame is None:
            return None
        if recomputes:
            return next(self._replayed.setdefault(hooks[0], iter(self._taken.get(frame, ()))), None)
        taken = choose()
        self._taken.setdefault(frame, []).append(taken)
        return taken


@dataclass(slots=True)
class Size:
    """What is known of one size of a graph, and its code if it has any.

    Attributes:
        calls: Calls that ran the code for any size.
        hits: Calls that ran code of its own.
        made: How often code was made.
        failed: Why it gets no code, or empty.
        run: Code of its own, a function of a list of the inputs that are not sizes.
        seconds: How long that took to compile.
        explicit: Whether it is a size of ``magi.compile_sizes``, whose code is never dropped.
        general: The least seconds of a call with the code for any size; infinite if none was timed.
        own: The same with code of its own.
        runs: How many runs of code of its own were timed.
        banked: How many of its hits are part of what the table has gained.
        paid: Seconds that code of its own would have saved, since its calls are compared with the hits of others.
        since: The hits that the sizes with code had at that time.
    """

    calls: int = 0
    hits: int = 0
    made: int = 0
    failed: str = ""
    run: Run | None = None
    seconds: float = 0.0
    explicit: bool = False
    general: float = math.inf
    own: float = math.inf
    runs: int = 0
    banked: int = 0
    paid: float = 0.0
    since: dict[Key, int] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """The seconds that a hit saves; before `RUNS` runs only a loss is believed, and all of it without *general*."""
        if self.own == math.inf:
            return 0.0
        gain = -self.own if self.general == math.inf else self.general - self.own
        return min(gain, 0.0) if self.runs < RUNS else gain

    @property
    def gained(self) -> float:
        """The seconds that its hits add to the budget; a loss of at most `SHARE` of a call is part of the bound."""
        is_known = self.runs >= RUNS and self.general < math.inf
        is_bound = is_known and self.gain >= -SHARE * self.general
        return (self.hits - self.banked) * (max(self.gain, 0.0) if is_bound else self.gain)


@dataclass(eq=False)
class SizeTable:
    """The code of a captured graph for single sizes, in addition to its code for any size.

    The same rules decide which sizes have a recorded CUDA graph (`RecordingTable`).

    Attributes:
        inputs: The inputs of the graph.
        general: The code for any size.
        make: Makes the code of one size, a function of a list of the inputs that are not sizes, given whether other
            threads go on; None if that is not possible now.
        hot_sizes: How many sizes that came back may have code at a time; 0 for none.
        hot_after: The call with the same sizes, counted from 1, at which code may be made for them.
        explicit: The sizes that still wait for code, which they get at the first call.
        label: Name of the graph, for messages.
        changed: Called when a size has got code.
        in_background: Whether the code of `hot_sizes` is made on another thread, and calls do not wait for it.
        exchange: What the graph exchanges with other ranks, which then run the same code in the same calls; None if
            nothing, and each rank decides alone.
        hot_before: The sizes that were hot in an earlier process, which are due at their first call.
        codes: The sizes with code of their own that calls find.
    """

    inputs: GraphInputs
    general: Callable[..., Any]
    make: Callable[[Key, bool], Run | None]
    hot_sizes: int
    hot_after: int
    explicit: list[Key]
    label: str
    changed: Callable[[], None]
    in_background: bool = False
    hot_before: frozenset[Key] = frozenset()
    exchange: Exchange | None = None
    codes: dict[Key, Size] = field(default_factory=dict)
    noun: ClassVar[str] = "code"
    """What sizes get, for messages."""
    instead: ClassVar[str] = "the code for any size"
    setting: ClassVar[str] = "magi.hot_sizes"

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._others: dict[Key, Size] = {}
        """The others that are remembered, by last use. Those with code are timed before calls find it."""
        self._calls = self._forgotten = self._failures = self._next_timed = 0
        self.made = 0
        """How often code was made because sizes came back."""
        self._general_seconds = self._compile_seconds = self._gained = 0.0
        self._gains = self._timed_seconds = 0.0
        """What calls of the sizes whose code was timed save, and what they take with the code for any size."""
        self._blocked, self._waiting = self.exchange.why if self.exchange else "", ""
        self._rounds: dict[Key, Round] = {}
        """How the ranks decide about the sizes that were due, if they have to."""
        self._choices = Choices()
        self._general = symbols.boxed(self.general)

    def dispatch(self) -> Callable[..., Any]:
        """The function that runs each call."""
        return make_dispatch(
            self.inputs,
            self.label,
            find=self.codes.get,
            other=lambda key, args: self._run(self._made_now(key), key, args),
            general=self.general,
            under_hooks=lambda hooks, key, args: self._run(
                self._choices.take(hooks, lambda: self.codes.get(key) or self._made_now(key)), key, args
            ),
        )

    def _run(self, code: Size | None, key: Key, args: tuple[Any, ...]) -> Any:
        """What the *code* of one size returns, or that for any size if it is None."""
        if code is None or code.run is None:
            return self.general(*args) if not self.hot_sizes else self._run_general(key, args)
        code.hits += 1
        inputs = self._inputs_of(args)
        if self._others.get(key) is not code:
            return code.run(inputs)
        in_turn = InTurn.launches
        result, seconds, is_exact = _timed(code.run, inputs, exact=True)
        if not is_exact:
            return result
        with self._lock:
            # Part of making it: kernels that are tuned, or a CUDA graph that is recorded, in the first runs.
            if InTurn.launches != in_turn:
                self._compile_seconds += max(seconds - code.general, 0.0)
            else:
                code.own, code.runs = min(code.own, seconds), code.runs + 1
                self._compile_seconds += seconds - min(code.own, code.general)
                self._judge(key, code)
        return result

    def _inputs_of(self, args: tuple[Any, ...]) -> list[Any]:
        """What code of one size gets of *args*."""
        inputs = list(args)
        for size in reversed(self.inputs.sizes):
            del inputs[size.place]
        return inputs

    def _run_general(self, key: Key, args: tuple[Any, ...]) -> Any:
        """Run the code for any size, and note what that costs."""
        size = self._others.get(key)
        exact = size is not None and self._is_due_a_timing(size)
        result, seconds, is_exact = _timed(self._general, list(args), exact=exact)
        with self._lock:
            if size is not None:
                if is_exact:
                    size.general = min(size.general, seconds)
                    self._judge(key, size)
                if size.general < math.inf:
                    seconds = max(seconds, size.general)  # what is not waited for may take longer than it seems
                # Which part of a call code of its own saves, judged by other sizes.
                likely = max(self._gains / self._timed_seconds, SHARE / 10) if self._timed_seconds else SHARE
                size.paid += max(size.gain, 0.0) if size.runs >= RUNS else seconds * likely
            self._general_seconds += seconds
        return result

    def _is_due_a_timing(self, size: Size) -> bool:
        if size.run is not None:
            return True  # its own code was timed, and waits for this
        is_wanted = size.calls < self.hot_after or size.calls & (size.calls - 1) == 0
        if not is_wanted or (self._calls > 2 * CALLS_APART and self._calls < self._next_timed):
            return False
        self._next_timed = self._calls + CALLS_APART
        return True

    def _judge(self, key: Key, code: Size) -> None:
        """Let calls find *code*, which was timed, or drop it if it is slower than the code for any size."""
        if self._others.get(key) is not code or code.run is None or code.runs < RUNS or code.general == math.inf:
            return
        is_slower = code.own > (1 + SHARE) * code.general
        if is_slower and code.runs < MOST_RUNS:
            return
        del self._others[key]
        self._gains += code.gain
        self._timed_seconds += code.general
        if is_slower:
            self._drop(key, code, failed=_SLOWER)
        else:
            self.codes[key] = code

    def _made_now(self, key: Key) -> Size | None:
        """Count the call, and make code if it is due. Returns the code for *key*; None if there is none."""
        with self._lock:
            code = self._code_of(key)
            if code is not None:
                if code.runs < RUNS or code.general < math.inf:
                    return code
                self._calls += 1  # this call shows what the code for any size costs
                code.calls += 1
                return None
            due = self._count(key)
        if (round_ := self._rounds.get(key)) and round_.takes_over():
            return self._found_after_all(key)
        if not (due or self.explicit):
            return None
        if self.in_background and not self.explicit:
            if not self._must_wait():
                if self.exchange and not round_:
                    refuse = partial(self._fail, key)
                    self._rounds[key] = Round(self.exchange, f"{self.exchange.path}/{self.title(key)}", refuse)
                make = weakref.WeakMethod(self._make_beside_calls)
                jobs.add((id(self), key), lambda: (now := make()) and now(key))
            return None
        lock = state.compile_lock()
        # Ranks that compile the same sizes wait for each other; a thread does not wait for the graph of another thread.
        if not lock.acquire(blocking=bool(self.explicit)):
            return None
        try:
            if self.explicit and not self._must_wait():
                while self.explicit:
                    self._make(self.explicit.pop(0), explicit=True)
            if due and self._code_of(key) is None and not self.in_background and not self._must_wait():
                self._make(key, explicit=False)
        finally:
            lock.release()
        return self._found_after_all(key)

    def _found_after_all(self, key: Key) -> Size | None:
        """The code for *key* if there is some now, for a call that was counted as one without."""
        code = self._code_of(key)
        if code is not None:
            with self._lock:
                self._calls -= 1
                code.calls -= 1
        return code

    def _make_beside_calls(self, key: Key) -> None:
        """Make code for *key* on a thread of its own, if it is still due when that is free for it."""
        with self._lock:
            size = self._others.get(key)
            due = size is not None and self._is_due(key, size)
        if due:
            self._make(key, explicit=False)

    def _code_of(self, key: Key) -> Size | None:
        size = self.codes.get(key) or self._others.get(key)
        return None if size is None or size.run is None else size

    def _must_wait(self) -> bool:
        self._waiting = why_not_now()
        return bool(self._waiting)

    def _hot(self) -> dict[Key, Size]:
        """The sizes that have code because they came back."""
        known = self.codes | self._others
        return {key: size for key, size in known.items() if size.run is not None and not size.explicit}

    def _count(self, key: Key) -> bool:
        """Count a call without code for *key*. Returns whether code must be made in this call."""
        self._calls += 1
        size = self._others.pop(key, None) or Size()
        self._remember(key, size)
        size.calls += 1
        if self.hot_sizes and size.calls == self.hot_after:
            self._starts_to_pay(size)
        return self._is_due(key, size)

    def _is_due(self, key: Key, size: Size) -> bool:
        """Whether *size*, that of *key* without code, gets some now."""
        calls = 1 if key in self.hot_before else self.hot_after
        if not self.hot_sizes or size.calls < calls or self._blocked or size.failed:
            return False
        if self.exchange is not None:  # what other ranks find too: no time that was measured
            round_ = self._rounds.get(key)
            return round_.take is None if round_ else len(self._rounds) < self.hot_sizes
        return self.made < self.hot_sizes or self._has_paid(size)

    def _remember(self, key: Key, size: Size) -> None:
        """Put *size*, which has no code, behind the others."""
        if len(self._others) >= MOST_SIZES:
            without_code = [each for each, other in self._others.items() if other.run is None]
            if len(without_code) >= MOST_SIZES:
                del self._others[without_code[0]]
                self._forgotten += 1
        self._others[key] = size

    def _starts_to_pay(self, size: Size) -> None:
        size.paid, size.since = 0.0, {key: code.hits for key, code in self._hot().items()}

    def _has_paid(self, size: Size) -> bool:
        """Whether code for *size* would have saved the time to compile it by now, and more than another's code has."""
        seconds = self._compile_seconds / (self.made + self._failures)
        if size.paid < seconds or self._budget() < seconds:
            return False
        hot = self._hot()
        if len(hot) < self.hot_sizes or min(_earned(size, *item) for item in hot.items()) < size.paid:
            return True
        self._starts_to_pay(size)
        return False

    def _budget(self) -> float:
        """The seconds that compilations may take now."""
        gained = self._gained + sum(size.gained for size in self._hot().values())
        return SHARE * self._general_seconds + gained - self._compile_seconds

    def _make(self, key: Key, *, explicit: bool) -> None:
        start = perf_counter()
        run, failure = None, None
        try:
            run = self.make(key, self.in_background and not explicit)
        except Exception as error:  # noqa: BLE001 - whatever it is, there is code for any size
            failure = error
        else:
            if run is None:
                return  # a later call of this size tries again
        seconds = perf_counter() - start
        if not explicit:
            with self._lock:
                self._compile_seconds += seconds
        if failure is None:
            logger.info("%s: %s for the sizes %s made in %.2f s", self.label, self.noun, self.title(key), seconds)
        if self.exchange is not None and not explicit:
            take = partial(self._take, key, run, seconds, explicit=False)
            self._rounds[key].offer(take, "" if failure is None else reason_of(failure))
        elif failure is None:
            self._take(key, run, seconds, explicit=explicit)
        else:
            self._fail(key, reason_of(failure), failure)

    def _take(self, key: Key, run: Run | None, seconds: float, *, explicit: bool) -> None:
        """Let calls find *run*, the code for *key*, which was made in *seconds*."""
        with self._lock:
            size = self._others.pop(key, None) or Size()
            if not explicit:
                start = perf_counter()
                self._make_room(key, size)
                self._compile_seconds += perf_counter() - start
                self.made += 1
            size.made += 1
            size.run, size.seconds, size.explicit = run, seconds, explicit
            # What all ranks run in the same call is not dropped by one of them, so it needs no timing.
            (self.codes if explicit or self.exchange else self._others)[key] = size
            self._judge(key, size)  # its code may have been timed before
        self.changed()

    def _fail(self, key: Key, failed: str, failure: Exception | None = None) -> None:
        """Leave *key* without code, because it *failed*."""
        with self._lock:
            size = self._others.pop(key, None) or Size()
            size.failed = failed
            self._remember(key, size)
        self._count_failure(key, failed, failure)
        self.changed()

    def _count_failure(self, key: Key, failed: str, failure: Exception | None) -> None:
        with self._lock:
            self._failures += 1
            if self._failures >= MOST_FAILURES:
                self._blocked = f"no {self.noun} could be made for {MOST_FAILURES} sizes"
        (logger.warning if self._failures == 1 else logger.info)(
            "%s: no %s could be made for the sizes %s, which run %s: %s",
            self.label,
            self.noun,
            self.title(key),
            self.instead,
            failed,
            exc_info=failure if logger.isEnabledFor(logging.DEBUG) else None,
        )

    def _make_room(self, key: Key, size: Size) -> None:  # noqa: ARG002 - a table of CUDA graphs asks for it
        """Drop the code that has earned least since *size* began to pay, if all room is taken. *key* is that of *size*.

        A call on another thread may still run the code.
        """
        hot = self._hot()
        if len(hot) >= self.hot_sizes:
            self._let_go(min(hot, key=lambda each: _earned(size, each, hot[each])))

    def _let_go(self, key: Key) -> None:
        """Drop the code of *key*."""
        code = self.codes.pop(key, None) or self._others.pop(key)
        self._drop(key, code)

    def _drop(self, key: Key, code: Size, failed: str = "") -> None:
        self._gained += code.gained
        dropped = replace(code, run=None, seconds=0.0, failed=failed, banked=code.hits)
        self._remember(key, dropped)
        self._starts_to_pay(dropped)

    def named(self, key: Key) -> tuple[tuple[str, int], ...]:
        """The sizes in *key* with their names."""
        return tuple(zip((size.symbol for size in self.inputs.sizes), key, strict=True))

    def title(self, key: Key) -> str:
        """The sizes in *key* as text."""
        return ", ".join(f"{name}={number}" for name, number in self.named(key))

    def outcome(self) -> SizesOutcome:
        """What is known of the sizes of the graph now."""
        with self._lock:
            uses = tuple(
                SizeUse(
                    sizes=self.named(key),
                    calls=size.calls + size.hits,
                    hits=size.hits,
                    has_code=size.run is not None,
                    seconds=size.seconds,
                    note=_note(size),
                )
                for key, size in [*self.codes.items(), *self._others.items()]
            )
        uses = tuple(sorted(uses, key=lambda use: (-use.calls, use.sizes)))
        hits = sum(use.hits for use in uses)
        return SizesOutcome(
            symbols=self.inputs.symbols,
            uses=uses,
            calls=self._calls + hits,
            hits=hits,
            forgotten=self._forgotten,
            symbolic=self._blocked,
            advice=self._advice(uses),
        )

    def _advice(self, uses: tuple[SizeUse, ...]) -> str:
        back = [use for use in uses if not use.has_code and use.calls - use.hits >= COMES_BACK]
        if not back:
            return ""
        most = ", ".join(f"{symbol}={number}" for symbol, number in back[0].sizes)
        text = f"The sizes {most} came back and ran {self.instead} in {back[0].calls - back[0].hits} calls"
        note = back[0].note
        if note == _SLOWER:
            return f"{text}: {note}."
        if note and not note.startswith("dropped"):
            return f"{text}: no {self.noun} could be made for them."
        if self._waiting or self._blocked:
            return f"{text}: {self._waiting or self._blocked}."
        if note or (self.hot_sizes and len(self._hot()) >= self.hot_sizes):
            return f"{text}: more sizes come back than {self.setting}={self.hot_sizes} keeps. Raise it."
        if self.hot_sizes:
            return ""
        asked = f'options={{"magi.hot_sizes": {min(len(back), 8)}}}'
        return f"{text}. With {asked} they get code of their own."


def _timed(run: Callable[[list[Any]], Any], inputs: list[Any], *, exact: bool) -> tuple[Any, float, bool]:
    """What *run* returns for *inputs*, the seconds of that, and whether they include the work of the accelerator."""
    exact = exact and not why_not_now()
    if exact:
        values.synchronize()
    start = perf_counter()
    result = run(inputs)
    if exact:
        values.synchronize()
    return result, perf_counter() - start, exact


def _earned(size: Size, key: Key, code: Size) -> float:
    """What *code*, that of the sizes *key*, has saved since *size* began to pay, or since it began itself."""
    hits = code.hits - size.since.get(key, 0)
    return hits * code.gain + (0.0 if key in size.since else code.paid)


_SLOWER = "its own code is slower than the code for any size"


def _note(size: Size) -> str:
    times = f"made {size.made} times" if size.made > 1 else ""
    if size.run is not None:
        return "asked for" if size.explicit else times
    return size.failed or (f"dropped, {times}" if size.made else "")
