# SPDX-License-Identifier: Apache-2.0
"""One thread that makes code, while the calls go on with the code for any size, or with eager.

A thread, because a compilation uses what only this process has: its operators, their Python functions, the user's
passes. It takes turns with the other threads for Python's lock, so a call may take some milliseconds longer. It has
their priority: if it had a lower one, they would wait for a lock whose owner does not run.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import functools
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from magi_backend._torch_compat import distributed, state, tuning
from magi_backend._torch_compat.compiling import owner_of, replace

from .ranks import rounds


logger = logging.getLogger("magi_backend")

_SWITCH_INTERVAL = 5e-5
"""After how many seconds another thread that waits for Python's lock gets it, while code is made.

While a decoder of 29.1 ms on a GPU got code, the median of its calls was 51 ms with 5e-4, and 30.9 ms with this, where
the code took 22 s for 17 (one H100, torch 2.11). With a microsecond four threads stood still (Python 3.11): each was
asked for the lock again before it had done anything.
"""

_NEVER = 2**30
_SECONDS_TO_COLLECT = 60.0
"""For how long nothing must have been made before all objects are collected again."""

_QUIET = 1.0
"""For how many seconds no function must have been captured before the thread compiles: that keeps captures waiting."""

_SECONDS_TO_STOP = 60
"""How long the end of the process waits for the thread, which may wait for a compiler of C++."""


def _ask_no_rank(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Ask the other ranks nothing on the thread: they do not compile now, and may never."""
    if not state.is_beside_others.get():
        return original(*args, **kwargs)
    msg = (
        f"an option makes the compiler wait for the other ranks, in torch.distributed.{original.__name__}, which they "
        "do not come to while code is made beside the calls. Switch it off, for example _sync_decision_cross_ranks"
    )
    raise RuntimeError(msg)


def _preserve_rng_state(original: Callable[[], Any]) -> Any:
    """Set no random numbers back on the thread: other threads would draw theirs twice."""
    return contextlib.nullcontext() if state.is_beside_others.get() else original()


class _FullCollections:
    """Garbage collections of all objects, each of which stops every thread: 0.3 s with torch loaded, and seconds later.

    None happens while code is made, nor for a while after that. Younger objects are collected as always, so what a
    compilation leaves in old cycles until then is some hundred thousand small objects.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threshold: int | None = None
        self._timer: threading.Timer | None = None

    def stop(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            first, second, third = gc.get_threshold()
            if third != _NEVER:
                self._threshold = third
                gc.set_threshold(first, second, _NEVER)

    def resume_later(self) -> None:
        with self._lock:
            self._timer = threading.Timer(_SECONDS_TO_COLLECT, self.resume)
            self._timer.daemon = True
            self._timer.start()

    def resume(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            first, second, third = gc.get_threshold()
            if third == _NEVER and self._threshold is not None:
                gc.set_threshold(first, second, self._threshold)

    def forget(self) -> None:
        """In the child of a fork, which has no timer, and must not wait for the lock."""
        self._lock, self._timer = threading.Lock(), None
        self.resume()


full_collections = _FullCollections()


@contextlib.contextmanager
def _giving_way() -> Iterator[None]:
    """A context in which this thread keeps the others waiting for short times only.

    A call takes Python's lock again after each operator, and waits a switch interval for it, 5 ms by default.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(interval, _SWITCH_INTERVAL))
    full_collections.stop()
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        full_collections.resume_later()


class _Stopped(SystemExit):
    """Ends the thread with the process."""


class _Jobs:
    """What the thread has to do, in order; each key once. The thread ends with the last one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._quiet_from = 0.0
        self._thread: threading.Thread | None = None

    def add(self, key: Hashable, job: Callable[[], None]) -> None:
        """Do *job* later, unless one of this *key* waits.

        It has the context variables and the device of the caller, and Dynamo's lock.
        """
        with self._changed:
            if key in self._waiting:
                return
            device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
            self._waiting[key] = functools.partial(contextvars.copy_context().run, _on_device, device, job)
            if self._thread is None:
                # What Inductor does at the end, such as closing its pool of processes, then comes after this.
                atexit.unregister(self.stop)
                atexit.register(self.stop)
                self._thread = threading.Thread(target=self._work, name="magi hot sizes", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        for module in state.setters_of_random_numbers():
            replace(module, "preserve_rng_state", None, _preserve_rng_state)
        for name in distributed.WAITS_FOR_RANKS if distributed.ranks() > 1 else ():
            replace(torch.distributed, name, None, _ask_no_rank)
        replace(*owner_of(tuning.PRECOMPILE), None, tuning.precompile)
        with contextlib.suppress(_Stopped):
            while True:
                with _giving_way():
                    self._do_waiting()
                with self._changed:
                    if not self._waiting:
                        self._thread = None
                        self._changed.notify_all()
                        return

    def _do_waiting(self) -> None:
        while True:
            with self._changed:
                while self._waiting and (left := self._quiet_from - time.monotonic()) > 0:
                    self._changed.wait(left)
            with state.compile_lock():
                with self._changed:
                    if not self._waiting:
                        return
                    if self._quiet_from > time.monotonic():
                        continue  # a capture had the lock
                    key, job = next(iter(self._waiting.items()))
                try:
                    job()
                except Exception:
                    logger.exception("the thread that makes code beside the calls goes on after an error")
                finally:
                    with self._changed:
                        self._waiting.pop(key, None)

    def let_captures_pass(self) -> None:
        """Start no job for a while, because a function was captured, and what it calls may be next."""
        with self._changed:
            self._quiet_from = time.monotonic() + _QUIET

    def wait(self, seconds: float | None) -> bool:
        with self._changed:
            self._quiet_from = 0.0
            self._changed.notify_all()
            is_done = self._changed.wait_for(lambda: self._thread is None, seconds)
        if is_done:
            full_collections.resume()
        return is_done

    def stop(self) -> None:
        """End the thread, in the middle of a compilation too."""
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is None:
            return
        # One that strikes in the callback of a weak reference is printed by Python, and lost.
        shown = sys.unraisablehook
        sys.unraisablehook = lambda lost: None if lost.exc_type is _Stopped else shown(lost)
        for _ in range(_SECONDS_TO_STOP):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stopped))
            thread.join(1.0)
            if not thread.is_alive():
                break
        sys.unraisablehook = shown

    def forget(self) -> None:
        """In the child of a fork, which has no such thread, and must not wait for the lock that it held."""
        if self._thread is not None:
            lock = state.compile_lock()
            if not lock._is_owned():  # noqa: SLF001 - as the standard library does with its locks
                lock._at_fork_reinit()  # noqa: SLF001
        full_collections.forget()
        self.__init__()  # type: ignore[misc]


def _on_device(device: int | None, job: Callable[[], None]) -> None:
    with torch.accelerator.device_index(device):
        job()


jobs = _Jobs()
os.register_at_fork(after_in_child=jobs.forget)


def wait(seconds: float | None = None) -> bool:
    """Wait until nothing is left that gets code in the background.

    That are sizes, with ``magi.hot_in_background`` or several ranks, and first calls, with ``magi.first_call="eager"``.
    For benchmarks, tests and warm-ups. Code that is made is found by the next call, or by a later one if all ranks must
    find it in the same call.

    Args:
        seconds: How long at most; None is for ever.

    Returns:
        Whether none is left.

    Example:
        >>> wait(seconds=1.0)
        True
    """
    end = None if seconds is None else time.monotonic() + seconds
    return jobs.wait(seconds) and rounds.wait(None if end is None else end - time.monotonic())
