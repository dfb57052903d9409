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
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from magi_backend.records import SizesOutcome, SizeUse

from . import _torch_compat
from .captured import why_not_now
from .dispatch import make_dispatch


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .captured import Captured, Compile
    from .dispatch import Key, SizeInput


class Choices:
    """The code that the calls of one graph ran inside checkpointed regions; it is forgotten with the region."""

    def __init__(self) -> None:
        self._taken: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._replayed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def take(self, hooks: Any, choose: Callable[[], Any], general: Any) -> Any:
        """The code to run under the saved-tensor *hooks*: *choose* decides in a forward, a recomputation repeats it.

        *general*, the code for any size, is used for hooks of ``torch.utils.checkpoint`` that do not show their region,
        so that forward and recomputation run the same code.
        """
        region = _torch_compat.checkpoint_region(hooks)
        if region is None:
            return choose()
        if region.frame is None:
            return general
        if not region.recomputes:
            taken = choose()
            self._taken.setdefault(region.frame, []).append(taken)
            return taken
        place = self._replayed.get(region.hook, 0)
        self._replayed[region.hook] = place + 1
        taken_then = self._taken.get(region.frame, [])
        return taken_then[place] if place < len(taken_then) else general


MOST_SIZES = 64
"""How many sizes without code of their own are remembered; the least recently used one is forgotten first."""

MOST_VALUES = 64
"""How many values a symbol may take. One with more, such as a decode position, never comes back often enough."""


@dataclass
class Seen:
    """What is known of one size.

    Attributes:
        calls: Calls that ran the code for any size.
        hits: Calls that ran code of its own that was dropped again since.
        left: Calls until code is made.
        made: How often code was made.
        failed: Why code could not be made, or empty.
    """

    calls: int = 0
    hits: int = 0
    left: int = 0
    made: int = 0
    failed: str = ""


class SeenSizes:
    """Counts the calls that found no code for their size. The caller holds a lock.

    Args:
        inputs: The size inputs of the graph.
        hot_after: The call with the same sizes, counted from 1, at which code is made for them.
    """

    def __init__(self, inputs: Sequence[SizeInput], hot_after: int) -> None:
        self._inputs = inputs
        self._hot_after = hot_after
        self._values: list[set[int]] = [set() for _ in inputs]
        self.table: OrderedDict[Key, Seen] = OrderedDict()
        self.calls = 0
        self.dropped = 0
        self.blocked = ""

    def count(self, key: Key) -> bool:
        """Count a call. Returns whether code must be made in this call."""
        self.calls += 1
        seen = self.table.get(key)
        if seen is None:
            seen = Seen(left=self._hot_after)
            self._block(key)
            self._keep(key, seen)
        else:
            self.table.move_to_end(key)
        seen.calls += 1
        seen.left -= 1
        return seen.left <= 0 and not self.blocked and not seen.failed

    def take(self, key: Key) -> Seen:
        """Remove *key*, which has code of its own from now on, and return what is known of it."""
        return self.table.pop(key, None) or Seen()

    def put_back(self, key: Key, seen: Seen) -> None:
        """Count *key* again, whose code was dropped; it must come back twice as often as the last time."""
        seen.left = self._hot_after * 2**seen.made
        self._keep(key, seen)

    def fail(self, key: Key, reason: str) -> None:
        """Remember that no code could be made for *key*, and why."""
        seen = self.table.pop(key, None) or Seen()
        seen.failed = reason
        self._keep(key, seen)

    def _keep(self, key: Key, seen: Seen) -> None:
        if len(self.table) >= MOST_SIZES:
            self.table.popitem(last=False)
            self.dropped += 1
        self.table[key] = seen

    def _block(self, key: Key) -> None:
        if self.blocked:
            return
        for size, values, value in zip(self._inputs, self._values, key, strict=True):
            values.add(value)
            if len(values) > MOST_VALUES:
                self.blocked = f"{size.path} has had more than {MOST_VALUES} values"
                self._values = [set() for _ in self._inputs]
                return


logger = logging.getLogger("magi_backend")

MOST_FAILURES = 3
"""After so many sizes for which no code could be made, no more code is tried for the graph."""


@dataclass(slots=True)
class Code:
    """Code for one size.

    Attributes:
        run: A function of a list of the inputs that are not sizes.
        seen: What was known of the size before.
        seconds: How long it took to compile.
        explicit: Whether it is for a size of ``magi.compile_sizes``, and so is never dropped.
        hits: Calls that ran it.
    """

    run: Callable[[list[Any]], Any]
    seen: Seen = field(default_factory=Seen)
    seconds: float = 0.0
    explicit: bool = False
    hits: int = 0


class SizeTable:
    """The code of a captured graph for single sizes, in addition to its code for any size.

    Args:
        captured: The graph.
        general: The code for any size.
        compile_static: Compiles a graph without symbols, given its inputs and a title.
        hot_sizes: How many sizes that came back may have code at a time; 0 for none.
        hot_after: The number of the call with the same sizes at which code is made.
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
        self.captured = captured
        self.general = general
        self.codes: OrderedDict[Key, Code] = OrderedDict()
        self.seen = SeenSizes(captured.inputs.sizes, hot_after)
        self.hot_sizes = hot_sizes
        self.waiting = ""
        self._compile = compile_static
        self._explicit = list(dict.fromkeys(explicit))
        self._label = label
        self._lock = threading.Lock()
        self._failures = 0
        self._choices = Choices()

    def dispatch(self) -> Callable[..., Any]:
        """The function that runs each call."""
        return make_dispatch(
            self.captured.inputs,
            self._label,
            find=self.codes.get,
            other=self._other,
            general=self.general,
            under_hooks=self._under_hooks,
            note_use=self.codes.move_to_end,
        )

    def contents(self) -> tuple[list[tuple[Key, Code]], list[tuple[Key, Seen]]]:
        """The sizes with code of their own, and the others that are remembered."""
        with self._lock:
            return list(self.codes.items()), list(self.seen.table.items())

    def _other(self, key: Key, args: tuple[Any, ...]) -> Any:
        """Run a call that found no code for *key*."""
        code = self._made_now(key)
        return self.general(*args) if code is None else self._run(code, args)

    def _under_hooks(self, hooks: Any, key: Key, args: tuple[Any, ...]) -> Any:
        """Run a call whose saved tensors go through *hooks*."""
        code = self._choices.take(hooks, lambda: self.codes.get(key) or self._made_now(key), None)
        if code is None:
            return self.general(*args)
        with contextlib.suppress(KeyError):  # dropped since
            self.codes.move_to_end(key)
        return self._run(code, args)

    def _run(self, code: Code, args: tuple[Any, ...]) -> Any:
        code.hits += 1
        inputs = list(args)
        for size in reversed(self.captured.inputs.sizes):
            del inputs[size.place]
        return code.run(inputs)

    def _made_now(self, key: Key) -> Code | None:
        """Count the call, and make code if it is due. Returns the code for *key*; None if there is none."""
        with self._lock:
            due = self.seen.count(key) and self.hot_sizes > 0
        if not (due or self._explicit):
            return None
        lock = _torch_compat.compile_lock()
        # Ranks that compile the same sizes wait for each other; a thread does not wait for the graph of another thread.
        if not lock.acquire(blocking=bool(self._explicit)):
            return None
        try:
            if self._explicit and not self._hold(why_not_now(same_on_all_ranks=True)):
                while self._explicit:
                    self._make(self._explicit.pop(0), explicit=True)
            if key not in self.codes and due and not self._hold(why_not_now(same_on_all_ranks=False)):
                self._make(key, explicit=False)
        finally:
            lock.release()
        code = self.codes.get(key)
        if code is not None:
            with self._lock:
                self.seen.calls -= 1  # it still runs that code
                code.seen.calls -= 1
        return code

    def _hold(self, reason: str) -> bool:
        self.waiting = reason
        return bool(reason)

    def _make(self, key: Key, *, explicit: bool) -> None:
        start = time.perf_counter()
        try:
            run = self.captured.compiled(key, self._compile)
        except Exception as error:  # noqa: BLE001 - whatever it is, there is code for any size
            self._failed(key, error)
            return
        seconds = time.perf_counter() - start
        with self._lock:
            self._make_room(explicit=explicit)
            seen = self.seen.take(key)
            seen.made += 1
            self.codes[key] = Code(run, seen, seconds, explicit=explicit)
        logger.info("%s: code for the sizes %s made in %.2f s", self._label, self.captured.title(key), seconds)

    def _make_room(self, *, explicit: bool) -> None:
        """Drop the least recently used code if there is no room for one more."""
        hot = [key for key, code in self.codes.items() if not code.explicit]
        if explicit or len(hot) < self.hot_sizes:
            return
        code = self.codes.pop(hot[0])
        code.seen.hits += code.hits
        self.seen.put_back(hot[0], code.seen)

    def _failed(self, key: Key, error: Exception) -> None:
        """Remember that *key* runs the code for any size, and is not tried again."""
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        with self._lock:
            self._failures += 1
            first = self._failures == 1
            self.seen.fail(key, reason)
            if self._failures >= MOST_FAILURES:
                self.seen.blocked = f"no code could be made for {MOST_FAILURES} sizes"
        log = logger.warning if first else logger.info
        log(
            "%s: no code could be made for the sizes %s, which run the code for any size: %s",
            self._label,
            self.captured.title(key),
            reason,
            exc_info=error if logger.isEnabledFor(logging.DEBUG) else None,
        )


COMES_BACK = 3
"""With at least so many calls with the same sizes, the report gives advice."""


def sizes_outcome(table: SizeTable) -> SizesOutcome:
    """What is known of the sizes of a graph now."""
    names = table.captured.inputs.symbols
    codes, seen = table.contents()

    def named(key: Key) -> tuple[tuple[str, int], ...]:
        return tuple((symbol, number) for (symbol, _), number in zip(names, key, strict=True))

    own = [
        SizeUse(
            sizes=named(key),
            calls=code.seen.calls + code.seen.hits + code.hits,
            hits=code.seen.hits + code.hits,
            has_code=True,
            seconds=code.seconds,
            note="asked for" if code.explicit else _made(code.seen.made),
        )
        for key, code in codes
    ]
    others = [
        SizeUse(
            sizes=named(key),
            calls=size.calls + size.hits,
            hits=size.hits,
            has_code=False,
            seconds=0.0,
            note=size.failed or (f"dropped, {_made(size.made)}" if size.made else ""),
        )
        for key, size in seen
    ]
    uses = tuple(sorted((*own, *others), key=lambda use: (-use.calls, use.sizes)))
    return SizesOutcome(
        symbols=names,
        uses=uses,
        calls=table.seen.calls + sum(use.hits for use in uses),
        hits=sum(use.hits for use in uses),
        forgotten=table.seen.dropped,
        symbolic=table.seen.blocked,
        advice=_advice(table, uses),
    )


def _made(times: int) -> str:
    return f"made {times} times" if times > 1 else ""


def _advice(table: SizeTable, uses: tuple[SizeUse, ...]) -> str:
    back = [use for use in uses if not use.has_code and use.calls - use.hits >= COMES_BACK]
    if not back:
        return ""
    most = ", ".join(f"{symbol}={number}" for symbol, number in back[0].sizes)
    text = f"The sizes {most} came back and ran the code for any size in {back[0].calls - back[0].hits} calls"
    if back[0].note.startswith("dropped"):
        return f"{text}: more sizes come back than magi.hot_sizes={table.hot_sizes} keeps. Raise it."
    if back[0].note:
        return f"{text}: no code could be made for them."
    if table.waiting:
        return f"{text}: {table.waiting}."
    if table.hot_sizes:
        return f"{text}: {table.seen.blocked}." if table.seen.blocked else ""
    asked = f'options={{"magi.hot_sizes": {min(len(back), 8)}}}'
    return f"{text}. With {asked} they get code of their own."
