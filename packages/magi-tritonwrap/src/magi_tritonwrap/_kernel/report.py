# SPDX-License-Identifier: Apache-2.0
"""What was found out about a function's kernels: at decoration from its source, at compilation from its launches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FoundKernel:
    """A kernel that a function can launch.

    Attributes:
        kernel: the kernel object; None if it exists only after a factory in the body has run.
        name: qualified name of the kernel's function.
        how: how the function reaches it, for example `global 'TABLE'['norm']`.
        file: file that defines the kernel.
        line: line of the kernel's first decorator.
        launches: `(file, line)` of each launch found.
        wrapped_launches: those of them that go through `wrap_triton`.
    """

    kernel: Any
    name: str
    how: str
    file: str
    line: int
    launches: tuple[tuple[str, int], ...] = ()
    wrapped_launches: tuple[tuple[str, int], ...] = ()

    @property
    def wrapped(self) -> bool:
        """Whether every launch of it already goes through `wrap_triton`."""
        return bool(self.launches) and self.launches == self.wrapped_launches

    def __str__(self) -> str:
        wrapped = ", wrapped by hand" if self.wrapped else ""
        return f"{self.name} ({self.file}:{self.line}), {self.how}{wrapped}"


@dataclass(frozen=True)
class UnresolvedLaunch:
    """A launch whose kernel cannot be read from the source; it is captured when the op is first compiled.

    Attributes:
        text: the source of the launch or call.
        reason: why it could not be resolved.
        file: file of the launch.
        line: its line.
        in_key: whether the cache key covers the kernel, because it can be reached from the code; an object that is
            reached only through the op's arguments cannot.
        is_launch: whether it is written as a launch, so that only its kernel is unknown; otherwise it is a call that
            may launch something.
    """

    text: str
    reason: str
    file: str
    line: int
    in_key: bool = True
    is_launch: bool = True

    def __str__(self) -> str:
        return f"{self.text} ({self.file}:{self.line}): {self.reason}"


@dataclass(frozen=True)
class UnsupportedLaunch:
    """A launch of a known kernel that no compiled graph can carry as it is written.

    Attributes:
        kernel: qualified name of the kernel.
        reason: what the launch does, and the fix.
        file: file of the launch.
        line: its line.
    """

    kernel: str
    reason: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"Triton kernel '{self.kernel}' {self.reason} ({self.file}:{self.line})"


@dataclass(frozen=True)
class InnerOp:
    """An operator of another library that a body calls.

    Attributes:
        op: `namespace::name`.
        opaque_because: why it is opaque in a compiled graph; empty if the graph sees its launches.
        file: file of the call.
        line: its line.
    """

    op: str
    opaque_because: str
    file: str
    line: int

    def __str__(self) -> str:
        state = f"opaque, {self.opaque_because}" if self.opaque_because else "seen through here"
        return f"{self.op} ({self.file}:{self.line}): {state}"


@dataclass(frozen=True)
class SideEffect:
    """A call that does more than compute. A body with such a call is not run to see what it launches.

    Attributes:
        text: the source of the call.
        what: what it does.
        file: file of the call.
        line: its line.
    """

    text: str
    what: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.text}(...) {self.what} ({self.file}:{self.line})"


@dataclass(frozen=True)
class KernelReport:
    """Kernels that a function can launch, as far as its source tells.

    Attributes:
        kernels: one entry for each kernel, in the order of their first launch.
        unresolved: launches whose kernel is known only at run time.
        unsupported: launches that `make_see_through` refuses.
        inner_ops: operators of other libraries that the function calls and that may launch kernels.
        doubtful: calls that were not followed, because what they call is known only at run time.
        effects: calls that do I/O or communicate with other ranks.
    """

    kernels: tuple[FoundKernel, ...]
    unresolved: tuple[UnresolvedLaunch, ...]
    unsupported: tuple[UnsupportedLaunch, ...] = ()
    inner_ops: tuple[InnerOp, ...] = ()
    doubtful: tuple[UnresolvedLaunch, ...] = ()
    effects: tuple[SideEffect, ...] = ()

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
        return bool(self.unresolved) or any(kernel.wrapped_launches for kernel in self.kernels)

    def __str__(self) -> str:
        lines = [f"kernel      {kernel}" for kernel in self.kernels]
        lines += [f"unresolved  {launch}" for launch in self.unresolved]
        lines += [f"unsupported {launch}" for launch in self.unsupported]
        lines += [f"inner op    {op}" for op in self.inner_ops]
        return "\n".join(lines) if lines else "no Triton launch"


@dataclass(frozen=True)
class OpReport:
    """How the compiler sees one operator.

    Attributes:
        op: `namespace::name`.
        see_through: whether AOTAutograd replaces the op by the launches in its body.
        reason: why not, or an empty string.
        kernels: kernels found in the source, then those first seen at a compilation (`how` says so).
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
