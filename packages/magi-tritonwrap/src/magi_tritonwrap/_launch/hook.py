# SPDX-License-Identifier: Apache-2.0
"""The one place that every Triton launch passes through, and the scope that listens there.

`kernel[grid](...)`, `kernel.run(..., grid=grid)`, a helper three modules away: each ends in the `run` method of one of
three classes. So `run` is wrapped, rather than the names by which user code reaches a kernel: no module, closure or
kernel object is ever changed, and launches that cannot be found by reading source are caught too. The wrapper is in
place only while some thread has a scope open, which is while an op is traced; at any other time a launch costs nothing
more. Threads without a scope go on to the original method.

`Heuristics.run` stays as it is: it computes its values and calls `run` of what it decorates, which is a hooked class.
While a scope is open, a library's own launcher (`@libentry`) is skipped and its kernel is launched directly. A subclass
of Triton's autotuner is launched as an autotuner.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from magi_tritonwrap._kernel.kernels import classes_with_own_run, is_launcher_class, kernel_behind
from magi_tritonwrap._torch_compat.kernels import calling_frame, described_tensor, interpreted_classes
from magi_tritonwrap._torch_compat.tracing import is_fake, wrap_triton_disabled


_FOLDERS = tuple(f"{Path(file).parent}/" for file in (torch.__file__, triton.__file__, Path(__file__).parent))
T = TypeVar("T")
Run = Callable[..., Any]
Listener = Callable[[Any, Run, tuple[Any, ...], dict[str, Any]], Any]
"""What a scope does with a launch: it gets the kernel, the original method `run`, unbound, and its arguments."""
_LISTENER: contextvars.ContextVar[Listener | None] = contextvars.ContextVar("magi_tritonwrap_listener", default=None)
_LOCK = threading.Lock()
STRAYS: list[tuple[str, int]] = []
"""Where tensors of a trace were launched on that no scope listened to: by a thread that a body started."""
_MARK = "_magi_tritonwrap_hooked"
_open_scopes = 0


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Send every launch of this thread to *listener*; scopes nest, and the innermost one listens.

    Kernels that the user has wrapped launch the bare kernel meanwhile, so that a wrapped launch arrives here exactly
    once too.
    """
    global _open_scopes  # noqa: PLW0603 - the classes are process-wide, and so is the count
    with _LOCK:
        _open_scopes += 1
        for cls in _hooked_classes():
            run = cls.__dict__["run"]
            if not hasattr(run, _MARK):
                cls.run = _hooked(run, is_launcher_class(cls))
    try:
        with holding(_LISTENER, listener), wrap_triton_disabled():
            yield
    finally:
        with _LOCK:
            _open_scopes -= 1
            for cls in () if _open_scopes else _hooked_classes():
                hook = getattr(cls.__dict__["run"], _MARK, None)
                # Otherwise someone else has wrapped the hook since, and what they wrap must stay.
                if hook is not None and hook is cls.__dict__["run"]:
                    cls.run = hook.__wrapped__


def current_listener() -> Listener | None:
    """What listens to the launches of this thread, if a scope is open."""
    return _LISTENER.get()


def not_listening() -> AbstractContextManager[None]:
    """Let launches of this thread pass without a listener, for example those that a listener makes itself."""
    return holding(_LISTENER, None)


@contextmanager
def holding(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """A context in which *variable* has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _hooked_classes() -> tuple[type[Any], ...]:
    """The classes whose `run` a launch ends in (Triton 3.2 on: `kernel[grid](...)` calls `self.run`), and launchers."""
    return (JITFunction, Autotuner, *interpreted_classes(), *classes_with_own_run())


def _hooked(run: Run, is_launcher: bool) -> Run:
    @functools.wraps(run)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        listener = _LISTENER.get()
        if listener is None:
            if any(map(is_fake, map(described_tensor, args))):
                STRAYS.append(launch_site())
            return run(self, *args, **kwargs)
        if not is_launcher:
            return listener(self, run, args, kwargs)
        inner = kernel_behind(self)
        return run(self, *args, **kwargs) if inner is None else inner.run(*args, **kwargs)

    setattr(hooked, _MARK, hooked)
    return hooked


def launch_site() -> tuple[str, int]:
    """The file and line of the innermost frame that does not belong to Triton, torch or this project."""
    frame = calling_frame()
    while frame.f_back is not None and in_library_folder(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def in_library_folder(file: str) -> bool:
    """Whether a source file is torch's, Triton's or ours, and so not a place to report to a user."""
    return file.startswith(_FOLDERS)
