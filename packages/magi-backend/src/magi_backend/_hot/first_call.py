# SPDX-License-Identifier: Apache-2.0
"""Eager answers the calls of a captured graph until code is made on another thread (``magi.first_call="eager"``).

Dynamo has built its guards by then, so it cannot be given those that a compilation asks for. They become the condition
of that code: for other sizes eager answers again, and code with these sizes as hints is made.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from magi_backend._records.log import CompilationLog
from magi_backend._torch_compat import compiling, state, symbols
from magi_backend._torch_compat.values import float_memo
from magi_backend.errors import family
from magi_backend.records import EagerOutcome

from .background import jobs
from .captured import Captured, Compile, Condition, Key, capture, read_inputs, reason_of
from .ranks import Exchange
from .table import Choices


logger = logging.getLogger("magi_backend")

MOST_CODES = 8
"""How many codes a graph may have, each for the sizes that fulfil its condition; eager answers for others then."""


@dataclass(eq=False)
class FirstCalls:
    """The calls of one captured graph, until all of them are answered by code.

    Attributes:
        captured: The graph; None when no more code will be made of it.
        compile_open: Compiles it with open sizes.
        label: Name of the graph, for messages.
        strict: Whether a call raises the error of a compilation that failed.
        changed: Called when code was made, or was not.
        answer: Answers a call. It is replaced between two calls.

    Under ``torch.utils.checkpoint`` the recomputation runs what the forward ran.
    """

    captured: Captured | None
    compile_open: Compile
    label: str
    strict: bool
    changed: Callable[[], None]
    answer: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        assert self.captured is not None
        self._eager: Callable[..., Any] = self.captured.gm.forward
        self._sizes = tuple(size.place for size in self.captured.inputs.sizes)
        self._codes: list[tuple[Condition, Callable[..., Any]]] = []
        self._choices = Choices()
        self._calls = 0
        self._note = "its code is not made yet"
        self._error: Callable[[], Exception] | None = None
        self._lock = threading.Lock()
        self._differentiates = self.captured.inputs.differentiates
        self.answer = self._eagerly

    def dispatch(self) -> Callable[..., Any]:
        """The function that runs each call."""

        def first_calls(*inputs: Any) -> Any:
            return self.answer(*inputs)

        def first_calls_with_backward(*inputs: Any) -> Any:
            hooks: Any = state.top_saved_tensor_hooks(True)
            if hooks is None:
                return self.answer(*inputs)
            return (self._choices.take(hooks, lambda: self._choice(inputs)) or self._eagerly)(*inputs)

        return first_calls_with_backward if self._differentiates else first_calls

    def _eagerly(self, *inputs: Any) -> Any:
        if self._error is not None:
            raise self._error()
        result = self._eager(*inputs)
        with self._lock:
            self._calls += 1
        key = tuple(inputs[place] for place in self._sizes)
        # A symbolic size is that of a call that is traced.
        if self.captured is not None and all(isinstance(size, int) for size in key):
            make = weakref.WeakMethod(self._make)
            jobs.add(id(self), lambda: (now := make()) and now(key))
        return result

    def _choice(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The code that holds for the sizes of *inputs*, or eager."""
        sizes = [inputs[place] for place in self._sizes]
        return next((code for holds, code in self._codes if holds(sizes)), self._eagerly)

    def _make(self, key: Key) -> None:
        """Make code on the thread of the jobs."""
        captured = self.captured
        # What belongs to the process cannot be set for one thread: a later call tries again.
        if captured is None or not captured.state.is_of_process() or any(holds(key) for holds, _ in self._codes):
            return
        try:
            code, condition = captured.compiled(key, self.compile_open, beside_others=True, for_any=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, eager can answer
            self._fail(error)
        else:
            self._take(code, condition)
        self.changed()

    def _take(self, code: Callable[..., Any], condition: Condition | None) -> None:
        """Let *code* answer from the next call on."""
        self._codes.append((condition or (lambda _: True), code))
        if condition is None:
            self.captured, self._note, self.answer = None, "", code
            return
        self._note = "its code holds only for some sizes"
        if len(self._codes) == MOST_CODES:
            self.captured = None
            logger.warning(
                "%s: %d codes hold for some sizes each, and eager answers for others", self.label, MOST_CODES
            )
        self.answer = lambda *inputs: self._choice(inputs)(*inputs)

    def _fail(self, error: Exception) -> None:
        self.captured = None
        self._note = f"no code could be made: {reason_of(error)}"
        if self.strict or isinstance(error, family()):
            traceback = error.__traceback__
            self._error = lambda: error.with_traceback(traceback)  # without the frames of calls that raised it before
            return
        logger.warning(
            "%s: no code could be made, so eager goes on answering: %s: %s",
            self.label,
            type(error).__name__,
            error,
            exc_info=error if logger.isEnabledFor(logging.DEBUG) else None,
        )

    def outcome(self) -> EagerOutcome:
        """How many calls eager has answered, and why it still does."""
        return EagerOutcome(self._calls, self._note)


def why_in_call(captured: Captured, exchange: Exchange | None) -> str:
    """Why the first call of a graph must compile it, or empty."""
    if captured.reason:
        return captured.reason
    if compiling.is_result_saved():
        return "what the backend returns is saved"
    if exchange is not None:
        return exchange.why or "it exchanges with other ranks, which must run the same code"
    if any(float_memo(fake) is not None for fake in captured.fakes):
        return "an input is a float, for which Dynamo may have to capture the function again"
    if any(free_unbacked_symbols(captured.fakes[size.place]) for size in captured.inputs.sizes):
        return "a size is open for 0 and 1"
    if not all(captured.fakes[size.place].node.expr.is_Symbol for size in captured.inputs.sizes):
        return "an input is a size that is computed from others"
    if symbols.share_memory(captured.descriptions):
        return "inputs share memory, for which torch may need guards"
    return ""


def with_eager_first(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    log: CompilationLog,
    compile_open: Compile,
    exchange: Exchange | None,
    *,
    strict: bool,
) -> Callable[..., Any] | None:
    """The function that answers calls of *gm* by eager until code is made; None if this call must compile."""
    captured = capture(gm, example_inputs, read_inputs(gm, example_inputs))
    if reason := why_in_call(captured, exchange):
        log.update(eager=EagerOutcome(0, f"compiled in the call, because {reason}"))
        return None
    captured.context.finish()
    jobs.let_captures_pass()
    first = FirstCalls(captured, compile_open, log.label, strict, log.write_counts)
    log.counts["eager"] = first.outcome
    return first.dispatch()
