# SPDX-License-Identifier: Apache-2.0
"""Find the Triton kernels that a function can launch, by reading its source and that of the helpers it calls."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from types import FunctionType, MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from magi_tritonwrap._identity.library import is_library_function
from magi_tritonwrap._kernel.bodies import as_overload, body_of_op, body_of_whole_op
from magi_tritonwrap._kernel.kernels import as_kernel, is_kernel
from magi_tritonwrap._kernel.report import (
    FoundKernel,
    InnerOp,
    KernelReport,
    SideEffect,
    UnresolvedLaunch,
    UnsupportedLaunch,
)
from magi_tritonwrap._torch_compat.kernels import kernel_of_launcher
from magi_tritonwrap._torch_compat.operators import is_op_of_torch, qualified_name
from magi_tritonwrap._torch_compat.tracing import autograd_function_of
from magi_tritonwrap.errors import UnsupportedKernelError

from .bindings import walk_own
from .effects import effect_of, effect_of_method, is_harmless_name
from .evaluate import Resolver
from .memory import Memory
from .notes import LAUNCH_METHODS, Found, looks_like_launch, open_call, why_unsupported, why_whole
from .scopes import constructor
from .values import Known, Launcher, Local, New, Partial, Scope, Unknown, Value, identity_of


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch._ops import OpOverload


_MAX_VISITS = 32  # of one function, each with other arguments: recursion through partials would never end


def find_kernels(
    fn: Callable[..., Any],
    *,
    extra: Iterable[Any] = (),
    seconds: float = 2.0,
    classes: Mapping[str, type] = MappingProxyType({}),
) -> KernelReport:
    """Find every Triton kernel that *fn* can launch, without calling anything.

    The search follows globals, closures, attributes, subscripts, methods, factories, `functools.partial`, `lru_cache`,
    aliases, conditional choices, operators called by *fn*, and helpers in other modules to any depth. It stops at
    torch, Triton and the standard library.

    Args:
        fn: the body of an op; a function, a method, or a callable object.
        extra: kernels that cannot be read from the source, for example those of a compiled extension or of an object in
            the arguments. The cache key covers them. If the list is complete, a launch that is reached only through the
            arguments no longer bypasses the cache.
        seconds: the limit of the search in seconds of processor time, which do not depend on how busy the machine is.
            The report lists what was not read by then as unresolved.
        classes: the exact class of parameters of *fn*, by parameter name. Methods that are called on these parameters
            are followed.

    Returns:
        KernelReport: `.kernels`, and `.unresolved` for launches whose kernel is known only at run time. Those are
        captured when the op is compiled.

    Example:
        >>> def double(x): return x * 2
        >>> print(find_kernels(double))
        no Triton launch
    """
    walk = _Walk(Memory(seconds))
    walk.function(Known(fn, "the body"), None, {name: (New(cls, None),) for name, cls in classes.items()})
    listed = [as_kernel(kernel) for kernel in _kernels_in(extra)]
    for kernel in listed:
        walk.add(Found(kernel.outermost, kernel.name, "listed in extra=", kernel.file, kernel.line), False, None)
    return walk.report(is_complete=bool(listed))


def _kernels_in(extra: object) -> Iterable[Any]:
    for kernel in extra if isinstance(extra, Iterable) else (extra,):
        if not is_kernel(kernel):
            fix = "Give a list of what @triton.jit, @triton.autotune or @triton.heuristics returned."
            raise UnsupportedKernelError(f"an extra kernel is {kernel!r} (a {type(kernel).__name__}). {fix}")
        yield kernel


class _Walk:
    """Visits the calls of a function and of everything it calls, each function once for each set of arguments."""

    def __init__(self, memory: Memory, ops: frozenset[str] = frozenset()) -> None:
        self._memory = memory
        self._inside = ops  # the operators whose bodies led here
        self._inner_ops: dict[str, InnerOp] = {}
        self._resolver = Resolver(memory)
        self._found: dict[object, Found] = {}
        self._unresolved: dict[tuple[str, int], UnresolvedLaunch] = {}
        self._unsupported: dict[tuple[str, int], UnsupportedLaunch] = {}
        self._doubtful: dict[tuple[str, int], UnresolvedLaunch] = {}
        self._effects: dict[tuple[str, int], SideEffect] = {}
        self._seen: set[object] = set()
        self._visits: Counter[object] = Counter()

    def report(self, *, is_complete: bool) -> KernelReport:
        """What was found.

        *is_complete* is True if the user has listed every kernel that is reached only through arguments.
        """
        kernels = tuple(
            FoundKernel(
                found.kernel,
                found.name,
                found.how,
                found.file,
                found.line,
                tuple(found.launches),
                tuple(site for site in found.launches if site in found.wrapped and site not in found.bare),
            )
            for found in self._found.values()
        )
        unresolved = (replace(one, in_key=one.in_key or is_complete) for one in self._unresolved.values())
        return KernelReport(
            kernels,
            tuple(unresolved),
            tuple(self._unsupported.values()),
            tuple(self._inner_ops.values()),
            tuple(self._doubtful.values()),
            tuple(self._effects.values()),
        )

    def add(self, found: Found, wrapped: bool, launch: tuple[str, int] | None) -> None:
        key = id(found.kernel) if found.kernel is not None else (found.file, found.line)
        entry = self._found.setdefault(key, found)
        if launch is not None and launch not in entry.launches:
            entry.launches.append(launch)
        if launch is not None:
            (entry.wrapped if wrapped else entry.bare).add(launch)

    def function(
        self,
        callee: Value,
        call: tuple[ast.Call, Scope] | None,
        given: Mapping[str, tuple[Value, ...]] = MappingProxyType({}),
    ) -> None:
        """Visit what *callee* runs, with the arguments of *call* where there is one, and those *given* by name."""
        op = as_overload(callee.obj) if isinstance(callee, Known) else None
        if op is not None:
            body = body_of_op(op)
            if body is None:
                self._whole_op(op, call)
                return
            callee = Known(body, "body of an op")
        bound = self._resolver.bind(*call) if call is not None else ((), given)
        scope = self._resolver.enter(callee, bound)
        if scope is None:
            self._note_missing_source(callee)
            return
        place = _place(scope)
        key = (place, _identity(scope))
        if key in self._seen or self._visits[place] >= _MAX_VISITS:
            return
        self._seen.add(key)
        self._visits[place] += 1
        self._visit(scope)

    def _whole_op(self, op: OpOverload, call: tuple[ast.Call, Scope] | None) -> None:
        """Read the body of an opaque operator, whose launches may be seen through inside this body."""
        name = qualified_name(op)
        if is_op_of_torch(op) or name in self._inner_ops or name in self._inside:
            return
        body = body_of_whole_op(op)
        reason = "it has no Python body that can be read"
        if body is not None:
            inner = _Walk(self._memory, self._inside | {name})
            inner.function(Known(body, f"body of {name}"), None)
            report = inner.report(is_complete=False)
            if not report.may_launch:
                return
            reason = why_whole(name, report)
            if not reason:
                self._found = {**inner._found, **self._found}
                self._inner_ops.update(inner._inner_ops)
        place = ("", 0) if call is None else (call[1].file, call[0].lineno)
        self._inner_ops[name] = InnerOp(name, reason, *place)

    def _visit(self, scope: Scope) -> None:
        defined: list[Local] = []
        made: list[Value] = []
        statements = [scope.node.body] if isinstance(scope.node, ast.Lambda) else scope.node.body
        for statement in statements:
            for node in walk_own(statement):
                if self._memory.is_out_of_time:
                    self._leave_unread(scope)
                    return
                if isinstance(node, ast.Call):
                    made += self._visit_call(node, scope)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                    defined.append(Local(node, scope, "defined in the body"))
        for local in defined:
            called = self._visits[(scope.file, local.node.lineno, local.node.col_offset)]
            if not called and not self._resolver.is_kernel_definition(local):
                self.function(local, None)
        entered = [(partial, self._resolver.enter(partial)) for partial in made]
        for partial in [one for one, inner in entered if inner is not None and not self._visits[_place(inner)]]:
            self.function(partial, None)

    def _visit_call(self, call: ast.Call, scope: Scope) -> tuple[Value, ...]:
        """Visit what a call runs. Returns the partials that it makes, which other code may call."""
        callees = self._resolver.callees(call, scope)
        if any(isinstance(callee, Known) and callee.obj is functools.partial for callee in callees):
            return self._resolver.values(call, scope)
        for callee in callees:
            self._visit_callee(callee, call, scope)
        if isinstance(call.func, ast.Attribute) and call.func.attr in LAUNCH_METHODS:
            for owner in self._resolver.values(call.func.value, scope):
                if _is_kernel_value(owner, self._resolver):
                    self._launched(owner, call, scope)
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            self._visit_argument(argument, scope)
        self._note_unknown(call, scope, callees)
        return ()

    def _note_unknown(self, call: ast.Call, scope: Scope, callees: tuple[Value, ...]) -> None:
        """Note what is unknown about a call: a launch, code that was not read, or a method that any object may have."""
        unknown = [callee for callee in callees if isinstance(callee, Unknown)]
        unread = [callee for callee in unknown if callee.unread]
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        site = (scope.file, call.lineno)
        if unread or (unknown and len(unknown) == len(callees) and looks_like_launch(call)):
            self._unresolved.setdefault(site, open_call(call, scope, (unread or unknown)[0]))
        elif unknown and effect_of_method(name):
            self._effects.setdefault(site, SideEffect(ast.unparse(call.func), effect_of_method(name), *site))
        elif unknown and not is_harmless_name(name):
            self._doubtful.setdefault(site, open_call(call, scope, unknown[0]))

    def _visit_callee(self, callee: Value, call: ast.Call, scope: Scope) -> None:
        effect = effect_of(callee.obj) if isinstance(callee, Known) else ""
        if effect:
            site = (scope.file, call.lineno)
            self._effects.setdefault(site, SideEffect(ast.unparse(call.func), effect, *site))
            return
        match callee:
            case Launcher(kernel=kernel) | Partial(function=Launcher(kernel=kernel)):
                self._launched(kernel, call, scope)
            case Known(obj=functools.partial(func=function), how=how) if kernel_of_launcher(function) is not None:
                self._launched(Known(kernel_of_launcher(function), how), call, scope)
            case Known(obj=obj, how=how) if kernel_of_launcher(obj) is not None:
                self._launched(Known(kernel_of_launcher(obj), how), call, scope)
            case Known(obj=obj) if isinstance(obj, type) and issubclass(obj, torch.autograd.Function):
                pass
            case Known(obj=type() as cls, how=how):
                self.function(Known(constructor(cls), how), None)
            case Known(obj=obj) if autograd_function_of(obj) is not None:
                self.function(Known(autograd_function_of(obj).forward, callee.how), None)
            case Known() | Local() | Partial():
                self.function(callee, (call, scope))

    def _visit_argument(self, argument: ast.expr, scope: Scope) -> None:
        """Visit a function that is an argument, which the callee may call: `torch.cond(p, helper_a, helper_b)`."""
        for value in self._resolver.values(argument, scope):
            if isinstance(value, Partial) or (isinstance(value, Known) and isinstance(value.obj, FunctionType)):
                self.function(value, None)

    def _launched(self, kernel: Value, call: ast.Call, scope: Scope) -> None:
        site = (scope.file, call.lineno)
        if isinstance(kernel, Known):
            described = as_kernel(kernel.obj)
            found = Found(described.outermost, described.name, kernel.how, described.file, described.line)
            self.add(found, kernel.wrapped, site)
            reason = why_unsupported(described, call)
            if reason:
                self._unsupported[site] = UnsupportedLaunch(described.name, reason, *site)
        elif isinstance(kernel, Local):
            name = getattr(kernel.node, "name", "<lambda>")
            line = min([kernel.node.lineno, *(node.lineno for node in getattr(kernel.node, "decorator_list", []))])
            found = Found(None, name, "made by a factory at run time", kernel.scope.file, line)
            self.add(found, kernel.wrapped, site)

    def _leave_unread(self, scope: Scope) -> None:
        name = f"{getattr(scope.node, 'name', '<lambda>')}(...)"
        launch = UnresolvedLaunch(name, self._memory.out_of_time, scope.file, scope.node.lineno, is_launch=False)
        self._unresolved.setdefault((launch.file, launch.line), launch)

    def _note_missing_source(self, callee: Value) -> None:
        function = callee.obj if isinstance(callee, Known) else None
        function = function.__func__ if isinstance(function, MethodType) else function
        if not isinstance(function, FunctionType) or is_library_function(function):
            return
        code = function.__code__
        reason = f"the source of {function.__qualname__} is not available"
        launch = UnresolvedLaunch(
            f"{function.__qualname__}(...)", reason, code.co_filename, code.co_firstlineno, is_launch=False
        )
        self._unresolved.setdefault((launch.file, launch.line), launch)


def _place(scope: Scope) -> tuple[str, int, int]:
    return (scope.file, scope.node.lineno, scope.node.col_offset)


def _is_kernel_value(value: Value, resolver: Resolver) -> bool:
    if isinstance(value, Known):
        return is_kernel(value.obj)
    return isinstance(value, Local) and resolver.is_kernel_definition(value)


def _identity(scope: Scope) -> object:
    """What distinguishes two calls of one function: the known objects among its names."""
    return tuple((name, tuple(identity_of(value) for value in values)) for name, values in scope.names.items())
