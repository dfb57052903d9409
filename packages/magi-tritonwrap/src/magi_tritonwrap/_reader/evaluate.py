# SPDX-License-Identifier: Apache-2.0
"""Abstract evaluation: which objects an expression of an op's body can stand for.

Nothing of the user's is called. A name is followed to all its assignments, an attribute to the object that holds it,
a call to what the called function returns; so the answer is a list, and what only a run can tell is an `Unknown` with
its reason. Example: in `(fast if n > 64 else TABLE["slow"])[grid](x)` the kernel is one of two `Known` objects.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import triton

from magi_tritonwrap._kernel.kernels import is_kernel
from magi_tritonwrap._library import is_library_function, is_library_module
from magi_tritonwrap._torch_compat import kernel_in_wrapper, triton_wrappers

from .attributes import MISSING, runs_code_when_read
from .containers import TABLES, chosen, items_of
from .memory import Memory
from .scopes import constructor, function_scope, imported, parameters
from .source import FunctionNode
from .values import (
    Binding,
    Group,
    Known,
    Launcher,
    Local,
    New,
    Partial,
    Scope,
    Unknown,
    Value,
    identity_of,
    identity_of_arguments,
)


_WRAPPERS = triton_wrappers()
_DECORATORS = (triton.jit, triton.autotune, triton.heuristics)
Bound = tuple[tuple[tuple[Value, ...], ...], Mapping[str, tuple[Value, ...]]]
"""Arguments of a call, by position and by name."""


class Resolver:
    """Evaluates expressions; one instance a `find_kernels` call, for its memory of what was evaluated."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._entered: dict[object, tuple[Value, Bound, Scope | None]] = {}

    def values(self, expression: ast.expr, scope: Scope) -> tuple[Value, ...]:
        """Everything that *expression* can stand for in *scope*."""
        return self._memory.values(expression, scope, lambda: self._evaluate(expression, scope))

    def _evaluate(self, expression: ast.expr, scope: Scope) -> Iterable[Value]:
        match expression:
            case ast.Name(id=name):
                return self.name(name, scope)
            case ast.Constant(value=value):
                return (Known(value, repr(value)),)
            case ast.Attribute(value=base, attr=attribute):
                return self._each(base, scope, lambda value: self.attribute(value, attribute))
            case ast.Subscript(value=base, slice=index):
                return self._each(base, scope, lambda value: self.item(value, index, scope))
            case ast.Call():
                return self._call(expression, scope)
        return self._choice(expression, scope) or self._display(expression, scope)

    def _choice(self, expression: ast.expr, scope: Scope) -> tuple[Value, ...]:
        match expression:
            case ast.IfExp(body=yes, orelse=no):
                return (*self.values(yes, scope), *self.values(no, scope))
            case ast.BoolOp(values=options):
                return tuple(value for option in options for value in self.values(option, scope))
            case ast.NamedExpr(value=inner):
                return self.values(inner, scope)
        return ()

    def _display(self, expression: ast.expr, scope: Scope) -> tuple[Value, ...]:
        match expression:
            case ast.Lambda():
                return (Local(expression, scope, "a lambda"),)
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                return (Group(tuple((at, self.values(element, scope)) for at, element in enumerate(elements))),)
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return (Group(tuple((_constant(key), self.values(value, scope)) for key, value in pairs)),)
        return (Unknown(f"{ast.unparse(expression)} is computed at run time"),)

    def _each(self, base: ast.expr, scope: Scope, step: Any) -> tuple[Value, ...]:
        return tuple(result for value in self.values(base, scope) for result in step(value))

    def name(self, name: str, scope: Scope) -> tuple[Value, ...]:
        """Everything that a name can stand for."""
        known = scope.names.get(name, ())
        if name in scope.bindings:
            bound = (value for binding in scope.bindings[name] for value in self._bound(binding, scope))
            return (*known, *bound)
        if known:
            return known
        return self.name(name, scope.parent) if scope.parent is not None else scope.outside(name)

    def _bound(self, binding: Binding, scope: Scope) -> tuple[Value, ...]:
        node = binding.node
        if binding.kind == "value" and isinstance(node, ast.expr):
            return self.values(node, scope)
        if binding.kind == "item" and isinstance(node, ast.expr):
            return tuple(item for value in self.values(node, scope) for item in items_of(value))
        if binding.kind == "import":
            return imported(node, binding.detail, scope)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return (Local(node, scope, f"'{node.name}' defined in the body"),)
        return (Unknown(f"the value bound by `{type(node).__name__}` is known at run time"),)

    def attribute(self, value: Value, name: str) -> tuple[Value, ...]:
        """What `value.name` can stand for."""
        match value:
            case Known(obj=obj, how=how):
                return self._attribute_of_object(obj, how, name)
            case New(cls=cls, init=init):
                return self._attribute_of_new(cls, init, value, name)
            case Unknown():
                return (Unknown(f"{value.reason}, so its attribute '{name}' is known at run time", value.unread),)
        return (Unknown(f"the attribute '{name}' is known at run time"),)

    def _attribute_of_object(self, obj: Any, how: str, name: str) -> tuple[Value, ...]:
        static = inspect.getattr_static(obj, name, MISSING)
        if isinstance(static, property) and isinstance(static.fget, FunctionType):
            return self.returned(Partial(Known(static.fget, how), ((Known(obj, how),),)))
        if isinstance(static, functools.cached_property):
            return self.returned(Partial(Known(static.func, how), ((Known(obj, how),),)))
        if static is MISSING and not (isinstance(obj, torch.nn.Module) or is_library_module(type(obj).__module__)):
            return (Unknown(f"{how} has no attribute '{name}' yet", unread=not _holds_no_code(obj)),)
        if runs_code_when_read(obj, name, static):
            return (Unknown(f"{how}.{name} is computed by a {type(static).__qualname__}", unread=True),)
        try:
            found = getattr(obj, name)
        except Exception:  # noqa: BLE001 - a module's or a class's own __getattr__ may raise anything
            return (Unknown(f"{how} has no attribute '{name}' yet", unread=not _holds_no_code(obj)),)
        return (Known(found, f"{how}.{name}"),)

    def _attribute_of_new(self, cls: type, init: Scope | None, instance: Value, name: str) -> tuple[Value, ...]:
        assigned = () if init is None else tuple(self._assigned_to_self(init, name))
        static = inspect.getattr_static(cls, name, MISSING)
        if isinstance(static, FunctionType):
            return (*assigned, Partial(Known(static, f"{cls.__qualname__}.{name}"), ((instance,),)))
        if static is MISSING:
            return assigned or (Unknown(f"the attribute '{name}' of a new {cls.__qualname__} is known at run time"),)
        return (*assigned, *self._attribute_of_object(cls, cls.__qualname__, name))

    def _assigned_to_self(self, init: Scope, name: str) -> Iterator[Value]:
        if isinstance(init.node, ast.Lambda) or not init.node.args.args:
            return
        this = init.node.args.args[0].arg
        for node in ast.walk(init.node):
            match node:
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=owner), attr=attribute)], value=assigned):
                    if owner == this and attribute == name:
                        yield from self.values(assigned, init)

    def item(self, value: Value, index: ast.expr, scope: Scope) -> tuple[Value, ...]:
        """What `value[index]` can stand for: a launcher, an item of a table, the result of `__getitem__`."""
        match value:
            case Known(obj=obj) if is_kernel(obj):
                return (Launcher(value),)
            case Known(obj=obj, how=how) if kernel_in_wrapper(obj) is not None:
                return (Launcher(Known(kernel_in_wrapper(obj), how, wrapped=True)),)
            case Local() if self.is_kernel_definition(value):
                return (Launcher(value),)
            case Known() | Group() if isinstance(value, Group) or isinstance(value.obj, TABLES):
                return chosen(value, [key for key in self.values(index, scope) if isinstance(key, Known)])
            case Known(obj=obj):
                return self._python_item(type(obj), value, index, scope)
            case New(cls=cls):
                return self._python_item(cls, value, index, scope)
            case Unknown():
                return (value,)
        return (Unknown("the item is known at run time"),)

    def _python_item(self, cls: type, owner: Value, index: ast.expr, scope: Scope) -> tuple[Value, ...]:
        method = inspect.getattr_static(cls, "__getitem__", None)
        if not isinstance(method, FunctionType) or is_library_function(method):
            return (Unknown(f"the item of a {cls.__qualname__} is known at run time"),)
        return self.returned(Partial(Known(method, cls.__qualname__), ((owner,), self.values(index, scope))))

    def _call(self, call: ast.Call, scope: Scope) -> tuple[Value, ...]:
        results: list[Value] = []
        for callee in self.values(call.func, scope):
            results += self.result(callee, call, scope)
        return tuple(results)

    def result(self, callee: Value, call: ast.Call, scope: Scope) -> tuple[Value, ...]:
        """What `callee(...)` returns, with the arguments of *call*."""
        if isinstance(callee, Known):
            if callee.obj in _WRAPPERS and call.args:
                return tuple(_as_wrapped(value) for value in self.values(call.args[0], scope))
            if callee.obj is functools.partial and call.args:
                bound = self.bind(call, scope, skip=1)
                return tuple(Partial(value, *bound) for value in self.values(call.args[0], scope))
            if callee.obj is getattr and len(call.args) >= 2:
                return self._getattr(call, scope)
            if _is_mapping_get(callee.obj):
                return chosen(Known(callee.obj.__self__, callee.how), [])
            if isinstance(callee.obj, type) and not is_library_module(callee.obj.__module__):
                return (
                    New(
                        callee.obj,
                        self.enter(Known(constructor(callee.obj), callee.how), self.bind(call, scope, this=True)),
                    ),
                )
        if self.is_kernel_decoration(callee, call, scope):
            return tuple(value for argument in call.args for value in self.values(argument, scope))
        args, kwargs = self.bind(call, scope)
        return self.returned(Partial(callee, args, kwargs))

    def _getattr(self, call: ast.Call, scope: Scope) -> tuple[Value, ...]:
        names = [value.obj for value in self.values(call.args[1], scope) if isinstance(value, Known)]
        owners = self.values(call.args[0], scope)
        found = [value for name in names for owner in owners for value in self.attribute(owner, str(name))]
        return tuple(found) or (Unknown(f"{ast.unparse(call)} depends on a name known at run time"),)

    def bind(self, call: ast.Call, scope: Scope, *, skip: int = 0, this: bool = False) -> Bound:
        """The arguments of a call; `this` leaves room for a new instance in front."""
        args = [self.values(argument, scope) for argument in call.args[skip:] if not isinstance(argument, ast.Starred)]
        kwargs = {keyword.arg: self.values(keyword.value, scope) for keyword in call.keywords if keyword.arg}
        return (((Unknown("a new instance"),), *args) if this else tuple(args)), kwargs

    def returned(self, function: Value) -> tuple[Value, ...]:
        """What calling *function*, with everything already bound, returns."""
        scope = self.enter(function)
        if scope is None:
            return (Unknown("it is returned by a function whose source is not read"),)
        if isinstance(scope.node, ast.Lambda):
            return self.values(scope.node.body, scope)
        returns = [node for child in scope.node.body for node in _returns(child)]
        return tuple(value for node in returns if node.value is not None for value in self.values(node.value, scope))

    def enter(self, function: Value, bound: Bound = ((), {})) -> Scope | None:
        """The scope of a call of *function*, one for equal calls; None where its source is not there or not read."""
        key = (identity_of(function), identity_of_arguments(*bound))
        if key not in self._entered:
            self._entered[key] = (function, bound, self._enter(function, bound))
        return self._entered[key][2]

    def _enter(self, function: Value, bound: Bound) -> Scope | None:
        args, kwargs = bound
        match function:
            case Partial(function=inner, args=first, kwargs=given):
                return self.enter(inner, ((*first, *args), {**given, **kwargs}))
            case Local(node=node, scope=parent):
                names = parameters(node, args, kwargs, self._defaults(node, parent))
                return Scope(node, parent.file, parent.globals, names, parent)
            case Known(obj=MethodType() as method, how=how):
                this = (Known(method.__self__, how.rpartition(".")[0] or how),)
                return self.enter(Known(method.__func__, how), ((this, *args), kwargs))
            case Known(obj=functools.partial() as partial, how=how):
                first = tuple((Known(value, how),) for value in partial.args)
                given = {name: (Known(value, how),) for name, value in partial.keywords.items()}
                return self.enter(Known(partial.func, how), ((*first, *args), {**given, **kwargs}))
            case Known(obj=FunctionType() as code) if not is_library_function(code):
                return function_scope(code, args, kwargs)
            case Known(obj=obj, how=how):
                inner = inspect.getattr_static(obj, "__wrapped__", None)
                if callable(inner):
                    return self.enter(Known(inner, how), bound)
                return self._enter_instance(obj, how, bound)
        return None

    def _defaults(self, node: FunctionNode, parent: Scope) -> dict[str, tuple[Value, ...]]:
        """Defaults of a function that the body defines; their expressions belong to the body."""
        arguments = node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        with_default = positional[len(positional) - len(arguments.defaults) :]
        pairs = [*zip(with_default, arguments.defaults, strict=True)]
        pairs += [
            (name, value) for name, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value
        ]
        return {argument.arg: self.values(value, parent) for argument, value in pairs}

    def _enter_instance(self, obj: Any, how: str, bound: Any) -> Scope | None:
        name = "forward" if isinstance(obj, torch.nn.Module) else "__call__"
        method = inspect.getattr_static(type(obj), name, None)
        if isinstance(obj, type) or not isinstance(method, FunctionType) or is_library_function(method):
            return None
        args, kwargs = bound
        return self.enter(Known(method, how), (((Known(obj, how),), *args), kwargs))

    def is_kernel_definition(self, value: Local) -> bool:
        """Whether a function of the body is decorated with `triton.jit`, by whatever name."""
        decorators = getattr(value.node, "decorator_list", [])
        return any(
            isinstance(decorator, Known) and decorator.obj in _DECORATORS
            for node in decorators
            for decorator in self.values(node.func if isinstance(node, ast.Call) else node, value.scope)
        )

    def is_kernel_decoration(self, callee: Value, call: ast.Call, scope: Scope) -> bool:
        """Whether a call is `triton.jit(fn)` or `triton.autotune(...)(fn)`, written as a call."""
        if isinstance(callee, Known):
            return callee.obj is triton.jit
        decorator = call.func.func if isinstance(call.func, ast.Call) else None
        if decorator is None:
            return False
        return any(isinstance(value, Known) and value.obj in _DECORATORS for value in self.values(decorator, scope))


def _holds_no_code(obj: Any) -> bool:
    """Whether no launch can hide behind an attribute that *obj* lacks: a default of None, a number, a library."""
    is_library = isinstance(obj, ModuleType) and is_library_module(obj.__name__)
    return is_library or obj is None or isinstance(obj, bool | int | float | complex | str | bytes)


def _constant(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _returns(statement: ast.stmt) -> Iterator[ast.Return]:
    if isinstance(statement, ast.Return):
        yield statement
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _returns(child)  # type: ignore[arg-type]


def _as_wrapped(value: Value) -> Value:
    if isinstance(value, Known):
        return Known(value.obj, value.how, wrapped=True)
    if isinstance(value, Local):
        return Local(value.node, value.scope, value.how, wrapped=True)
    return value


def _is_mapping_get(obj: Any) -> bool:
    return isinstance(obj, BuiltinMethodType) and obj.__name__ == "get" and isinstance(obj.__self__, dict)
