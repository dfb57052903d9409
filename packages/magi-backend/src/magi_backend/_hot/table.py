# SPDX-License-Identifier: Apache-2.0
"""Which sizes have code of their own, and what happens in a call that finds none.

Sizes are counted to find those that come back; nothing here grows without bound. ``torch.utils.checkpoint`` runs a
function again in the backward and expects that it saves the same tensors. In between, code for a size may have been
made or dropped, so each region remembers which code its calls ran, in order.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from magi_backend._torch_compat import state
from magi_backend.records import SizesOutcome, SizeUse

from .captured import why_not_now
from .dispatch import make_dispatch


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .captured import Captured, Compile
    from .dispatch import Key


logger = logging.getLogger("magi_backend")

MOST_SIZES = 64
"""How many sizes without code of their own are remembered; the least recently used one is forgotten first."""

MOST_VALUES = 64
"""How many values a symbol may take. One with more, such as a decode position, never comes back often enough."""

MOST_FAILURES = 3
"""After so many sizes for which no code could be made, no more code is tried for the graph."""

COMES_BACK = 3
"""With at least so many calls with the same sizes, the report gives advice."""


class Choices:
    """The code that the calls of one graph ran inside checkpointed regions; it is forgotten with the region."""

    def __init__(self) -> None:
        self._taken: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._replayed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def take(self, hooks: Any, choose: Callable[[], Any]) -> Any:
        """The code to run under the saved-tensor *hooks*: *choose* decides in a forward, a recomputation repeats it.

        None, the code for any size, is used for hooks of ``torch.utils.checkpoint`` that do not show their region, so
        that forward and recomputation run the same code.
        """
        region = state.checkpoint_region(hooks)
        if region is None:
            return choose()
        if region.frame is None:
            return None
        if not region.recomputes:
            taken = choose()
            self._taken.setdefault(region.frame, []).append(taken)
            return taken
        place = self._replayed.get(region.hook, 0)
        self._replayed[region.hook] = place + 1
        taken_then = self._taken.get(region.frame, [])
        return taken_then[place] if place < len(taken_then) else None


@dataclass(slots=True)
class Size:
    """What is known of one size of a graph, and its code if it has any.

    Attributes:
        calls: Calls that ran the code for any size.
        hits: Calls that ran code of its own.
        left: Calls until code is made.
        made: How often code was made.
        failed: Why code could not be made, or empty.
        run: Code of its own, a function of a list of the inputs that are not sizes.
        seconds: How long that took to compile.
        explicit: Whether it is a size of ``magi.compile_sizes``, whose code is never dropped.
    """

    calls: int = 0
    hits: int = 0
    left: int = 0
    made: int = 0
    failed: str = ""
    run: Callable[[list[Any]], Any] | None = None
    seconds: float = 0.0
    explicit: bool = False


class SizeTable:
    """The code of a captured graph for single sizes, in addition to its code for any size.

    Args:
        captured: The graph.
        general: The code for any size.
        compile_static: Compiles a graph without symbols, given its inputs and a title.
        hot_sizes: How many sizes that came back may have code at a time; 0 for none.
        hot_after: The call with the same sizes, counted from 1, at which code is made for them.
        explicit: Sizes that get code at the first call.
        label: Name of the graph, for messages.
    """

    def __init__(
        self,
        captured: Captured,
        general: Callable[..., Any],
        compile_static: Compile,
        *,
        hot_sizes: int,
        hot_after: int,
        explicit: Sequence[Key],
        label: str,
    ) -> None:
        self._captured = captured
        self._general = general
        self._compile = compile_static
        self._hot_sizes = hot_sizes
        self._hot_after = hot_after
        self._explicit = list(dict.fromkeys(explicit))
        self._label = label
        self._lock = threading.Lock()
        self.codes: OrderedDict[Key, Size] = OrderedDict()
        """The sizes with code of their own, by last use."""
        self._others: OrderedDict[Key, Size] = OrderedDict()
        """The others that are remembered, by last use."""
        self._values: defaultdict[int, set[int]] = defaultdict(set)
        """The values that each size input has had, by its place."""
        self._calls = self._forgotten = self._failures = 0
        self._blocked = self._waiting = ""
        self._choices = Choices()

    def dispatch(self) -> Callable[..., Any]:
        """The function that runs each call."""
        return make_dispatch(
            self._captured.inputs,
            self._label,
            find=self.codes.get,
            other=self._other,
            general=self._general,
            under_hooks=self._under_hooks,
            note_use=self.codes.move_to_end,
        )

    def _other(self, key: Key, args: tuple[Any, ...]) -> Any:
        """Run a call that found no code for *key*."""
        return self._run(self._made_now(key), args)

    def _under_hooks(self, hooks: Any, key: Key, args: tuple[Any, ...]) -> Any:
        """Run a call whose saved tensors go through *hooks*."""
        code = self._choices.take(hooks, lambda: self.codes.get(key) or self._made_now(key))
        if code is not None:
            with contextlib.suppress(KeyError):  # dropped since
                self.codes.move_to_end(key)
        return self._run(code, args)

    def _run(self, code: Size | None, args: tuple[Any, ...]) -> Any:
        """What the *code* of one size returns, or that for any size."""
        if code is None or code.run is None:
            return self._general(*args)
        code.hits += 1
        inputs = list(args)
        for size in reversed(self._captured.inputs.sizes):
            del inputs[size.place]
        return code.run(inputs)

    def _made_now(self, key: Key) -> Size | None:
        """Count the call, and make code if it is due. Returns the code for *key*; None if there is none."""
        with self._lock:
            due = self._count(key) and self._hot_sizes > 0
        if not (due or self._explicit):
            return None
        lock = state.compile_lock()
        # Ranks that compile the same sizes wait for each other; a thread does not wait for the graph of another thread.
        if not lock.acquire(blocking=bool(self._explicit)):
            return None
        try:
            if self._explicit and not self._must_wait(same_on_all_ranks=True):
                while self._explicit:
                    self._make(self._explicit.pop(0), explicit=True)
            if key not in self.codes and due and not self._must_wait(same_on_all_ranks=False):
                self._make(key, explicit=False)
        finally:
            lock.release()
        code = self.codes.get(key)
        if code is not None:
            with self._lock:
                self._calls -= 1  # it still runs that code
                code.calls -= 1
        return code

    def _must_wait(self, *, same_on_all_ranks: bool) -> bool:
        self._waiting = why_not_now(same_on_all_ranks=same_on_all_ranks)
        return bool(self._waiting)

    def _count(self, key: Key) -> bool:
        """Count a call without code for *key*. Returns whether code must be made in this call."""
        self._calls += 1
        size = self._others.get(key)
        if size is None:
            size = Size(left=self._hot_after)
            for known, value in zip(self._captured.inputs.sizes, key, strict=True):
                if not self._blocked:
                    self._values[known.place].add(value)
                    if len(self._values[known.place]) > MOST_VALUES:
                        self._blocked = f"{known.path} has had more than {MOST_VALUES} values"
                        self._values.clear()
            self._remember(key, size)
        else:
            self._others.move_to_end(key)
        size.calls += 1
        size.left -= 1
        return size.left <= 0 and not self._blocked and not size.failed

    def _remember(self, key: Key, size: Size) -> None:
        """Put *size*, which has no code, behind the others."""
        if len(self._others) >= MOST_SIZES:
            self._others.popitem(last=False)
            self._forgotten += 1
        self._others[key] = size

    def _make(self, key: Key, *, explicit: bool) -> None:
        start = time.perf_counter()
        try:
            run = self._captured.compiled(key, self._compile)
        except Exception as error:  # noqa: BLE001 - whatever it is, there is code for any size
            self._failed(key, error)
            return
        seconds = time.perf_counter() - start
        with self._lock:
            if not explicit:
                self._make_room()
            size = self._others.pop(key, None) or Size()
            size.made += 1
            size.run, size.seconds, size.explicit = run, seconds, explicit
            self.codes[key] = size
        logger.info("%s: code for the sizes %s made in %.2f s", self._label, self._captured.title(key), seconds)

    def _make_room(self) -> None:
        """Drop the least recently used code if there is no room for one more.

        Its size must come back twice as often as the last time. A call on another thread may still run the code.
        """
        hot = [key for key, size in self.codes.items() if not size.explicit]
        if len(hot) >= self._hot_sizes:
            size = self.codes.pop(hot[0])
            self._remember(hot[0], replace(size, left=self._hot_after * 2**size.made, run=None, seconds=0.0))

    def _failed(self, key: Key, error: Exception) -> None:
        """Remember that *key* runs the code for any size, and is not tried again."""
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        with self._lock:
            self._failures += 1
            first = self._failures == 1
            size = self._others.pop(key, None) or Size()
            size.failed = reason
            self._remember(key, size)
            if self._failures >= MOST_FAILURES:
                self._blocked = f"no code could be made for {MOST_FAILURES} sizes"
        log = logger.warning if first else logger.info
        log(
            "%s: no code could be made for the sizes %s, which run the code for any size: %s",
            self._label,
            self._captured.title(key),
            reason,
            exc_info=error if logger.isEnabledFor(logging.DEBUG) else None,
        )

    def outcome(self) -> SizesOutcome:
        """What is known of the sizes of the graph now."""
        names = self._captured.inputs.symbols
        with self._lock:
            sizes = [*self.codes.items(), *self._others.items()]
        uses = tuple(
            SizeUse(
                sizes=tuple((symbol, number) for (symbol, _), number in zip(names, key, strict=True)),
                calls=size.calls + size.hits,
                hits=size.hits,
                has_code=size.run is not None,
                seconds=size.seconds,
                note=_note(size),
            )
            for key, size in sizes
        )
        uses = tuple(sorted(uses, key=lambda use: (-use.calls, use.sizes)))
        hits = sum(use.hits for use in uses)
        return SizesOutcome(
            symbols=names,
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
        text = f"The sizes {most} came back and ran the code for any size in {back[0].calls - back[0].hits} calls"
        if back[0].note.startswith("dropped"):
            return f"{text}: more sizes come back than magi.hot_sizes={self._hot_sizes} keeps. Raise it."
        if back[0].note:
            return f"{text}: no code could be made for them."
        if self._waiting:
            return f"{text}: {self._waiting}."
        if self._hot_sizes:
            return f"{text}: {self._blocked}." if self._blocked else ""
        asked = f'options={{"magi.hot_sizes": {min(len(back), 8)}}}'
        return f"{text}. With {asked} they get code of their own."


def _note(size: Size) -> str:
    times = f"made {size.made} times" if size.made > 1 else ""
    if size.run is not None:
        return "asked for" if size.explicit else times
    return size.failed or (f"dropped, {times}" if size.made else "")
