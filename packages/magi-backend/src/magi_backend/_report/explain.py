# SPDX-License-Identifier: Apache-2.0
"""Run a function compiled and eager, side by side, and report what the compiler did."""

from __future__ import annotations

import contextlib
import json
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any, cast

import torch
from rich.console import RenderableType
from torch import nn

from magi_backend import _torch_compat
from magi_backend._records.folder import to_plain
from magi_backend._records.hidden import graph_break
from magi_backend._records.log import Collector, collecting
from magi_backend._settings import MagiOptions, read_request
from magi_backend._verify.compare import (
    Difference,
    Outcome,
    differences,
    other_layouts,
    replayed_random_numbers,
    run,
    tensors_of,
)
from magi_backend.errors import OptionError, TargetError, TargetTypeError
from magi_backend.records import Compilation, describe_input

from .html import Html, compilation_as_html, details, fill, page, section
from .sections import Line, Table, as_renderable, as_text, compilation_as_text, shown, spread, summary


@dataclass(frozen=True)
class CallRecord:
    """One explained call.

    Attributes:
        inputs: Shape and dtype of each tensor argument.
        first_seconds: The time of the compiled call with the compilations that it caused, forward and backward.
        later_seconds: The times of the same call, run again.
        eager_seconds: The times of the same call without the compiler, including the first one.
        compilations: The number of graphs that the backend compiled for the call.
        graph_breaks: Where and why Dynamo gave up tracing, and continued after it, during the first call.
        differences: Every output, and every gradient if there are any, compared with eager.
        layouts: A line for each output whose strides differ from eager's.
        random: Which random numbers the two sides used; empty if they used none.
        again: Whether the function had been compiled before, and was compiled again for the report.
    """

    inputs: tuple[str, ...]
    first_seconds: float
    later_seconds: tuple[float, ...]
    eager_seconds: tuple[float, ...]
    compilations: int
    graph_breaks: tuple[str, ...]
    differences: tuple[Difference, ...]
    layouts: tuple[str, ...] = ()
    random: str = ""
    again: bool = False

    def cells(self) -> tuple[str, ...]:
        """The row of the call in a table."""
        times = (shown(self.first_seconds), spread(self.later_seconds), spread(self.eager_seconds))
        verdicts = []
        for worst in (self.largest(gradients=False), self.largest(gradients=True)):
            verdict = "agree, within {:.1e}" if worst and worst.agrees else "DIFFER by {:.1e}, see below"
            verdicts.append(verdict.format(worst.largest) if worst else "none")
        return summary(self.inputs), str(self.compilations), *times, *verdicts

    def largest(self, *, gradients: bool) -> Difference | None:
        """The output, or the gradient, that is furthest from eager; None when there is none."""
        chosen = [d for d in self.differences if d.name.startswith("gradient") == gradients]
        return max(chosen, key=lambda d: (not d.agrees, d.largest), default=None)

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """The differences from eager that exceed the tolerance."""
        return tuple(difference for difference in self.differences if not difference.agrees)

    def lines(self) -> tuple[str, ...]:
        """Lines about the call to add to its row in a table: differences, graph breaks and other unusual results."""
        wrong = []
        for each in self.wrong:
            allowed = f"{each.tolerance.atol:.1g} + {each.tolerance.rtol:.1g} x the value"
            wrong.append(
                f"DIFFER: {each.name}"
                + (f": {each.note}" if each.note else f" by {each.largest:.1e} (allowed: {allowed})")
            )
        if wrong:
            wrong.append('Which operator is to blame: compile with options={"magi.check": True}, and call it once.')
        breaks = [f"Graph break at {text}" for text in self.graph_breaks]
        again = ["It had been compiled before; for this report it was compiled again."] * self.again
        return (*breaks, *again, *([self.random] if self.random else []), *self.layouts, *wrong)


_NOTHING = Line("There was nothing to compile: Dynamo found no operator in the function, or left it to Python.")
CALLS = ("inputs", "graphs", "first call", "later calls", "eager", "outputs", "gradients")


@dataclass(frozen=True)
class Report:
    """What :func:`explain` found.

    Attributes:
        target: Name of the explained function or module.
        torch: Version of torch.
        calls: The explained calls so far.
        compilations: Every graph that the backend compiled for them.
    """

    target: str
    torch: str
    calls: tuple[CallRecord, ...]
    compilations: tuple[Compilation, ...]

    @property
    def title(self) -> str:
        """What the report is about, in one line."""
        return f"{self.target}, compiled by magi"

    @property
    def agrees(self) -> bool:
        """Whether every output, written argument and gradient of every call agrees with eager."""
        return all(difference.agrees for call in self.calls for difference in call.differences)

    def to_text(self, width: int = 120) -> str:
        """The report as plain text, at most *width* columns wide."""
        return as_text(self._text(), width)

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON; infinite differences become the string "inf"."""
        return json.dumps(to_plain(self), indent=indent)

    def to_html(self) -> str:
        """The report as one HTML page that needs no other file."""
        longest = max((max(call.first_seconds, *call.eager_seconds) for call in self.calls), default=0.0)
        rows = []
        for call in self.calls:
            _, graphs, first, *others = call.cells()
            inputs = escape(", ".join(call.inputs[:3]))
            inputs += details(f"and {len(call.inputs) - 3} more", escape(", ".join(call.inputs[3:])))
            rows.append((Html(inputs), graphs, fill(call.first_seconds / longest if longest else 0.0, first), *others))
        lines = [section(Line(line, "yellow")) for call in self.calls for line in call.lines()]
        lines += [] if self.compilations else [section(_NOTHING)]
        compilations = (compilation_as_html(each, is_open=True) for each in self.compilations)
        return page(self.title, f"torch {self.torch}", section(Table("Calls", CALLS, rows)), *lines, *compilations)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.to_text())}</pre>"

    def __rich__(self) -> RenderableType:
        return as_renderable(self._text())

    def _text(self) -> Iterator[Line | Table]:
        yield Line(f"{self.title} with torch {self.torch}", "bold")
        for compilation in self.compilations:
            yield Line("")
            yield from compilation_as_text(compilation)
        yield Line("")
        yield Table("Calls", CALLS, (call.cells() for call in self.calls))
        for call in self.calls:
            yield from (Line(f"{summary(call.inputs)}: {line}", "yellow") for line in call.lines())
        if not self.compilations:
            yield _NOTHING


def _with_own_identity(backend: Callable[..., Any]) -> Callable[..., Any]:
    """*backend* as another object, so that Dynamo does not use code that another backend compiled.

    Code that was compiled with another backend stays in Dynamo's cache, and calls with that backend still use it.
    """

    def magi(gm: Any, example_inputs: Any) -> Any:
        return backend(gm, example_inputs)

    magi.compiler_fn = backend  # type: ignore[attr-defined]
    return magi


def module_of(fn: object) -> nn.Module | None:
    """The module that *fn* is, or whose method it is."""
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _copied(fn: Any) -> Any:
    """*fn* with a copied code object if it is a function or a method; anything else as it is."""
    if isinstance(fn, types.MethodType):
        return types.MethodType(_copied(fn.__func__), fn.__self__)
    if not isinstance(fn, types.FunctionType):
        return fn
    twin = types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    twin.__kwdefaults__ = fn.__kwdefaults__
    twin.__qualname__, twin.__module__, twin.__doc__ = fn.__qualname__, fn.__module__, fn.__doc__
    twin.__annotations__ = fn.__annotations__
    vars(twin).update(vars(fn))
    return twin


SAME_RANDOM = (
    "It draws random numbers. They are eager's here (fallback_random), to be compared; by default they are not."
)
OTHER_RANDOM = (
    "It draws random numbers, and by default not those of eager, so its results cannot be compared. What was compared "
    "is the same function, compiled to draw eager's (fallback_random)."
)


def explain(
    fn: Callable[..., Any],
    options: MagiOptions | Mapping[str, Any] | None = None,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    repeats: int = 2,
) -> Callable[..., Report]:
    """Explain what ``torch.compile(fn, backend="magi")`` does with *fn*.

    Args:
        fn: A module or function; or the result of ``torch.compile(..., backend="magi")`` or ``magi_compile``, which is
            then run as it is, so that it stays compiled for later calls.
        options: As for ``torch.compile``; with *mode*, *dynamic* and *fullgraph* only for an *fn* not compiled yet.
        mode: As for ``torch.compile``.
        dynamic: As for ``torch.compile``.
        fullgraph: As for ``torch.compile``.
        repeats: How often each call runs compiled after the first time, to measure later calls. Eager runs one time
            less, but at least once. With 0, calls are only compared.

    Returns:
        A function of the arguments of *fn*. Each call runs them eager and compiled, with the same random numbers and
        on copies of the tensors, so that neither the arguments nor the buffers of a module change; the first
        compilation bypasses all caches, so that every pass is asked. In grad mode it differentiates the outputs too
        and compares the gradients of parameters and inputs. It returns the report of all calls so far.

        If *fn* uses random numbers, the code compiled here uses those of eager mode (``fallback_random``). An *fn* that
        is compiled already uses other random numbers; if its results differ, code compiled for the comparison is
        compared instead. *fn* is also compiled once more if Dynamo has compiled all of it before, because otherwise
        there would be nothing to report.

    Raises:
        OptionError: *options* for a function that is compiled already, an unknown option or a wrong value. A call
            raises any error that the backend raises.
        TargetError: *fn* was compiled by another backend.
        TargetTypeError: *fn* cannot be called.

    Example:
        >>> report = explain(lambda x: (x.sin() + 1).sum())(torch.ones(8))
        >>> report.agrees
        True
    """
    given, number = cast("object", fn), cast("object", repeats)
    if not callable(given) or isinstance(given, type):
        raise TargetTypeError(f"explain takes a module or a function, and got {fn!r} (a {type(fn).__name__}).")
    _check_options(options, mode=mode, dynamic=dynamic, fullgraph=fullgraph)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise OptionError(f"explain: repeats={repeats!r} is not a number of calls; it takes 0, 1, 2, …")
    eager = _torch_compat.values.uncompiled(fn)
    keywords: Any = {"options": dict(options or {}) or None, "mode": mode, "dynamic": dynamic, "fullgraph": fullgraph}
    if eager is None:
        return _explained(fn, None, _compiled_again(fn, torch.compile(fn, backend="magi", **keywords)), repeats)
    ignored = [name for name, value in keywords.items() if value]
    if ignored:
        raise OptionError(
            f"explain: {_name(eager)} is compiled already, so {', '.join(ignored)} would have no effect. "
            "Give them to torch.compile, or explain the function itself."
        )
    return _explained(eager, fn, _compiled_again(eager, fn), repeats)


def _explained(
    eager: Callable[..., Any], given: Callable[..., Any] | None, again: Callable[..., Any], repeats: int
) -> Callable[..., Report]:
    """What ``explain`` returns: runs *eager*, and compiled *given*, or without that *again*, from a new code object."""
    owner, collector, calls = module_of(eager), Collector(fresh=True), list[CallRecord]()

    def explained(*args: Any, **kwargs: Any) -> Report:
        with replayed_random_numbers() as numbers:

            def replay(called: Callable[..., Any]) -> Outcome:
                numbers.rewind()
                return run(called, args, kwargs, owner)

            expected = [replay(eager)]
            draws = numbers.were_drawn()
            before, broken = len(collector), len(_torch_compat.frames.graph_breaks())
            collector.eager_random = draws and given is None
            compiled = again if given is None else given
            with collecting(collector):
                first = replay(compiled)

            def compared(outcome: Outcome) -> tuple[Difference, ...]:
                return differences(outcome, expected[0], computed_in=collector.dtypes)

            found, random, is_again = compared(first), SAME_RANDOM if draws else "", False
            if given is not None:
                differ = draws and not all(difference.agrees for difference in found)
                collector.eager_random, is_again = draws, not len(collector)
                if is_again or differ:
                    with collecting(collector if is_again else Collector(fresh=True, eager_random=True)):
                        other = replay(again)
                    # The graphs, and so their dtypes, may be known only now.
                    found, random = compared(other if draws else first), OTHER_RANDOM if draws else ""
            breaks = map(graph_break, _torch_compat.frames.graph_breaks()[broken:])
            later = tuple(replay(compiled).seconds for _ in range(repeats))
            expected += [replay(eager) for _ in range(repeats - 2)]
        calls.append(
            CallRecord(
                inputs=tuple(describe_input(tensor) for _, tensor in tensors_of((args, kwargs))),
                first_seconds=first.seconds,
                later_seconds=later,
                eager_seconds=tuple(outcome.seconds for outcome in expected),
                compilations=len(collector) - before,
                graph_breaks=tuple(dict.fromkeys(map(str, breaks))),
                differences=found,
                layouts=other_layouts(first, expected[0]),
                random=random,
                again=is_again,
            )
        )
        return Report(_name(eager), str(torch.__version__), tuple(calls), collector.compilations())

    return explained


def _check_options(
    options: MagiOptions | Mapping[str, Any] | None, *, mode: str | None, dynamic: object, fullgraph: object
) -> None:
    """Raise for options that ``torch.compile`` would refuse at the first call, or would misread."""
    if mode is not None and options:
        way_out = f'options={{"magi.mode": {mode!r}}} does both.'
        raise OptionError(f"explain: mode={mode!r} together with options. Give one of them; {way_out}")
    read_request(mode=mode, options=options)
    for name, value, kinds in (("dynamic", dynamic, "True, False or None"), ("fullgraph", fullgraph, "True or False")):
        if not isinstance(value, bool) and not (value is None and "None" in kinds):
            raise OptionError(f"explain: {name}={value!r} is a {type(value).__name__}; it takes {kinds}.")


def _compiled_again(original: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """*original* compiled again as *compiled* was, from a code object that is new to Dynamo.

    Dynamo keeps compiled code with the code object of the function, and stops compiling one for which it keeps too
    much. So this compiles a copy of the function, or of the ``forward`` of a module.

    Raises:
        TargetError: Another backend compiled it.
    """
    how = _torch_compat.values.compiled_by(compiled)
    if how is None or not _torch_compat.compiling.is_our_backend(how.backend):
        by = f"the backend {how.backend_name!r}" if how is not None else "something other than torch.compile"
        name = _name(original)
        raise TargetError(
            f"explain: {name} was compiled by {by}, and what that did is not on record here. Explain the function "
            f'itself: explain({name}), or what torch.compile({name}, backend="magi") returns.'
        )
    module, forward = module_of(original), None
    if module is not None and "forward" not in vars(module) and isinstance(module.forward, types.MethodType):
        forward = _copied(module.forward)

    @contextlib.contextmanager
    def with_own_forward() -> Iterator[None]:
        if forward is None:
            yield
            return
        vars(module)["forward"] = forward
        try:
            yield
        finally:
            del vars(module)["forward"]

    with with_own_forward():
        again = how.make(original if module is not None else _copied(original), _with_own_identity(how.backend))

    def call(*args: Any, **kwargs: Any) -> Any:
        with with_own_forward(), _torch_compat.values.many_recompilations():
            return again(*args, **kwargs)

    return call


def _name(fn: object) -> str:
    owner = module_of(fn)
    return str(getattr(fn, "__qualname__", type(fn).__qualname__)) if owner is None else type(owner).__qualname__
