# SPDX-License-Identifier: Apache-2.0
"""Kernels that Inductor can write down again.

Inductor copies a kernel into the module it generates: its source, and what its bare global names refer to
(`user_defined_triton_kernel_transitive_closure_source_code`, `torch/_inductor/codegen/wrapper.py`, torch 2.10 to 2.13).
That loses closures, functions that are called by another name than they were defined with, functions that are reached
through a module, aliases of `triton.language` other than `tl`, and functions passed as a constexpr. If two modules have
a global of the same name, the first is used for both. For example

    def make(activation):            # activation is the JITFunction relu
        @triton.jit
        def kernel(x, out): ... activation(value) ...

Such a kernel is made a second time, with every name that it and its callees use in one private namespace. The user's
kernel stays as it is. Kernels that are equal, such as those a factory makes at each call, become one, so that
Inductor writes them once.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from magi_tritonwrap._identity.code import code_names
from magi_tritonwrap._torch_compat.kernels import new_kernel, settings_of


_ATOMS = (bool, int, float, str, type(None), tl.dtype)
_REMEMBERED = 512
_LOCK = threading.Lock()
_made: OrderedDict[Hashable, tuple[JITFunction[Any], object]] = OrderedDict()


def self_contained(kernel: JITFunction[Any], baked: Mapping[str, JITFunction[Any]] | None = None) -> JITFunction[Any]:
    """An equal kernel that Inductor can write down: *kernel* itself if Inductor can write that.

    Args:
        kernel: any JITFunction.
        baked: functions passed for constexpr parameters; the result has no such parameters and calls them directly.
    """
    functions = dict(baked or {})
    key = (key_of(kernel), tuple((name, key_of(function)) for name, function in functions.items()))
    with _LOCK:
        if key not in _made:
            found = _Rewriting(kernel, functions)
            # Keys hold ids, so the objects that they stand for must live as long as the entry.
            _made[key] = (found.kernel() if found.is_needed else kernel, (kernel, functions))
            if len(_made) > _REMEMBERED:
                _made.popitem(last=False)
        _made.move_to_end(key)
        return _made[key][0]


def functions_of(kernel: JITFunction[Any]) -> list[JITFunction[Any]]:
    """*kernel* and the functions that it calls, directly or through others."""
    return [function for _, function in _Rewriting(kernel, {}).functions.values()]


def _free_values(kernel: JITFunction[Any]) -> dict[str, Any]:
    """The values that a kernel's bare names refer to outside the kernel, by name, without builtins."""
    function: FunctionType = kernel.fn
    scope = function.__globals__
    values = {name: scope[name] for name in code_names(function.__code__).globals if name in scope}
    return {**values, **inspect.getclosurevars(function).nonlocals}


def key_of(value: Any, path: tuple[int, ...] = ()) -> Hashable:
    """A key that is equal for kernels with the same code, settings and surroundings.

    Other objects are compared by identity.
    """
    if isinstance(value, tl.constexpr):
        return ("constexpr", key_of(value.value, path))
    if isinstance(value, _ATOMS):
        return (type(value), repr(value))
    if not isinstance(value, JITFunction) or id(value) in path:
        return id(value)
    free = sorted(_free_values(value).items())
    return (
        value.fn.__code__,
        value.src,
        str(settings_of(value)),
        repr(value.fn.__defaults__),
        tuple((name, key_of(item, (*path, id(value)))) for name, item in free),
    )


@dataclass
class _Rewriting:
    """A kernel with its callees, and a name for each value that they refer to."""

    root: JITFunction[Any]
    baked: dict[str, JITFunction[Any]]
    names: dict[str, Any] = field(default_factory=dict)
    functions: dict[int, tuple[str, JITFunction[Any]]] = field(default_factory=dict)
    is_needed: bool = False

    def __post_init__(self) -> None:
        self.is_needed = bool(self.baked)
        self._visit(self.root, self.root.fn.__name__)
        for name, function in self.baked.items():
            self._visit(function, name)

    def _visit(self, function: JITFunction[Any], used_as: str) -> None:
        if id(function) in self.functions:
            self.is_needed |= self.functions[id(function)][0] != used_as
            return
        name = self.claim(function.fn.__name__, function)
        self.functions[id(function)] = (name, function)
        self.is_needed |= name != used_as or function.fn.__closure__ is not None or _needs_its_module(function)
        for free_name, value in self._referred(function):
            if _language_path(value) is not None:
                self.is_needed |= _language_path(value) != free_name
            elif isinstance(value, JITFunction):
                self._visit(value, free_name)
            elif not isinstance(value, ModuleType):
                self.is_needed |= self.claim(free_name, value) != free_name

    def _referred(self, function: JITFunction[Any]) -> list[tuple[str, Any]]:
        """The free names of a function with their values; a name that it reads from a module is `module.name`."""
        values = _free_values(function)
        found = list(values.items())
        for node in ast.walk(ast.parse(function.src)):
            reached = _through_module(node, values)
            if reached is not None:
                found.append((ast.unparse(node), reached))
        return found

    def claim(self, name: str, value: Any) -> str:
        """A name that stands for *value* only: *name*, or *name* with a number."""
        plain = name.replace(".", "_")
        for candidate in (plain, *(f"{plain}_{number}" for number in range(1, 1000))):
            taken = self.names.setdefault(candidate, value)
            if taken is value or key_of(taken) == key_of(value):
                return candidate
        raise AssertionError(name)

    def kernel(self) -> JITFunction[Any]:
        """The kernel, made again in a namespace of its own."""
        namespace: dict[str, Any] = {"__name__": self.root.fn.__module__, **self.names}
        made: dict[int, JITFunction[Any]] = {}
        for _, function in self.functions.values():
            namespace.update({key: value for key, value in _free_values(function).items() if key not in namespace})
        namespace.update({"tl": tl, "triton": triton})
        for name, function in self.functions.values():
            made[id(function)] = namespace[name] = self._made_again(name, function, namespace)
        return made[id(self.root)]

    def _made_again(self, name: str, function: JITFunction[Any], namespace: dict[str, Any]) -> JITFunction[Any]:
        is_root = function is self.root
        dropped = frozenset(self.baked) if is_root else frozenset()
        tree = ast.parse(function.src)
        definition = _Renamer(self, _free_values(function), dropped).visit(tree.body[0])
        definition.name = name
        _plain_parameters(function, definition, dropped)
        ast.fix_missing_locations(tree)
        source = ast.unparse(tree)
        return new_kernel(function, _compiled(function, tree, namespace, is_root=is_root), source)


class _Renamer(ast.NodeTransformer):
    """Gives the free names in one function the names that the rewriting chose."""

    def __init__(self, rewriting: _Rewriting, free: Mapping[str, Any], dropped: frozenset[str]) -> None:
        self._rewriting = rewriting
        self._free = free
        self._dropped = dropped

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self._dropped:
            return ast.Name(self._name_of(self._rewriting.baked[node.id]), node.ctx)
        if node.id not in self._free or not isinstance(node.ctx, ast.Load):
            return node
        value = self._free[node.id]
        path = _language_path(value)
        if path is not None:
            return ast.parse(path, mode="eval").body
        if isinstance(value, ModuleType):
            return node
        return ast.Name(self._name_of(value, node.id), node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        reached = _through_module(node, self._free)
        if reached is not None:
            return ast.Name(self._name_of(reached, ast.unparse(node)), node.ctx)
        self.generic_visit(node)
        return node

    def _name_of(self, value: Any, name: str = "") -> str:
        if id(value) in self._rewriting.functions:
            return self._rewriting.functions[id(value)][0]
        return self._rewriting.claim(name, value)


def _language_path(value: Any) -> str | None:
    """The name of a part of Triton's language in generated code: `tl`, `tl.math`, `tl.sum`; None for anything else."""
    if isinstance(value, ModuleType):
        if value.__name__ == "triton":
            return "triton"
        is_language = (value.__name__ + ".").startswith("triton.language.")
        return value.__name__.replace("triton.language", "tl", 1) if is_language else None
    if isinstance(value, JITFunction):
        name: str = value.fn.__name__
        return f"tl.{name}" if getattr(tl, name, None) is value else None
    return None


def _through_module(node: ast.AST, free: Mapping[str, Any]) -> Any:
    """The Triton function or constexpr that `module.name` means, for a module that is not Triton's."""
    match node:
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            module = free.get(name)
            if isinstance(module, ModuleType) and _language_path(module) is None:
                value = getattr(module, attribute, None)
                return value if isinstance(value, JITFunction | tl.constexpr) else None
    return None


def _needs_its_module(function: JITFunction[Any]) -> bool:
    """Whether the `def` line names something of its module, in a default or an annotation."""
    definition = ast.parse(function.src).body[0]
    assert isinstance(definition, ast.FunctionDef)
    arguments = definition.args
    defaults = [default for default in (*arguments.defaults, *arguments.kw_defaults) if default is not None]
    parameters = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    annotations = [parameter.annotation for parameter in parameters if parameter.annotation is not None]
    named = {node.id for one in (*defaults, *annotations) for node in ast.walk(one) if isinstance(node, ast.Name)}
    return not all(name in ("tl", "triton") or hasattr(builtins, name) for name in named)


def _plain_parameters(kernel: JITFunction[Any], definition: ast.FunctionDef, dropped: frozenset[str]) -> None:
    """Remove from *definition* its defaults, *dropped* parameters, and annotations that need a module."""
    annotations = {parameter.name: parameter.annotation for parameter in kernel.params}
    arguments = definition.args
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    arguments.args = [argument for argument in arguments.args if argument.arg not in dropped]
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        text = annotations.get(argument.arg, "")
        written = ast.parse("tl.constexpr", mode="eval").body if "constexpr" in text else ast.Constant(text)
        argument.annotation = written if text else None
    definition.returns = None
    definition.decorator_list = []


def _compiled(kernel: JITFunction[Any], tree: ast.Module, namespace: dict[str, Any], *, is_root: bool) -> FunctionType:
    """The function that *tree* defines, with the line numbers of the original in its file."""
    original: FunctionType = kernel.fn
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    before = itertools.takewhile(lambda text: not text.lstrip().startswith("def "), kernel.raw_src)
    line = int(kernel.starting_line_number) + len(list(before))
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr | ast.arg | ast.keyword | ast.alias):
            # The columns of several lines are not a range on one line.
            node.lineno = node.end_lineno = line
            node.col_offset = node.end_col_offset = 0
    exec(compile(tree, original.__code__.co_filename, "exec", dont_inherit=True), namespace)  # noqa: S102
    function = namespace.pop(definition.name)
    assert isinstance(function, FunctionType)
    function.__module__ = original.__module__
    # Triton compiles two callees with the same qualified name as one.
    function.__qualname__ = original.__qualname__ if is_root else definition.name
    return function
