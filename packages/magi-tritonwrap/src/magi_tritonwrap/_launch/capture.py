# SPDX-License-Identifier: Apache-2.0
"""Capture of launches: every launch inside the scope is recorded, and traced if a trace is in progress."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from magi_tritonwrap._kernel.kernels import Kernel, as_kernel
from magi_tritonwrap._torch_compat.launches import described_tensor
from magi_tritonwrap._torch_compat.tracing import tracing_is_active

from .hook import Run, launch_site, listening, not_listening
from .normalise import emit, resolve


if TYPE_CHECKING:
    from collections.abc import Iterator


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


@dataclass
class LaunchLog:
    """The launches of one scope, in order."""

    drop: bool
    launches: list[CapturedLaunch] = field(default_factory=list)

    def on_launch(self, kernel: Any, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a launch; then drop it, trace it or run it. Returns what the launch returns, None if it is dropped."""
        if kwargs.get("warmup") and not self.drop:
            with not_listening():
                return run(kernel, *args, **kwargs)
        described = as_kernel(kernel)
        self.launches.append(CapturedLaunch(described, *launch_site()))
        if self.drop:
            return None
        if tracing_is_active(map(described_tensor, (*args, *kwargs.values()))) and not described.is_interpreted:
            emit(resolve(kernel, args, kwargs))
            return None
        with not_listening():
            return run(kernel, *args, **kwargs)


@contextmanager
def capture_launches(*, drop: bool = False) -> Iterator[LaunchLog]:
    """Capture every Triton launch of this thread, however its kernel was found.

    Under `make_fx`, AOTAutograd or a fake tensor mode a launch becomes a `triton_kernel_wrapper_mutation` node, as if
    its author had written `wrap_triton`; a launch that is already wrapped becomes one node, not two. Outside a trace
    the kernel is launched as usual. Scopes nest: the innermost one records.

    Args:
        drop: record launches without carrying them out. A body whose only effect is launches then runs on fake tensors,
            with or without a GPU driver, and under TRITON_INTERPRET=1.

    Yields:
        LaunchLog: `.launches` grows as the body runs; each has `.kernel`, `.name`, `.file` and `.line`.

    Raises:
        UnsupportedKernelError: from a traced launch, for a decoration that torch cannot reproduce.
        UnsupportedLaunchError: from a traced launch, for an argument or option that a graph cannot carry.
    """
    log = LaunchLog(drop)
    with listening(log):
        yield log
