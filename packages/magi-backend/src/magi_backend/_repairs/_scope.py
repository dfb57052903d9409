# SPDX-License-Identifier: Apache-2.0
"""Where repairs are active: in a context of one thread, outside of which torch is unchanged."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ._defect import Defect


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
    token = _scope.set(scope)
    try:
        yield
        for name, mattered in scope.questions:
            if name in reported and mattered():
                report(name)
    finally:
        _scope.reset(token)


def repair_capture() -> None:
    """Install the repairs of what Dynamo does before it calls a backend; they check the backend themselves."""
    from magi_backend._torch_compat.compiling import torch_release

    from ._listing import active_defects

    _patch([defect for defect in active_defects(torch_release()) if defect.is_in_capture])


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


def replace(owner: Any, attribute: str, make: Callable[[Any], Any]) -> None:
    """Replace *attribute* of a class or module by ``make(original)``, once, if there is such an attribute.

    Several repairs may replace the same function; each calls the one before it.
    """
    found = inspect.getattr_static(owner, attribute, None)
    original = found.__func__ if isinstance(found, staticmethod) else found
    repair = (make.__module__, make.__qualname__)
    if original is None or repair in _repairs_of(original):
        return
    function: Any = functools.wraps(original)(make(original))
    function._magi_original, function._magi_repair = original, repair
    setattr(owner, attribute, staticmethod(function) if isinstance(found, staticmethod) else function)


def _repairs_of(function: Any) -> Iterator[tuple[str, str]]:
    while hasattr(function, "_magi_original"):
        yield function._magi_repair
        function = function._magi_original
