# SPDX-License-Identifier: Apache-2.0
"""What was found out about a function's kernels: at decoration from its names, at compilation from its launches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FoundKernel:
    """A kernel that the code of a function leads to.

    Attributes:
        kernel: the kernel object; None if it exists only after a function has run that names `triton.jit`.
        name: qualified name of the kernel's function.
        how: how the code reaches it, for example `global 'norm_kernel' read by mylib.ops.norm`.
        file: file that defines the kernel.
        line: line of the kernel's first decorator.
        launches: `(file, line)` of each launch, as far as compilations have met it.
        is_named: whether functions name it, from the body on; otherwise a table, a class or an object holds it, and
            which of the kernels there are launched shows when the op is compiled.
    """

    kernel: Any
    name: str
    how: str
    file: str
    line: int
    launches: tuple[tuple[str, int], ...] = ()
    is_named: bool = True

    def __str__(self) -> str:
        return f"{self.name} ({self.file}:{self.line}), {self.how}"


@dataclass(frozen=True)
class UnresolvedLaunch:
    """A call of which only a run can tell whether it launches a kernel, and which.

    Attributes:
        text: what is called, as far as names tell.
        reason: why it could not be resolved.
        file: file of the call.
        line: its line.
        is_launch: whether it is written as a launch, so that only its kernel is unknown; otherwise it is a call that
            may launch something.
    """

    text: str
    reason: str
    file: str
    line: int
    is_launch: bool = True

    def __str__(self) -> str:
        return f"{self.text} ({self.file}:{self.line}): {self.reason}"


@dataclass(frozen=True)
class InnerOp:
    """An operator of another library that a body calls.

    Attributes:
        op: `namespace::name`.
        opaque_because: why it is opaque in a compiled graph; empty if the graph sees its launches.
        how: how the code reaches it.
    """

    op: str
    opaque_because: str
    how: str

    def __str__(self) -> str:
        state = f"opaque, {self.opaque_because}" if self.opaque_because else "seen through here"
        return f"{self.op}, {self.how}: {state}"


@dataclass(frozen=True)
class KernelReport:
    """Kernels that the code of a function leads to.

    Attributes:
        kernels: one entry for each kernel.
        inner_ops: operators of other libraries that the function calls and that may launch kernels.
        unresolved: if no kernel was found, launches whose kernel is known only at run time, and calls of what does not
            exist yet.
        doubtful: if no kernel was found, other calls of which only a run can tell what they run.
        effects: if no kernel was found, calls that do I/O or communicate with other ranks, and where. A body with one
            is not run to see what it launches.
        wraps: whether the code names `wrap_triton`.
        tells_fake: whether the code names what asks for fake tensors, on which it may launch nothing.
    """

    kernels: tuple[FoundKernel, ...]
    unresolved: tuple[UnresolvedLaunch, ...]
    inner_ops: tuple[InnerOp, ...] = ()
    doubtful: tuple[UnresolvedLaunch, ...] = ()
    effects: tuple[str, ...] = ()
    wraps: bool = False
    tells_fake: bool = False

    @property
    def only_a_run_tells(self) -> bool:
        """Whether the function may launch something although no launch was found: not every call was followed."""
        launches = self.kernels or any(launch.is_launch for launch in self.unresolved)
        return not launches and bool(self.unresolved or self.doubtful)

    @property
    def may_launch(self) -> bool:
        """Whether there is anything to see through: a kernel, or a launch that could not be resolved."""
        return bool(self.kernels or self.unresolved)

    @property
    def may_wrap(self) -> bool:
        """Whether a launch is, or may be, wrapped by hand: eager calls of such a body should use `launch_directly`."""
        return self.wraps or bool(self.unresolved)

    def __str__(self) -> str:
        lines = [f"kernel      {kernel}" for kernel in self.kernels]
        lines += [f"unresolved  {launch}" for launch in self.unresolved]
        lines += [f"inner op    {op}" for op in self.inner_ops]
        return "\n".join(lines) if lines else "no Triton launch"


@dataclass(frozen=True)
class OpReport:
    """How the compiler sees one operator.

    Attributes:
        op: `namespace::name`.
        see_through: whether AOTAutograd replaces the op by the launches in its body.
        reason: why not, or an empty string.
        kernels: kernels that the code leads to, then those first seen at a compilation (`how` says so).
        unresolved: launches that only a compilation can resolve; empty once one has.
        cache: `keyed`; `bypassed: ` with the value that has no stable form; or `not stored: ` with a kernel that the
            key does not cover. The first compilation fills it in.
        fallbacks: why the op stayed opaque in single compilations.
        inner_ops: operators of other libraries that the body calls, which are seen through there or opaque.
    """

    op: str
    see_through: bool
    reason: str
    kernels: tuple[FoundKernel, ...]
    unresolved: tuple[UnresolvedLaunch, ...]
    cache: str
    fallbacks: tuple[str, ...] = field(default=())
    inner_ops: tuple[InnerOp, ...] = ()

    def __str__(self) -> str:
        count = len(self.kernels)
        state = f"sees through {count} Triton kernel{'' if count == 1 else 's'}" if self.see_through else "opaque"
        lines = [f"{self.op}: {state}" + (f", {self.reason}" if self.reason else "")]
        lines += [f"  kernel      {kernel}" for kernel in self.kernels]
        lines += [f"  unresolved  {launch}" for launch in self.unresolved]
        lines += [f"  inner op    {op}" for op in self.inner_ops]
        lines += [f"  fall-back   {fallback}" for fallback in self.fallbacks]
        lines += [f"  cache       {self.cache}"]
        return "\n".join(lines)
