# SPDX-License-Identifier: Apache-2.0
"""Replace an operator by its body when AOTAutograd traces it, so that Inductor sees the launches."""

from __future__ import annotations

import contextvars
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, Literal, overload

import torch
import triton
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from ._cache_key import CacheKeyEntry
from ._find import find_kernels
from ._kernel.bodies import SEEN_THROUGH, SEEN_THROUGH_INSIDE, Bodies, as_overload, why_not_a_body
from ._kernel.kernels import as_kernel, check_supported, is_kernel
from ._kernel.report import FoundKernel, KernelReport, OpReport
from ._launch.body_as_fake import fake_from_body
from ._launch.capture import CapturedLaunch, launch_directly
from ._launch.checks import check_driver, refuse_undeclared_writes, translate_cpu_errors
from ._launch.hook import holding
from ._launch.recording import Recording, recording_of
from ._torch_compat.kernels import calling_frame
from ._torch_compat.operators import (
    body_of_custom_op,
    custom_op_named,
    overload_of,
    set_cache_key_entries,
    set_decomposition_rule,
)
from ._torch_compat.tracing import decomposition_is_disabled, has_unrecognized_type
from .errors import (
    NoFakeError,
    NotAnOpError,
    OpaqueFallbackWarning,
    TritonWrapError,
    UnknownOpError,
    UnsupportedKernelError,
)


OnUnsupported = Literal["error", "opaque"]
"""What to do with an op whose kernels or launches cannot be carried by a graph."""
_RAISES = 'on_unsupported="error" raises instead.'
_INTERPRETED = "Triton runs its interpreter (TRITON_INTERPRET=1), so there is nothing to compile"


@dataclass
class _SeeThroughOp:
    """What is known about one operator; the trace adds to it."""

    op: OpOverload
    fn: Callable[..., Any]
    found: KernelReport
    opaque_because: str = ""
    on_unsupported: OnUnsupported | None = None
    captured: dict[tuple[str, int], dict[tuple[str, int], CapturedLaunch]] = field(default_factory=dict)
    """The launches that traces have met, by the places of their kernels and their own: factories make new kernels."""
    fallbacks: list[str] = field(default_factory=list)
    whole_inside: dict[str, str] = field(default_factory=dict)
    """Operators that the body calls and that could not be traced there, and why."""

    def __post_init__(self) -> None:
        self.bodies, self.key = Bodies(self.op), CacheKeyEntry(self.name, self.fn, self.found)

    @property
    def name(self) -> str:
        """Qualified name of the operator."""
        return str(self.op.name())

    def fall_back(self, reason: str, why: str = "", fix: str = "") -> None:
        """Remember that the op stays opaque in one graph, and warn the first time that this reason comes up."""
        with _LOCK:
            if reason in self.fallbacks:
                return
            self.fallbacks.append(reason)
        why = why or f"its body cannot be traced. {reason.rstrip('.')}"
        fix = fix or "If its outputs depend on data, give it a fake: infer_output_meta_fn, or register_fake."
        msg = f"{self.name} stays opaque to the compiler: {why}. "
        msg += f"Its results are right, but Inductor does not see its kernels. {fix}"
        warnings.warn(OpaqueFallbackWarning(msg), stacklevel=2)

    def report(self) -> OpReport:
        """The report at this moment; a later compilation may add to it."""
        sites = {place: dict(met) for place, met in list(self.captured.items())}
        known = [
            replace(kernel, launches=tuple(sites.pop((kernel.file, kernel.line), ()))) for kernel in self.found.kernels
        ]
        captured = [
            FoundKernel(launch.kernel.outermost, launch.name, "captured at compilation", *place, tuple(met))
            for place, met in sites.items()
            for launch in list(met.values())[:1]
        ]
        return OpReport(
            op=self.name,
            see_through=not self.opaque_because,
            reason=self.opaque_because,
            kernels=(*known, *captured),
            unresolved=() if self.captured else self.found.unresolved,
            cache=self.key.state,
            fallbacks=tuple(self.fallbacks),
            inner_ops=tuple(
                replace(inner, opaque_because=self.whole_inside.get(inner.op, inner.opaque_because))
                for inner in self.found.inner_ops
            ),
        )


_OPS: dict[str, _SeeThroughOp] = SEEN_THROUGH
_INNER_OPS: dict[str, _SeeThroughOp] = SEEN_THROUGH_INSIDE
_AROUND: contextvars.ContextVar[tuple[_SeeThroughOp, ...]] = contextvars.ContextVar("magi_tritonwrap_ops", default=())
"""The ops whose bodies are being traced: first the one that stands in the graph, whose cache key covers the others."""
_ON_UNSUPPORTED: contextvars.ContextVar[OnUnsupported] = contextvars.ContextVar("on_unsupported", default="opaque")
_LOCK = threading.Lock()


def make_see_through(
    op: OpOverload | CustomOpDef,
    fn: Callable[..., Any],
    *,
    kernels: KernelReport | Iterable[Any] | None = None,
    on_unsupported: OnUnsupported | None = None,
) -> OpReport:
    """Let AOTAutograd decompose *op* into the launches of *fn*; launches need no `wrap_triton`.

    Eager calls, `torch.export` and the registered fake are untouched. See-through holds for the device types whose body
    launches the kernels: with another body registered for "cpu" (`torch.library.register_kernel`, `Library.impl`), CPU
    tensors get that body. Under TRITON_INTERPRET=1 the op stays opaque. Calling this again replaces *fn*. An op that is
    registered again, as in a cell that runs twice, needs it again, and stays opaque with a warning until then.

    Args:
        op: a registered operator with a fake; its `CustomOpDef` will do.
        fn: the op's body, which takes the flat arguments that the schema names. Kernels that no name in its code leads
            to are captured when the op is compiled.
        kernels: an existing report of `find_kernels(fn)`, or all kernels that no name leads to. The cache key covers
            them, so that graphs with their launches are stored.
        on_unsupported: what to do if no graph can carry a kernel or a launch. `"opaque"` keeps the op opaque, with a
            warning; `"error"` raises. None means what `unsupported_launches` says, by default `"opaque"`.

    Returns:
        OpReport: what `see_through_report(op)` returns at this moment.

    Raises:
        NotAnOpError: *op* is not an operator, or *fn* cannot take what it passes, as far as its signature shows.
        UnsupportedKernelError: with `"error"`, a kernel that functions name is decorated in a way that torch cannot
            compile; it names the kernel, its file and line, and the fix.

    Example:
        >>> import torch
        >>> lib = torch.library.Library("doc_see_through", "FRAGMENT")
        >>> _ = lib.define("double(Tensor x) -> Tensor")
        >>> def double(x): return x * 2
        >>> _ = lib.impl("double", double, "CompositeExplicitAutograd")
        >>> make_see_through(torch.ops.doc_see_through.double.default, double).see_through
        True
    """
    overload = _as_overload(op)
    title = f"make_see_through({overload.name()})"
    if not callable(fn):
        raise NotAnOpError(f"{title}: fn is {fn!r}; pass the op's Python body.")
    why = why_not_a_body(overload, fn, calling_frame().f_locals)
    if why:
        name = getattr(fn, "__qualname__", type(fn).__name__)
        fix = "Pass a body that takes what the schema says; op_def(op).lowered_fn is that of an op of magi-opschema."
        raise NotAnOpError(f"{title}: '{name}' cannot be its body, because {why}. {fix}")
    return _define_see_through(overload, fn, kernels, on_unsupported)


def _define_see_through(
    overload: OpOverload,
    fn: Callable[..., Any],
    kernels: KernelReport | Iterable[Any] | None,
    on_unsupported: OnUnsupported | None,
) -> OpReport:
    """`make_see_through` for a function that is known to be the body of the operator."""
    found = kernels if isinstance(kernels, KernelReport) else find_kernels(fn, extra=kernels or ())
    refused = _why_refused(found, on_unsupported)
    made = [as_kernel(kernel.kernel) for kernel in found.kernels if kernel.kernel is not None]
    interpreted = bool(triton.knobs.runtime.interpret) or any(kernel.is_interpreted for kernel in made)
    record = _SeeThroughOp(overload, fn, found, _INTERPRETED if interpreted else refused, on_unsupported)
    if refused and not interpreted:
        record.fall_back(refused, refused.rstrip("."), _RAISES)
    with _LOCK:
        _OPS[record.name] = record
        if not record.opaque_because:
            set_cache_key_entries(overload, [record.key])
            set_decomposition_rule(overload, _decompose)
            for inner in found.inner_ops:
                if not inner.opaque_because:
                    _see_through_inside(inner.op)
    return record.report()


def _see_through_inside(name: str) -> None:
    """Let the bodies of other ops be traced through the `custom_op` *name*."""
    body, op = body_of_custom_op(name), custom_op_named(name)
    if body is None or (name in _INNER_OPS and _INNER_OPS[name].op is op):
        return
    _INNER_OPS[name] = _SeeThroughOp(op, body, find_kernels(body))
    set_decomposition_rule(op, _decompose)


def _why_refused(found: KernelReport, on_unsupported: OnUnsupported | None) -> str:
    """Why no graph can carry a kernel that functions name; empty if one can.

    Those that only a table, a class or an object holds may never be launched; traces look at them.

    Raises:
        UnsupportedKernelError: for the way a kernel is decorated, if errors are asked for.
    """
    try:
        for kernel in found.kernels:
            if kernel.kernel is not None and kernel.is_named:
                check_supported(as_kernel(kernel.kernel))
    except UnsupportedKernelError as error:
        if (on_unsupported or _ON_UNSUPPORTED.get()) == "error":
            raise
        return str(error)
    return ""


def unsupported_launches(on_unsupported: OnUnsupported) -> AbstractContextManager[None]:
    """Within this context, *on_unsupported* says what happens to kernels and launches that no graph can carry.

    It does for all ops what the argument of `make_see_through` does for one, which comes first.
    """
    return holding(_ON_UNSUPPORTED, on_unsupported)


def see_through_report(op: OpOverload | CustomOpDef | Callable[..., Any] | str) -> OpReport:
    """What is known about an operator that `make_see_through` or `triton_op` made: kernels, cache, fall-backs.

    Args:
        op: the operator, its qualified name, or what a decorator returned for it: a `CustomOpDef`, or a function with
            the operator as its `torch_op`.

    Raises:
        UnknownOpError: no such operator was made see-through.
    """
    name = op if isinstance(op, str) else _as_overload(op).name()
    if name not in _OPS:
        raise UnknownOpError(
            f"'{name}' was never given to make_see_through; it is opaque to the compiler. Give it to "
            "make_see_through(op, body), for an op of magi-opschema with op_def(op).lowered_fn as the body."
        )
    return _OPS[name].report()


def _decompose(mode: Any, op: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What AOTAutograd calls to decompose *op*; *mode* is its functional mode, which is not active at this moment."""
    around = _AROUND.get()
    record = _OPS.get(op.name()) or (_INNER_OPS.get(op.name()) if around else None)
    if record is None or record.opaque_because or decomposition_is_disabled():
        return mode.__torch_dispatch__(op, types, args, kwargs)
    if has_unrecognized_type(types):
        return NotImplemented
    if not record.bodies.are_of(op):
        reason = "it was registered again after make_see_through"
        record.fall_back(reason, reason, "Call make_see_through again, with its new body.")
        return mode.__torch_dispatch__(op, types, args, kwargs)
    if record.bodies.has_other_body(args, kwargs):
        return mode.__torch_dispatch__(op, types, args, kwargs)
    recording: Recording | str
    why = fix = ""
    may_stay_opaque = (record.on_unsupported or _ON_UNSUPPORTED.get()) == "opaque"
    try:
        recording = recording_of(record.fn, args, kwargs, may_stay_opaque, record.found.tells_fake)
    except TritonWrapError as error:
        if not may_stay_opaque or isinstance(error, NoFakeError):
            raise
        recording = str(error)
        why, fix = recording.rstrip("."), _RAISES
    if isinstance(recording, str):
        record.fall_back(recording, why, fix)
        if around:
            around[-1].whole_inside[record.name] = f"its body cannot be traced. {recording}"
        return mode.__torch_dispatch__(op, types, args, kwargs)
    traced = (*around, record)
    with holding(_AROUND, traced), refuse_undeclared_writes(op, args, kwargs), mode:
        result, launches = translate_cpu_errors(recording.replay, record.name)(record.fn, args, kwargs)
    traced[0].key.check(launch.kernel for launch in launches)
    if launches:
        check_driver(record.name, args, kwargs)
    for launch in launches:
        sites = record.captured.setdefault((launch.kernel.file, launch.kernel.line), {})
        sites.setdefault((launch.file, launch.line), launch)
    return result


def _as_overload(op: Any) -> OpOverload:
    """The operator that *op* is, or that is behind the function that a decorator returned."""
    if isinstance(op, FunctionType):
        op = getattr(op, "torch_op", op)
    if isinstance(op, OpOverloadPacket):
        raise NotAnOpError(f"{op} is a set of overloads; pass one, for example {op}.default.")
    if (found := as_overload(op)) is not None:
        return found
    hint = " It is a Triton kernel; pass the operator whose body launches it." if is_kernel(op) else ""
    msg = f"{op!r} is not a registered operator.{hint} Pass an OpOverload such as torch.ops.mylib.norm.default."
    raise NotAnOpError(msg)


@overload
def triton_op(
    name: str,
    fn: None = None,
    /,
    *,
    mutates_args: str | Iterable[str],
    schema: str | None = None,
    on_unsupported: OnUnsupported | None = ...,
) -> Callable[[Callable[..., Any]], CustomOpDef]: ...


@overload
def triton_op(
    name: str,
    fn: Callable[..., Any],
    /,
    *,
    mutates_args: str | Iterable[str],
    schema: str | None = None,
    on_unsupported: OnUnsupported | None = ...,
) -> CustomOpDef: ...


def triton_op(
    name: str,
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mutates_args: str | Iterable[str],
    schema: str | None = None,
    on_unsupported: OnUnsupported | None = None,
) -> CustomOpDef | Callable[[Callable[..., Any]], CustomOpDef]:
    """Create a custom op that `torch.compile` sees through, from a body with plain Triton launches.

    Like `torch.library.triton_op`, but the body needs no `wrap_triton`, helpers in other modules count, `schema` is
    honoured (torch ignores it), and everything that shapes the graph reaches the compile cache.

    Args:
        name: `namespace::name`.
        fn: the body; it may consist of PyTorch operators and Triton launches. Without one, a decorator is returned.
        mutates_args: names of the arguments that the body writes; this must be accurate.
        on_unsupported: as for `make_see_through`.
        schema: for example `"(Tensor x, int[] sizes) -> Tensor"`; without one it is inferred from the annotations.

    Returns:
        torch.library.CustomOpDef: for `register_autograd`, `register_kernel("cpu")` and the rest of torch's methods.

    Raises:
        UnsupportedKernelError: with `"error"`, a kernel is decorated in a way that torch cannot compile.

    Example:
        >>> import torch
        >>> @triton_op("doc_triton_op::double", mutates_args=())
        ... def double(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 2
        >>> double(torch.ones(2))
        tensor([2., 2.])
    """

    def define(body: Callable[..., Any]) -> CustomOpDef:
        found = find_kernels(body)
        _why_refused(found, on_unsupported)
        eager = launch_directly(body) if found.may_wrap else body
        eager = translate_cpu_errors(eager, name) if found.kernels else eager
        mutated = mutates_args if isinstance(mutates_args, str) else tuple(mutates_args)
        text = schema if schema is not None else torch.library.infer_schema(body, mutates_args=mutated)
        op: CustomOpDef = torch.library.custom_op(name, eager, mutates_args=mutated, schema=text)
        op.register_fake(fake_from_body(body))
        _define_see_through(overload_of(op), body, found, on_unsupported)
        return op

    return define if fn is None else define(fn)
