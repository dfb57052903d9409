# SPDX-License-Identifier: Apache-2.0
"""What is known of a defect of torch, and where its repair is active: in one context of one thread."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from magi_backend._torch_compat.compiling import assigned, owner_of, replace, torch_release


@dataclass(frozen=True)
class Defect:
    """One defect and its repair.

    A repair is active for the releases that have the defect. A graph that the defect does not touch compiles to what
    it was, and the report names the repair only where torch's own way would have failed, given another result or
    written slower code.

    Attributes:
        name: The name of the repair in reports, and of its scope.
        effect: What a user sees without the repair.
        severity: Whether the compiled code is wrong, or there is none, or its calls fail, or it is in more graphs or
            slower than need be.
        repair: What the repair does, for the report.
        replaces: For a function of torch, such as ``torch.module:Class.method``, the one that is called in its place
            within the scope of the repair. It takes torch's function, and then the arguments.
        since: First release known to have it; without it, the oldest supported release has it.
        fixed: First release known not to have it; None while every release since has it.
        is_torch_concerned: Asked when a compilation starts: whether torch's own way, as it is configured by the user,
            meets the defect. Otherwise only what this backend turns on needs the repair, and the report is silent.
        is_of_joint_graphs: Whether it is met in the passes over the graph of forward and backward together too.
        is_in_capture: Whether the repair is one of what Dynamo does before it calls a backend, or after that. Its
            functions are called for every backend. Those of before say by `note_in_capture` that it mattered.
        when_replaced: Called when torch's functions have been replaced.
    """

    name: str
    effect: str
    severity: Literal["wrong code", "no code", "failed calls", "more graphs", "slower code"]
    repair: str
    replaces: Mapping[str, Callable[..., Any]]
    since: tuple[int, ...] = (2, 10, 0)
    fixed: tuple[int, ...] | None = None
    is_torch_concerned: Callable[[], bool] = lambda: True
    is_of_joint_graphs: bool = False
    is_in_capture: bool = False
    when_replaced: Callable[[], None] | None = None

    def concerns(self, release: tuple[int, ...]) -> bool:
        """Whether the torch *release*, for example ``(2, 13, 0)``, has the defect."""
        return self.since <= release and (self.fixed is None or release < self.fixed)

    def patch(self) -> None:
        """Put the repair in the place of torch's functions, once; outside of its scope it does nothing there."""
        scope = None if self.is_in_capture else functools.partial(is_active, self.name)
        done = [replace(*owner_of(place), scope, repaired) for place, repaired in self.replaces.items()]
        if any(done) and self.when_replaced is not None:
            self.when_replaced()


@functools.cache
def known_defects() -> tuple[Defect, ...]:
    """Every defect in a module of this folder, by name."""
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    values = [value for name in names for value in vars(importlib.import_module(f"{__package__}.{name}")).values()]
    return tuple(sorted((each for each in values if isinstance(each, Defect)), key=lambda defect: defect.name))


def active_defects() -> tuple[Defect, ...]:
    """The defects that this release of torch has."""
    return tuple(defect for defect in known_defects() if defect.concerns(torch_release()))


@dataclass(frozen=True)
class _Scope:
    names: frozenset[str]
    reported: frozenset[str]
    report: Callable[[str], None]
    questions: list[tuple[str, Callable[[], bool]]] = field(default_factory=list)


_scope: ContextVar[_Scope | None] = ContextVar("magi_repairs", default=None)
_patching = threading.Lock()
_NOTED = "magi_repairs"
"""Attribute of a tracing context: the repairs that had an effect when its graph was captured."""


@contextlib.contextmanager
def repaired(defects: Sequence[Defect], report: Callable[[str], None]) -> Iterator[None]:
    """Run Inductor with the repairs of *defects*, within this context only.

    *report* gets the name of a defect each time that torch's own way would have failed or given another result. The
    functions of torch are replaced on first use, and behave as before outside such a context.
    """
    _patch(defects)
    noted = _noted_in(torch._guards.TracingContext.try_get())
    for defect in defects:
        if defect.name in noted:
            report(defect.name)
    reported = frozenset(defect.name for defect in defects if defect.is_torch_concerned())
    scope = _Scope(frozenset(defect.name for defect in defects), reported, report)
    with assigned(_scope, scope):
        yield
        for name, mattered in scope.questions:
            if name in reported and mattered():
                report(name)


def repair_capture() -> None:
    """Install the repairs of what Dynamo does before it calls a backend; they check the backend themselves."""
    _patch([defect for defect in active_defects() if defect.is_in_capture])


def note_in_capture(output: Any, name: str) -> None:
    """Note that the repair *name* has an effect on the graph that Dynamo captures into *output*."""
    context = output.tracing_context
    setattr(context, _NOTED, _noted_in(context) | {name})


def _noted_in(context: Any) -> frozenset[str]:
    return getattr(context, _NOTED, frozenset())


def _patch(defects: Sequence[Defect]) -> None:
    with _patching:
        for defect in defects:
            defect.patch()


def is_active(name: str) -> bool:
    """Whether the repair *name* is active in the current context."""
    scope = _scope.get()
    return scope is not None and name in scope.names


def report(name: str) -> None:
    """Report that without the repair *name*, torch would have failed or given another result."""
    scope = _scope.get()
    assert scope is not None, "a repair reports from inside its scope"
    if name in scope.reported:
        scope.report(name)


def report_if(name: str, mattered: Callable[[], bool]) -> None:
    """Call *mattered* at the end of the scope, when the graph is compiled, and report *name* if it returns True."""
    scope = _scope.get()
    assert scope is not None, "a repair reports from inside its scope"
    scope.questions.append((name, mattered))
