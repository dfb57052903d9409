# SPDX-License-Identifier: Apache-2.0
"""From a callable to the scope of its call: which function runs, with which arguments bound."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MappingProxyType, MethodType, MethodWrapperType
from typing import Any

import torch

from magi_tritonwrap._identity.library import is_library_function, is_library_module

from .scopes import function_scope, parameters
from .source import FunctionNode
from .values import Known, Local, Partial, Scope, Unknown, Value, identity_of, identity_of_arguments


Bound = tuple[tuple[tuple[Value, ...], ...], Mapping[str, tuple[Value, ...]]]
"""Arguments of a call, by position and by name."""
Evaluate = Callable[[ast.expr, Scope], tuple[Value, ...]]
Binder = Callable[[tuple[tuple[Value, ...], ...]], Value]


class Entrance:
    """Finds the scope of each call, one scope for equal calls.

    Args:
        values: a function from an expression and a scope to everything that the expression can stand for.
    """

    def __init__(self, values: Evaluate) -> None:
        self._values = values
        self._entered: dict[object, tuple[Value, Bound, Scope | None]] = {}

    def enter(self, function: Value, bound: Bound = ((), {})) -> Scope | None:
        """The scope of a call of *function* with *bound*, one scope for equal calls.

        None if its source cannot be read.
        """
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
            case Known(obj=(staticmethod() | classmethod()) as method, how=how):
                return self.enter(Known(method.__func__, how), bound)
            case Known(obj=FunctionType() as code) if not is_library_function(code):
                return function_scope(code, args, kwargs)
            case Known(obj=obj, how=how):
                inner = inspect.getattr_static(obj, "__wrapped__", None)
                if callable(inner):
                    return self.enter(Known(inner, how), bound)
                return self._enter_instance(obj, how, bound)
        return None

    def _defaults(self, node: FunctionNode, parent: Scope) -> dict[str, tuple[Value, ...]]:
        """The default of each parameter of a function that the body defines, evaluated in the scope of the body."""
        arguments = node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        with_default = positional[len(positional) - len(arguments.defaults) :]
        pairs = [*zip(with_default, arguments.defaults, strict=True)]
        pairs += [
            (name, value) for name, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value
        ]
        return {argument.arg: self._values(value, parent) for argument, value in pairs}

    def _enter_instance(self, obj: Any, how: str, bound: Any) -> Scope | None:
        name = "forward" if isinstance(obj, torch.nn.Module) else "__call__"
        method = inspect.getattr_static(type(obj), name, None)
        if isinstance(obj, type) or not isinstance(method, FunctionType) or is_library_function(method):
            return None
        args, kwargs = bound
        return self.enter(Known(method, how), (((Known(obj, how),), *args), kwargs))


def called_by(callee: Value) -> Iterator[Value]:
    """What calling *callee* runs: *callee*, and the functions in its closure if it is a wrapper that a library made.

    A wrapper made by a decorator of torch or Python that leaves no `__wrapped__` has the function that it calls in its
    closure, or in the table of a `functools.singledispatch`.
    """
    yield callee
    if isinstance(callee, Known) and isinstance(callee.obj, torch.nn.Module):
        yield from _modules_of_library(callee.obj, callee.how)
    if not isinstance(callee, Known) or not isinstance(callee.obj, FunctionType):
        return
    if not is_library_function(callee.obj):
        return
    inside = [] if "__wrapped__" in vars(callee.obj) else list(_contents(callee.obj))
    table = vars(callee.obj).get("registry")
    inside += table.values() if isinstance(table, MappingProxyType) else []
    for value in inside:
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if isinstance(function, FunctionType | functools.partial) and not _is_of_library(function):
            yield Known(value, f"{callee.how}, wrapped by {callee.obj.__module__}")


def _modules_of_library(module: torch.nn.Module, how: str) -> Iterator[Value]:
    """The modules inside a module of torch, such as a Sequential, that are not torch's and that its forward calls."""
    if is_library_module(type(module).__module__):
        for name, inner in vars(module).get("_modules", {}).items():
            if inner is not None and not is_library_module(type(inner).__module__):
                yield Known(inner, f"{how}.{name}")
            elif inner is not None:
                yield from _modules_of_library(inner, f"{how}.{name}")


def bound_by_get(obj: object) -> Binder | None:
    """The function of a bound `function.__get__`, which binds its argument; None if *obj* is not such a method."""
    if not isinstance(obj, MethodWrapperType) or obj.__name__ != "__get__":
        return None
    owner = obj.__self__
    if isinstance(owner, staticmethod):
        return lambda _: Known(owner.__func__, "a static method")
    if isinstance(owner, classmethod):
        return lambda args: Partial(Known(owner.__func__, "a class method"), (args[1] if len(args) > 1 else _CLASS,))
    if isinstance(owner, FunctionType):
        return lambda args: Partial(Known(owner, "a method"), args[:1])
    return None


_CLASS = (Unknown("the class is known at run time"),)


def _contents(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # not set yet: there is nothing to follow


def _is_of_library(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return not isinstance(function, FunctionType) or is_library_function(function)
