# SPDX-License-Identifier: Apache-2.0
"""The scope of a call: parameters with the arguments bound, closure, and what the body imports."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

from magi_tritonwrap._identity.members import MISSING, attribute

from .source import FunctionNode, function_node
from .values import Known, New, Scope, Unknown, Value


def constructor(cls: type) -> Any:
    """The `__init__` that making an instance of *cls* runs."""
    return inspect.getattr_static(cls, "__init__")


def function_scope(
    function: FunctionType, args: tuple[tuple[Value, ...], ...], kwargs: Mapping[str, tuple[Value, ...]]
) -> Scope | None:
    node = function_node(function)
    if node is None:
        return None
    names: dict[str, tuple[Value, ...]] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            names[name] = (Known(cell.cell_contents, f"closure variable '{name}'"),)
        except ValueError:
            names[name] = (Unknown(f"the closure variable '{name}' is not set yet", unread=True),)
    defaults = {
        parameter.name: (Known(parameter.default, f"default of '{parameter.name}'"),)
        for parameter in inspect.signature(function, follow_wrapped=False).parameters.values()
        if parameter.default is not parameter.empty
    }
    names.update(parameters(node, args, kwargs, defaults))
    cls = None if args else class_of_method(function)
    if cls is not None and node.args.args:
        this = node.args.args[0].arg
        # A subclass may have other methods, so `self` may be something else too.
        names[this] = (New(cls, None), *names[this])
    return Scope(node, function.__code__.co_filename, function.__globals__, names)


def class_of_method(function: FunctionType) -> type | None:
    """The class that has *function* as a method of its instances, as its name says; None where there is none."""
    path, _, name = function.__qualname__.rpartition(".")
    found: Any = function.__globals__.get(path.partition(".")[0]) if path else None
    for part in path.split(".")[1:]:
        found = inspect.getattr_static(found, part, None)
    method = vars(found).get(name) if isinstance(found, type) else None
    return found if isinstance(method, FunctionType) and inspect.unwrap(method) is function else None


def parameters(
    node: FunctionNode,
    args: tuple[tuple[Value, ...], ...],
    kwargs: Mapping[str, tuple[Value, ...]],
    defaults: Mapping[str, tuple[Value, ...]],
) -> dict[str, tuple[Value, ...]]:
    positional = [parameter.arg for parameter in (*node.args.posonlyargs, *node.args.args)]
    named = [*positional, *(parameter.arg for parameter in node.args.kwonlyargs)]
    values: dict[str, tuple[Value, ...]] = {
        name: (Unknown(f"the parameter '{name}' is known at run time"),) for name in named
    }
    for variadic in (node.args.vararg, node.args.kwarg):
        if variadic is not None:
            values[variadic.arg] = (Unknown(f"the parameter '{variadic.arg}' is known at run time"),)
    values.update({name: value for name, value in defaults.items() if name in values})
    values.update(zip(positional, args, strict=False))
    values.update({name: value for name, value in kwargs.items() if name in named})
    return values


def imported(node: ast.AST, alias: ast.alias, scope: Scope) -> tuple[Value, ...]:
    """What an import in the body binds, if the module is loaded already. Nothing is imported here."""
    if isinstance(node, ast.Import):
        name = alias.name if alias.asname else alias.name.split(".")[0]
        return loaded_module(name)
    if not isinstance(node, ast.ImportFrom):
        return ()
    package = scope.globals.get("__package__") or scope.globals.get("__name__", "")
    base = ".".join(str(package).split(".")[: len(str(package).split(".")) - node.level + 1]) if node.level else ""
    name = ".".join(part for part in (base, node.module or "") if part)
    found = sys.modules.get(name)
    if found is None:
        return (Unknown(f"the module '{name}' is imported by the body and not loaded yet", unread=True),)
    taken = attribute(found, alias.name)
    if taken is not MISSING:
        return (Known(taken, f"{name}.{alias.name}"),)
    if f"{name}.{alias.name}" not in sys.modules and attribute(found, "__getattr__") is not MISSING:
        return (Unknown(f"{name}.{alias.name} is computed by its __getattr__", unread=True),)
    return loaded_module(f"{name}.{alias.name}")


def loaded_module(name: str) -> tuple[Value, ...]:
    """The module *name* if it is loaded, otherwise an `Unknown`."""
    found = sys.modules.get(name)
    if isinstance(found, ModuleType):
        return (Known(found, f"module '{name}'"),)
    return (Unknown(f"the module '{name}' is imported by the body and not loaded yet", unread=True),)
