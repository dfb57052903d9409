# SPDX-License-Identifier: Apache-2.0
"""Capture of launches: every launch inside the scope is recorded, and traced if a trace is in progress.

Around a function, that makes all of its launches behave as if wrapped by hand, or as if none were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from magi_tritonwrap._kernel.kernels import Kernel, as_kernel
from magi_tritonwrap._torch_compat.kernels import described_tensor
from magi_tritonwrap._torch_compat.tracing import tracing_is_active, wrap_triton_disabled

from .hook import Listener, Run, current_listener, launch_site, listening, not_listening
from .normalise import emit, resolve, unsupported


P = ParamSpec("P")
R = TypeVar("R")


def wrap_kernels(fn: Callable[P, R]) -> Callable[P, R]:
    """Return *fn* with every launch made traceable, also those in the functions that it calls.

    Under `make_fx`, non-strict export or AOTAutograd each launch becomes a node. Outside a trace every launch is bare,
    and code that Dynamo traces by itself is left to it. Nothing of *fn* is changed, neither its
    globals nor its closure nor the kernels, and wrapping twice is wrapping once.

    Example:
        >>> def double(x): return x * 2
        >>> wrap_kernels(wrap_kernels(double)) is not double
        True
    """

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return fn(*args, **kwargs)
        with capture_launches() if tracing_is_active(tree_leaves((args, kwargs))) else wrap_triton_disabled():
            return fn(*args, **kwargs)

    return wrapped


def launch_directly(fn: Callable[P, R]) -> Callable[P, R]:
    """Return *fn* with launches that are wrapped by hand made bare, for eager calls on real tensors.

    A wrapped launch passes through a higher-order op, which takes a millisecond in eager (torch 2.13). An op whose body
    was written for `torch.library.triton_op` should register this as its implementation; `find_kernels(fn).may_wrap`
    tells whether it makes a difference.

    Example:
        >>> def double(x): return x * 2
        >>> launch_directly(double)(3)
        6
    """

    @functools.wraps(fn)
    def direct(*args: P.args, **kwargs: P.kwargs) -> R:
        with wrap_triton_disabled():
            return fn(*args, **kwargs)

    return direct


@dataclass(frozen=True)
class CapturedLaunch:
    """One launch that happened inside a scope: the kernel, and the line of user code that launched it."""

    kernel: Kernel
    file: str
    line: int

    @property
    def name(self) -> str:
        """Qualified name of the kernel."""
        return self.kernel.name


class _NotCompiled:
    """What `kernel.warmup(...)` returns in a trace, which leaves it out: nothing can be asked of it."""

    def __init__(self, kernel: Kernel) -> None:
        why = "is compiled by .warmup() in the op's body, and a graph has no compiled kernel to look at. "
        fix = "Launch the kernel itself, and choose its grid from torch.cuda.get_device_properties()"
        self.__dict__["error"] = unsupported(kernel, why + fix)

    def __getattr__(self, name: str) -> Any:
        raise self.__dict__["error"]

    def __getitem__(self, grid: object) -> Any:
        raise self.__dict__["error"]


@dataclass
class LaunchLog:
    """The launches of one scope, in order."""

    drop: bool
    around: Listener | None = None
    """The scope around this one, which gets each launch that is not dropped here."""
    launches: list[CapturedLaunch] = field(default_factory=list)

    def on_launch(self, kernel: Any, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a launch; then drop it, trace it or run it. Returns what the launch returns, None if it is dropped."""
        described = as_kernel(kernel)
        if not kwargs.get("warmup"):
            self.launches.append(CapturedLaunch(described, *launch_site()))
        if self.around is not None and not self.drop:
            return self.around(kernel, run, args, kwargs)
        traces = tracing_is_active(map(described_tensor, (*args, *kwargs.values())))
        if kwargs.get("warmup") and (self.drop or traces):
            return _NotCompiled(described)
        if self.drop:
            return None
        if traces and not described.is_interpreted:
            emit(resolve(kernel, args, kwargs))
            return None
        with not_listening():
            return run(kernel, *args, **kwargs)


@contextmanager
def capture_launches(*, drop: bool = False) -> Iterator[LaunchLog]:
    """Capture every Triton launch of this thread, however its kernel was found.

    Under `make_fx`, AOTAutograd or a fake tensor mode a launch becomes a `triton_kernel_wrapper_mutation` node, as if
    its author had written `wrap_triton`; a launch that is already wrapped becomes one node, not two. Outside a trace
    the kernel is launched as usual. Scopes nest: a launch is recorded by each, up to one that drops it.

    Args:
        drop: record launches without carrying them out. A body whose only effect is launches then runs on fake tensors,
            with or without a GPU driver, and under TRITON_INTERPRET=1.

    Yields:
        LaunchLog: `.launches` grows as the body runs; each has `.kernel`, `.name`, `.file` and `.line`.

    Raises:
        UnsupportedKernelError: from a traced launch, for a decoration that torch cannot reproduce.
        UnsupportedLaunchError: from a traced launch, for an argument or option that a graph cannot carry.
    """
    log = LaunchLog(drop, current_listener())
    with listening(log.on_launch):
        yield log
