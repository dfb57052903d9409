# SPDX-License-Identifier: Apache-2.0
"""Find the Triton kernels that the code of a function leads to: the walk of the cache key, without the key."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
import triton

from ._cache_key import OpWalk
from ._calls import DEFINED, UNKNOWN, Call, calls_of
from ._identity.code import CodeNames, code_names, digest, nested
from ._identity.library import Standing, is_library_function, is_library_module, root_of, standing_of
from ._identity.members import MISSING, is_a, members_of
from ._identity.value_forms import Place
from ._kernel.bodies import as_overload, body_of_op, body_of_whole_op, ops_mentioned
from ._kernel.kernels import as_kernel, is_kernel
from ._kernel.report import FoundKernel, InnerOp, KernelReport, SideEffect, UnresolvedLaunch
from ._torch_compat.kernels import kernel_in_wrapper, triton_wrappers
from ._torch_compat.operators import has_decomposition_rule, is_namespace_of_torch, qualified_name
from .errors import UnsupportedKernelError


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch._ops import OpOverload


# Methods of a value known only at run time that do not lead to a launch.
_PLAIN_TYPES = (torch.Tensor, torch.Size, torch.Generator, str, bytes, list, tuple, dict, set, int, float, complex)
_HARMLESS = frozenset(name for cls in (*_PLAIN_TYPES, torch.autograd.function.FunctionCtx) for name in dir(cls))
_NOT_FOLLOWED = (Standing.LIBRARY, Standing.OURS)
# What the places of values inside a container or an object end with.
_INSIDE = ("]", "(an item)", "(a key)", ".__self__")


def find_kernels(
    fn: Callable[..., Any], *, extra: Iterable[Any] = (), classes: Mapping[str, type] = MappingProxyType({})
) -> KernelReport:
    """Find every Triton kernel that the code of *fn* leads to, without calling anything.

    The search follows the names in code: globals, closures, attributes, items of tables, methods, factories, partials,
    operators called by *fn*, and helpers in other modules to any depth. It stops at torch, Triton and the standard
    library. It finds all that *fn* can launch by name, and may find more: all kernels in a table count, and those of
    all methods of a class. Which of them are launched shows when the op is compiled.

    Args:
        fn: the body of an op; a function, a method, or a callable object.
        extra: kernels that no name leads to, for example those of a compiled extension. The cache key covers them.
        classes: the exact class of parameters of *fn*, by parameter name. Methods that are called on these parameters
            are followed.

    Returns:
        KernelReport: `.kernels`; if there are none, `.unresolved` has launches whose kernel is known only at run time.
        Those are captured when the op is compiled.

    Example:
        >>> def double(x): return x * 2
        >>> print(find_kernels(double))
        no Triton launch
    """
    described = [as_kernel(kernel) for kernel in _kernels_in(extra)]
    listed = tuple(FoundKernel(one.outermost, one.name, "listed in extra=", one.file, one.line) for one in described)
    return _found((fn, *_class_of_method(fn), *classes.values()), listed)


def _kernels_in(extra: object) -> Iterable[Any]:
    for kernel in extra if isinstance(extra, Iterable) else (extra,):
        if not is_kernel(kernel):
            fix = "Give a list of what @triton.jit, @triton.autotune or @triton.heuristics returned."
            raise UnsupportedKernelError(f"an extra kernel is {kernel!r} (a {type(kernel).__name__}). {fix}")
        yield kernel


def _class_of_method(fn: Any) -> Iterator[type]:
    """The class of a method that is given without its object: its `self` is an instance of that."""
    if is_a(fn, FunctionType):
        found: Any = sys.modules.get(fn.__module__)
        for name in fn.__qualname__.split(".")[:-1]:
            found = vars(found).get(name) if is_a(found, (ModuleType, type)) else None
        if is_a(found, type) and vars(found).get(fn.__name__) is fn:
            yield found


def _found(
    roots: tuple[Any, ...], listed: tuple[FoundKernel, ...] = (), inside: frozenset[str] = frozenset()
) -> KernelReport:
    """What the code of *roots* leads to; *inside* are the ops whose bodies led here."""
    walk = _Finder(frozenset(map(root_of, roots)))
    walk.result((root, Place("the body")) for root in roots)
    functions = [one for one in walk.met() if is_a(one, FunctionType) and not is_library_function(one)]
    names = [code_names(function.__code__).mentioned for function in functions]
    found = [*listed, *walk.kernels(), *(kernel for function in functions for kernel in _made_by(function))]
    inner_ops = []
    for name, (op, how) in walk.ops.items():
        body = body_of_whole_op(op)
        report = None if body is None else _found((body,), (), inside | {name})
        if name not in inside and (report is None or report.may_launch):
            inner_ops.append(InnerOp(name, _why_whole(name, report), how))
            found += () if report is None or inner_ops[-1].opaque_because else report.kernels
    kernels = {(one.file, one.line) if one.kernel is None else id(one.kernel): one for one in reversed(found)}
    # Only where nothing was found do calls decide anything.
    calls = [] if kernels else [call for function in functions for call in calls_of(function)]
    unresolved, doubtful = ([], []) if kernels else walk.unresolved(calls)
    return KernelReport(
        kernels=tuple(reversed(kernels.values())),
        unresolved=tuple(unresolved),
        inner_ops=tuple(inner_ops),
        doubtful=tuple(doubtful),
        effects=tuple(SideEffect(call.text, call.effect, call.file, call.line) for call in calls if call.effect),
        wraps=any(value in triton_wrappers() for value in walk.met() if is_a(value, FunctionType))
        or any(not {"wrap_triton", "capture_triton"}.isdisjoint(mentioned) for mentioned in names)
        or walk.wraps,
    )


def _why_whole(op: str, report: KernelReport | None) -> str:
    """Why the launches of an opaque op cannot be seen through where another op calls it; empty if they can."""
    if report is None:
        return "it has no Python body that can be read"
    if has_decomposition_rule(op):
        return "its library has a rule of its own for it in compiled graphs"
    return "" if report.kernels else f"which kernels it launches is known only at run time: {report.unresolved[0]}"


def _made_by(function: FunctionType) -> Iterator[FoundKernel]:
    """The kernels that *function* makes when it runs, if it names `triton.jit`: the functions inside it, or itself."""
    names = code_names(function.__code__)
    read = (function.__globals__.get(name) for name in names.globals)
    if {"triton", "jit"} <= names.mentioned or any(value is triton.jit for value in read):
        inner = [code for code in nested(function.__code__)[1:] if not code.co_name.startswith("<")]
        how = f"made at run time by {function.__module__}.{function.__qualname__}, which names triton.jit"
        for code in inner or [function.__code__]:
            yield FoundKernel(None, code.co_qualname, how, code.co_filename, code.co_firstlineno)


class _Finder(OpWalk):
    """The walk of the cache key, which stops at kernels, and notes what it needs no digest of."""

    def __init__(self, own: frozenset[str], outer: tuple[int, ...] = ()) -> None:
        super().__init__(own, outer)
        self.ops: dict[str, tuple[OpOverload, str]] = {}
        self.wraps = False
        self._unloaded: list[UnresolvedLaunch] = []
        self._kernels: list[tuple[Any, Any, str]] = []
        self._reader: Any = None  # whose names the walk reads at this moment
        self._named: set[int] = set()

    def kernels(self) -> Iterator[FoundKernel]:
        """The kernels that were met, without those that are only a layer or a part of another one."""
        for value, kernel, how in self._kernels:
            made = as_kernel(kernel)
            is_named = id(value) in self._named
            yield FoundKernel(made.outermost, made.name, how, made.file, made.line, is_named=is_named)

    def unresolved(self, calls: Iterable[Call]) -> tuple[list[UnresolvedLaunch], list[UnresolvedLaunch]]:
        """The calls of which only a run can tell what they run: launches and code that is not there yet, and others."""
        met = {id(value) for value in self.met()}
        classes = (value for value in self.met() if is_a(value, type) and not is_library_module(value.__module__))
        methods = _HARMLESS.union(*(members_of(base) for cls in classes for base in cls.__mro__))
        unresolved = list(self._unloaded)
        doubtful: list[UnresolvedLaunch] = []
        for call in calls:
            if why := _why_unresolved(call, met, methods):
                launch = UnresolvedLaunch(call.text, why, call.file, call.line, call.has_grid)
                (unresolved if call.has_grid or call.callee is not UNKNOWN else doubtful).append(launch)
        return unresolved, doubtful

    def form(self, value: Any, place: Place) -> str:
        if is_a(value, (FunctionType, type)) and root_of(value) == "_pytest":
            return digest("what pytest calls for each assert")
        by_name = self._reader is None or (is_a(self._reader, FunctionType) and id(self._reader) in self._named)
        if by_name and not place.text.endswith(_INSIDE):
            self._named.add(id(value))
        return super().form(value, place)

    def _description(self, value: Any, place: Place) -> str:
        self._reader = value
        return super()._description(value, place)

    def unordered(self, values: Iterable[Any], place: Place) -> list[str]:
        return [self.form(value, place.inner(" (an item)")) for value in values]

    def unstable(self, value: Any, place: Place, why: str) -> str:  # noqa: ARG002 - for those that want a digest
        return digest("unstable")

    def unloaded(self, place: Place, names: list[str]) -> str:  # noqa: ARG002 - as above
        code = self._reader.__code__
        for name in names:
            why = f"the module {name!r} is imported by the body and not loaded yet"
            launch = UnresolvedLaunch(f"import {name}", why, code.co_filename, code.co_firstlineno, is_launch=False)
            self._unloaded.append(launch)
        return digest("unloaded")

    def mentioned(self, names: CodeNames, place: Place) -> Iterator[str]:
        for op in ops_mentioned(names.mentioned):
            yield self.form(op, place.of(f"{op} called by {place.text}"))

    def special_form(self, value: Any, place: Place) -> str | None:
        kernel = kernel_in_wrapper(value)
        self.wraps |= kernel is not None
        kernel = value if kernel is None else kernel
        if is_kernel(kernel):
            self._kernels.append((value, kernel, place.text))
            return digest("kernel")
        if (op := as_overload(value)) is not None:
            body = body_of_op(op)
            if body is not None:
                return self.form(body, place)
            if not is_namespace_of_torch(op.namespace):
                self.ops.setdefault(qualified_name(op), (op, place.text))
            return digest("op")
        # To take these apart takes long.
        return digest("data") if is_a(value, torch.Tensor) or type(value).__module__ == "numpy" else None


def _why_unresolved(call: Call, met: set[int], methods: frozenset[str]) -> str:
    """Why it is not known what *call* runs, where *met* was followed; empty if it is, or if it is a harmless method."""
    callee = call.callee
    if callee is None:
        return "it is None until something sets it"
    if callee is MISSING:
        return "it is not defined yet"
    if callee is UNKNOWN:
        return "" if call.method in methods else "what it calls is known at run time"
    while is_a(callee, (functools.partial, staticmethod, classmethod, MethodType)):
        callee = callee.func if is_a(callee, functools.partial) else callee.__func__
    if callee is DEFINED or id(callee) in met or is_kernel(callee) or standing_of(callee) in _NOT_FOLLOWED:
        return ""
    return "it belongs to an installed distribution, and is not followed there"
