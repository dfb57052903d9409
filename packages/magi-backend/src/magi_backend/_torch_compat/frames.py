# SPDX-License-Identifier: Apache-2.0
"""What Dynamo knows of the function that it captures: its name, recompilations, graph breaks and times."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch._guards import CompileContext


@dataclass(frozen=True)
class CapturedFrame:
    """The function whose graph is being compiled.

    Attributes:
        compile_id: Dynamo's number of it, such as ``0/1``: the second capture of the first function; or empty.
        function: Its qualified name, or empty.
        place: ``model.py:12``, with the whole path, or empty.
        recompiled: Why each existing graph could not be used, in Dynamo's words, the latest graph first.
    """

    compile_id: str
    function: str
    place: str
    recompiled: tuple[str, ...]


def captured_frame() -> CapturedFrame:
    """The function that is captured on this thread now; all fields are empty outside of a compilation."""
    number, compiling = CompileContext.current_compile_id(), _compiling()
    function, place = _function(compiling) or ("", "")
    reasons = compiling.get("reasons") or ()
    return CapturedFrame("" if number is None else str(number), function, place, tuple(map(str, reasons)))


def is_resumed() -> bool:
    """Whether the function that is captured on this thread is the rest of one, after a graph break (2.10 to 2.15)."""
    return getattr(_compiling().get("code"), "co_name", "").startswith("torch_dynamo_resume_in_")


def _compiling() -> Mapping[str, Any]:
    """The locals of Dynamo's ``_compile`` on this thread, or nothing.

    They are the only place that has the function for a backend, and why each existing graph of it could not be used
    (``reasons``, 2.10 to 2.15; torch's metrics keep the first).
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_globals.get("__name__") == "torch._dynamo.convert_frame":
            return frame.f_locals
        frame = frame.f_back
    return {}


def _function(compiling: Mapping[str, Any]) -> tuple[str, str] | None:
    """The qualified name and the place of the function that Dynamo compiles, or of what that wraps."""
    code: CodeType | None = compiling.get("code")
    if code is None:
        return None
    function = _wrapped(code, getattr(compiling.get("frame"), "f_locals", {}))
    inner = getattr(inspect.unwrap(function), "__code__", code) if function is not None else code
    return getattr(function, "__qualname__", code.co_qualname), f"{inner.co_filename}:{inner.co_firstlineno}"


def _wrapped(code: CodeType, values: Mapping[str, Any]) -> Any:
    """The function that a wrapper with *code* wraps; None if it is not a wrapper, or if that cannot be found."""
    takes_anything = code.co_flags & inspect.CO_VARARGS and code.co_flags & inspect.CO_VARKEYWORDS
    inside = [values[name] for name in code.co_freevars if callable(values.get(name))] if takes_anything else []
    if len(inside) == 1:
        return type(inside[0]).forward if isinstance(inside[0], torch.nn.Module) else inside[0]
    owner = values.get(code.co_varnames[0]) if code.co_argcount else None
    if isinstance(owner, torch.nn.Module) and getattr(type(owner).forward, "__code__", None) is code:
        return type(owner).forward
    return None


def stopped_by(gm: torch.fx.GraphModule) -> Any:
    """The graph break at which the capture of *gm* ended, with a ``reason`` and a ``user_stack``; or None.

    Dynamo leaves it on the graph that it gives to a backend (2.10 to 2.15).
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason if getattr(reason, "graph_break", False) else None


def capture_seconds() -> float:
    """Seconds since Dynamo began to trace the function whose graph is compiled now; 0.0 outside of a compilation.

    ``MetricsContext`` notes the time when a compilation starts, for torch's own metrics (2.10 to 2.15).
    """
    context = torch._dynamo.utils.get_metrics_context()
    began: int = getattr(context, "_start_time_ns", 0)
    return (time.time_ns() - began) / 1e9 if began and context.in_progress() else 0.0


def graph_breaks() -> Sequence[Any]:
    """Where and why Dynamo broke graphs in this process so far: each has a ``reason`` and a ``user_stack``."""
    return torch._dynamo.utils.graph_break_reasons


def captured_graphs() -> int:
    """The number of graphs that Dynamo has captured in this process, for any backend."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@dataclass(frozen=True)
class FrameEnd:
    """What Dynamo counted while it compiled one function."""

    seconds: float
    """From the start of its capture until its guards were built."""
    calls: int
    """Operator calls that it captured; 0 if it failed before it had a graph."""
    failure: str
    """The class and the message of the error that made it fail, or empty."""
    is_raised: bool
    """Whether the caller gets that error; otherwise the function runs in Python."""
    function: str
    place: str
    """Its file and first line."""


def when_frames_end(call: Callable[[FrameEnd], None]) -> None:
    """Make Dynamo call *call* on this thread whenever it has compiled a function, or has failed to.

    Dynamo has callbacks for the end of a compilation, but does not tell them which one it was. Its metrics have that;
    they are passed on when the context of a thread is left (``MetricsContext.__exit__``, 2.10 to 2.15). A second call
    on the same thread does nothing.
    """
    context = torch._dynamo.utils.get_metrics_context()
    hand_over = context._on_exit
    if isinstance(hand_over, _AndTell):
        hand_over.call = call
    else:
        context._on_exit = _AndTell(hand_over, call)


@dataclass
class _AndTell:
    hand_over: Callable[..., None]
    call: Callable[[FrameEnd], None]

    def __call__(self, start: int, end: int, metrics: dict[str, Any], *error: Any) -> None:
        self.hand_over(start, end, metrics, *error)
        compiling = _compiling()
        named = _function(compiling)
        if named is None:
            return  # a backward, or something at run time
        kind, reason = metrics.get("fail_type"), metrics.get("fail_reason")
        if any(error):
            kind, reason = error[0].__name__, error[1]
        failure, calls = f"{kind}: {reason}" if kind else "", int(metrics.get("graph_op_count") or 0)
        self.call(FrameEnd((end - start) / 1e9, calls, failure, _is_raised(compiling, error[0]), *named))


def _is_raised(compiling: Mapping[str, Any], kind: type[BaseException] | None) -> bool:
    """Whether Dynamo passes an error of the class *kind* on, as ``ConvertFrame.__call__`` decides (2.10 to 2.15)."""
    config, exc = torch._dynamo.config, torch._dynamo.exc
    is_strict = compiling.get("one_graph") or getattr(compiling.get("convert_frame_box"), "error_on_graph_break", False)
    is_soft = config.suppress_errors or issubclass(kind or Exception, exc.Unsupported | exc.UserError)
    return kind is not None and bool(is_strict or not is_soft)


_PHASES = {
    "graph passes": ("_recursive_post_grad_passes", ()),
    "lowering": ("GraphLowering.run", ()),
    "scheduling and fusion": ("Scheduler.__init__", ()),
    "code generation": ("GraphLowering.codegen", ("Scheduler.__init__",)),
    "compiling kernels": ("PyCodeCache.load_by_key_path", ()),
}
"""The parts of Inductor's work on one graph: torch's name for each, and the parts inside it that are listed
separately."""


def phase_seconds() -> dict[str, float]:
    """Seconds that Inductor spent in each part in this process so far, which torch measures for its own metrics."""

    def total(name: str) -> float:
        return sum(torch._dynamo.utils.compilation_time_metrics.get(name, ()))

    return {phase: total(name) - sum(map(total, inner)) for phase, (name, inner) in _PHASES.items()}
