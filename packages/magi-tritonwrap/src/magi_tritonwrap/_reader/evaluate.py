# SPDX-License-Identifier: Apache-2.0
"""Abstract evaluation: which objects an expression of an op's body can stand for.

No code of the user is called. A name is followed to all its assignments, an attribute to the object that holds it, and
a call to what the called function returns. So the answer is a list of values; what is known only at run time is an
`Unknown` with the reason. Example: in `(fast if n > 64 else TABLE["slow"])[grid](x)` the kernel is one of two `Known`
objects.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Iterable, Iterator
from types import BuiltinMethodType, FunctionType, ModuleType
from typing import Any

import torch
import triton

from magi_tritonwrap._identity.library import is_library_function, is_library_module
from magi_tritonwrap._identity.members import MISSING
from magi_tritonwrap._kernel.kernels import is_kernel
from magi_tritonwrap._torch_compat.kernels import kernel_in_wrapper, triton_wrappers

from .attributes import what_computes
from .bindings import Binding
from .containers import TABLES, chosen, entries_of, items_of
from .entrance import Bound, Entrance, bound_by_get, called_by
from .memory import Memory
from .scopes import constructor, imported, loaded_module
from .values import (
    Group,
    Known,
    Launcher,
    Local,
    New,
    Partial,
    Scope,
    Unknown,
    Value,
)


_WRAPPERS = triton_wrappers()
_MODULE = Unknown("which module it is depends on a name known at run time", unread=True)
_DECORATORS = (triton.jit, triton.autotune, triton.heuristics)


class Resolver:
    """Evaluates expressions. Each call of `find_kernels` has its own instance, which remembers what was evaluated."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._entrance = Entrance(self.values)

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
        outside: tuple[Value, ...] = ()
        if name in scope.from_outside or (name not in scope.bindings and name not in scope.names):
            outside = self.name(name, scope.parent) if scope.parent is not None else scope.outside(name)
        bound = (value for binding in scope.bindings.get(name, ()) for value in self._bound(binding, scope))
        return (*known, *bound, *outside)

    def _bound(self, binding: Binding, scope: Scope) -> tuple[Value, ...]:
        node = binding.node
        if binding.kind == "value" and isinstance(node, ast.expr):
            return self.values(node, scope)
        if binding.kind == "item" and isinstance(node, ast.expr):
            return tuple(item for value in self.values(node, scope) for item in items_of(value))
        if binding.kind == "entry" and isinstance(node, ast.expr):
            items = (item for value in self.values(node, scope) for item in items_of(value))
            return tuple(part for item in items for part in entries_of(item, binding.detail))
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
                reason = f"{value.reason}, so its attribute '{name}' is known at run time"
                return (Unknown(reason, value.unread and not _is_of_tensors(name)),)
        return (Unknown(f"the attribute '{name}' is known at run time"),)

    def _attribute_of_object(self, obj: Any, how: str, name: str) -> tuple[Value, ...]:
        static = inspect.getattr_static(obj, name, MISSING)
        if isinstance(static, property) and isinstance(static.fget, FunctionType):
            return self.returned(Partial(Known(static.fget, how), ((Known(obj, how),),)))
        if isinstance(static, functools.cached_property):
            return self.returned(Partial(Known(static.func, how), ((Known(obj, how),),)))
        computed_by = what_computes(obj, name, static)
        if computed_by:
            return (Unknown(f"{how}.{name} is computed by {computed_by}", unread=True),)
        if static is MISSING and not (isinstance(obj, torch.nn.Module) or is_library_module(type(obj).__module__)):
            return (Unknown(f"{how} has no attribute '{name}' yet", unread=_may_hold_code(obj, name)),)
        try:
            found = getattr(obj, name)
        except Exception:  # noqa: BLE001 - a library's own __getattr__ may raise anything
            return (Unknown(f"{how} has no attribute '{name}' yet", unread=_may_hold_code(obj, name)),)
        if found is None:
            return (Unknown(f"{how}.{name} is None until something sets it", unread=_may_hold_code(obj, name)),)
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
        return tuple(result for callee in self.callees(call, scope) for result in self.result(callee, call, scope))

    def callees(self, call: ast.Call, scope: Scope) -> tuple[Value, ...]:
        """Everything that a call can run, including the functions inside a wrapper that a library made."""
        return tuple(inner for callee in self.values(call.func, scope) for inner in called_by(callee))

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
            if callee.obj is importlib.import_module and call.args:
                names = [value.obj for value in self.values(call.args[0], scope) if isinstance(value, Known)]
                return tuple(found for name in names for found in loaded_module(str(name))) or (_MODULE,)
            if callee.obj is super and not call.args:
                return self._parent(scope)
            if isinstance(callee.obj, BuiltinMethodType) and isinstance(callee.obj.__self__, dict):
                table = Known(callee.obj.__self__, callee.how.rpartition(".")[0])
                return self._from_dict(callee.obj.__name__, table, call, scope)
            binder = bound_by_get(callee.obj)
            if binder is not None:
                return (binder(self.bind(call, scope)[0]),)
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

    def _from_dict(self, method: str, table: Known, call: ast.Call, scope: Scope) -> tuple[Value, ...]:
        """What a method of a dict returns."""
        if method in ("get", "pop", "setdefault"):
            keys = [value for argument in call.args[:1] for value in self.values(argument, scope)]
            defaults = (value for argument in call.args[1:2] for value in self.values(argument, scope))
            return (*chosen(table, [key for key in keys if isinstance(key, Known)]), *defaults)
        if method in ("items", "values"):
            pairs = [(Known(key, repr(key)), Known(value, f"{table.how}[{key!r}]")) for key, value in table.obj.items()]
            items = [Group(((0, (key,)), (1, (value,)))) if method == "items" else value for key, value in pairs]
            return (Group(tuple((at, (item,)) for at, item in enumerate(items))),)
        return (Unknown(f"what '{method}' of a dict returns is known at run time"),)

    def _parent(self, scope: Scope) -> tuple[Value, ...]:
        """What `super()` can stand for in the method with this scope."""
        classes = [value.obj for value in scope.names.get("__class__", ()) if isinstance(value, Known)]
        if not classes or isinstance(scope.node, ast.Lambda) or not scope.node.args.args:
            return (Unknown("the class of super() is known at run time", unread=True),)
        cls = classes[0]
        this = self.name(scope.node.args.args[0].arg, scope)
        owners = [one.obj for one in this if isinstance(one, Known) and isinstance(one.obj, cls)]
        return tuple(Known(super(cls, owner), f"super of {cls.__qualname__}") for owner in owners) or (
            New(cls.__mro__[1], None),
        )

    def _getattr(self, call: ast.Call, scope: Scope) -> tuple[Value, ...]:
        names = [value.obj for value in self.values(call.args[1], scope) if isinstance(value, Known)]
        owners = self.values(call.args[0], scope)
        found = [value for name in names for owner in owners for value in self.attribute(owner, str(name))]
        return tuple(found) or (Unknown(f"{ast.unparse(call)} depends on a name known at run time"),)

    def bind(self, call: ast.Call, scope: Scope, *, skip: int = 0, this: bool = False) -> Bound:
        """The arguments of a call, with room for a new instance in front if *this* is True."""
        args = [self.values(argument, scope) for argument in call.args[skip:] if not isinstance(argument, ast.Starred)]
        kwargs = {keyword.arg: self.values(keyword.value, scope) for keyword in call.keywords if keyword.arg}
        return (((Unknown("a new instance"),), *args) if this else tuple(args)), kwargs

    def returned(self, function: Value) -> tuple[Value, ...]:
        """What calling *function*, with all arguments bound already, can return."""
        scope = self.enter(function)
        if scope is None:
            return (Unknown("it is returned by a function whose source is not read"),)
        if isinstance(scope.node, ast.Lambda):
            return self.values(scope.node.body, scope)
        returns = [node for child in scope.node.body for node in _returns(child)]
        return tuple(value for node in returns if node.value is not None for value in self.values(node.value, scope))

    def enter(self, function: Value, bound: Bound = ((), {})) -> Scope | None:
        """The scope of a call of *function*, one for equal calls; None where its source is not there or not read."""
        return self._entrance.enter(function, bound)

    def is_kernel_definition(self, value: Local) -> bool:
        """Whether a function of the body is decorated with `triton.jit`, under any name."""
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


def _may_hold_code(obj: Any, name: str) -> bool:
    """Whether an attribute that *obj* lacks may lead to a launch; not for None, a number, a tensor or a library."""
    is_library = isinstance(obj, ModuleType) and is_library_module(obj.__name__)
    is_plain = obj is None or isinstance(obj, bool | int | float | complex | str | bytes | torch.Tensor)
    return not (is_library or is_plain or _is_of_tensors(name))


def _is_of_tensors(name: str) -> bool:
    """Whether tensors have the attribute, so that what `value.copy_(x)` calls is torch's code and not the author's."""
    return hasattr(torch.Tensor, name)


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
