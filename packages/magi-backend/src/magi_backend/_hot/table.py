# SPDX-License-Identifier: Apache-2.0
"""Which sizes have code of their own, and what happens in a call that finds none."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import _torch_compat
from .checkpoints import Choices
from .dispatch import make_dispatch
from .moment import why_not_now
from .seen import Seen, SeenSizes


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .captured import Captured, Compile
    from .inputs import Key


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
