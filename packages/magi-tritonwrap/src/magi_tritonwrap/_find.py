# SPDX-License-Identifier: Apache-2.0
"""Find the Triton kernels that the code of a function leads to: the walk of the cache key, without the key.

Where the walk meets no kernel, the calls in the code tell whether only a run can say what it launches. Names are read
from code objects and followed to the objects that are stored under them. Nothing of the user's runs.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
import triton
from torch._ops import OpOverload, OpOverloadPacket

from ._cache_key import OpWalk
from ._identity.code import CodeNames, code_names, digest, nested
from ._identity.library import Standing, is_library_module, root_of, standing_of
from ._identity.members import MISSING, contents_of, is_a, members_of
from ._identity.walk import Place
from ._kernel.bodies import as_overload, body_of_op, ops_mentioned
from ._kernel.kernels import as_kernel, is_kernel
from ._kernel.report import FoundKernel, InnerOp, KernelReport, UnresolvedLaunch
from ._torch_compat.kernels import TRITON_WRAPPERS, kernel_in_wrapper
from ._torch_compat.operators import NAMESPACES_OF_TORCH, body_of_custom_op, has_decomposition_rule, is_collective
from ._torch_compat.tracing import TELL_FAKE
from .errors import UnsupportedKernelError


UNKNOWN: Any = object()
"""Stands for a value that only a run can tell."""
DEFINED: Any = object()
"""Stands for a function or a class that the code itself defines."""

_STREAMS = frozenset(
    ("_io", "io", "os", "posix", "nt", "shutil", "subprocess", "socket", "_socket", "ssl", "http", "urllib", "requests")
) | frozenset(("sqlite3", "tempfile", "pathlib", "multiprocessing", "asyncio", "select", "signal", "ftplib", "smtplib"))
_QUESTIONS = ("get", "is_", "cpu_count", "fspath", "environ")
_METHODS_OF_STREAMS = frozenset(
    ("write", "writelines", "write_text", "write_bytes", "read", "readline", "readlines", "read_text", "read_bytes")
) | frozenset(("unlink", "mkdir", "rmdir", "touch", "flush", "send", "sendall", "recv", "connect", "accept"))


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        text: what is called, as far as names tell: `runner.kernels[...]`.
        file: file of the call.
        line: its line.
        callee: the object that is called; `MISSING` where its name has no value yet, and `UNKNOWN`.
        method: for an attribute, its name.
        has_grid: whether it is written as a launch, `something[grid](...)` or `something.run(..., grid=grid)`.
    """

    text: str
    file: str
    line: int
    callee: Any
    method: str
    has_grid: bool

    @property
    def effect(self) -> str:
        """What the call does besides computing, in words; empty if it does nothing else."""
        if self.callee is UNKNOWN:
            return "may read or write a stream" if self.method in _METHODS_OF_STREAMS else ""
        if self.callee is print or self.callee is input:
            return "writes to the terminal" if self.callee is print else "reads from the terminal"
        if self.callee is torch.save or self.callee is torch.load:
            return "reads or writes a file"
        if is_a(self.callee, (OpOverload, OpOverloadPacket)):
            return "communicates with other ranks" if is_collective(as_overload(self.callee)) else ""
        module, name = _module_and_name(self.callee)
        if name.startswith(_QUESTIONS):
            return ""
        if module.startswith("torch.distributed.") and not is_a(self.callee, type):
            return "communicates with other ranks"
        if (module, name) == ("time", "sleep"):
            return "waits"
        return "reads or writes files or streams" if module.partition(".")[0] in _STREAMS else ""


def _module_and_name(obj: Any) -> tuple[str, str]:
    """The module and the name of a function or class, or of the class of any other object."""
    if is_a(obj, FunctionType):
        return str(obj.__globals__.get("__name__", "")), obj.__name__
    if is_a(obj, (BuiltinFunctionType, MethodType)) and not is_a(obj.__self__, ModuleType):
        owner = obj.__self__ if is_a(obj.__self__, type) else type(obj.__self__)
        return owner.__module__, obj.__name__
    if is_a(obj, (BuiltinFunctionType, type)):
        return str(obj.__module__), obj.__name__
    return type(obj).__module__, ""


def calls_of(function: FunctionType) -> Iterator[Call]:
    """The calls in the code of *function*, and in that of the functions inside it."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from _Code(
        function.__code__, function, {name: (*contents_of(cell), MISSING)[0] for name, cell in cells}
    ).calls()


class _Code:
    """One code object of a function. It has the variables of the functions around it."""

    def __init__(self, code: CodeType, function: FunctionType, outer: Mapping[str, Any]) -> None:
        self._code, self._function = code, function
        self._names = dict(outer)  # of variables, with their values
        self._chains: dict[object, list[dis.Instruction]] = {}  # the loads and calls that begin at one place
        self._grids: set[int] = set()  # offsets of subscripts whose index looks like a grid
        self._module = ""  # the last one that was imported

    def calls(self) -> Iterator[Call]:
        before: dis.Instruction | None = None
        for one in dis.get_instructions(self._code):
            if one.opname in ("CACHE", "EXTENDED_ARG", "PRECALL", "PUSH_NULL"):
                continue
            if one.opname == "IMPORT_NAME":
                self._module = str(one.argval)
            elif one.opname.startswith("STORE_") and before is not None and type(one.argval) is str:
                value = self._stored(before)
                # A variable that is set twice has two values.
                self._names[one.argval] = value if self._names.get(one.argval, value) is value else UNKNOWN
            elif one.opname in ("CALL", "CALL_KW", "CALL_FUNCTION_EX") and not self._is_of_python(one):
                yield self._call(one, before)
            # What pytest keeps of an assert in a variable was computed at the same place.
            is_kept = str(one.argval).startswith("@py_assert")
            if one.opname.startswith(("LOAD_", "BUILD_", "CALL", "BINARY_")) and not is_kept:
                self._chains.setdefault(_start(one), []).append(one)
                if _subscripts(one) and before is not None and _is_grid(before):
                    self._grids.add(one.offset)
            before = one
        for inner in (constant for constant in self._code.co_consts if isinstance(constant, CodeType)):
            outer = {name: self._names[name] for name in inner.co_freevars if name in self._names}
            yield from _Code(inner, self._function, outer).calls()

    def _is_of_python(self, call: dis.Instruction) -> bool:
        """Whether *call* stands for an `assert`, also as pytest writes it, the end of a `with`, or a comprehension."""
        for one in self._chains.get(_start(call), ()):
            is_artificial = one.opname == "LOAD_ASSERTION_ERROR" or one.argval in (None, AssertionError, "@pytest_ar")
            if _end(one) == _end(call) and (is_artificial or isinstance(one.argval, CodeType)):
                return True
        return False

    def _call(self, call: dis.Instruction, before: dis.Instruction | None) -> Call:
        # A decorator is called where its name is.
        here = [one for one in self._chains.get(_start(call), ()) if _end(one) <= _end(call)]
        chain = [one for one in here if _end(one) < _end(call) or _is_name(one)]
        text, callee = self._value(chain)
        has_grid_named = before is not None and type(before.argval) is tuple and "grid" in before.argval
        is_launch = has_grid_named or (bool(chain) and chain[-1].offset in self._grids)
        return Call(
            text,
            self._code.co_filename,
            _start(call)[0] or self._code.co_firstlineno,
            callee,
            str(chain[-1].argval) if chain and _is_attribute(chain[-1]) else "",
            is_launch,
        )

    def _stored(self, before: dis.Instruction) -> Any:
        """The value that a variable gets, given the instruction before it is stored."""
        if before.opname in ("IMPORT_NAME", "IMPORT_FROM"):
            value = sys.modules.get(self._module, UNKNOWN)
            return _attribute(value, str(before.argval)) if before.opname == "IMPORT_FROM" else value
        if before.opname in ("MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE"):
            return DEFINED
        chain = self._chains.get(_start(before), [])
        return self._value(chain)[1] if chain and chain[-1] is before else UNKNOWN

    def _value(self, chain: list[dis.Instruction]) -> tuple[str, Any]:
        """The text of an expression such as `a.b[...].c`, given the instructions that compute it, and its value."""
        text, value = "(...)" if not chain or _is_attribute(chain[0]) else "", UNKNOWN
        for one in chain:
            if _is_attribute(one):
                text, value = f"{text}.{one.argval}", _attribute(value, str(one.argval))
            elif one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                found = self._function.__globals__.get(one.argval, MISSING)
                text, value = str(one.argval), getattr(builtins, one.argval, MISSING) if found is MISSING else found
            elif one.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT")):
                name = one.argval[0] if type(one.argval) is tuple else one.argval
                text, value = str(name), self._names.get(name, UNKNOWN)
            elif one.opname == "LOAD_BUILD_CLASS":
                text, value = "class", DEFINED
            elif one.opname.startswith("CALL"):
                text, value = f"{text}(...)", DEFINED if value is DEFINED else UNKNOWN
            else:
                text, value = f"{text}[...]" if _subscripts(one) else f"{text}(...)", UNKNOWN
        return text, value


def _start(one: dis.Instruction) -> tuple[int | None, int | None]:
    return (None, None) if one.positions is None else (one.positions.lineno, one.positions.col_offset)


def _end(one: dis.Instruction) -> tuple[int, int]:
    at = one.positions
    return (0, 0) if at is None else (at.end_lineno or 0, at.end_col_offset or 0)


def _is_name(one: dis.Instruction) -> bool:
    return _is_attribute(one) or one.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF"))


def _is_attribute(one: dis.Instruction) -> bool:
    return one.opname.endswith(("ATTR", "METHOD"))


def _subscripts(one: dis.Instruction) -> bool:
    return one.opname == "BINARY_SUBSCR" or (one.opname == "BINARY_OP" and one.argrepr == "[]")


def _is_grid(index: dis.Instruction) -> bool:
    """Whether *index* makes a tuple or a function, or loads a grid, and not the key of a table."""
    is_tuple = index.opname in ("BUILD_TUPLE", "MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE") or type(index.argval) is tuple
    return is_tuple or (index.opname.startswith("LOAD_") and "grid" in str(index.argval))


def _attribute(value: Any, name: str) -> Any:
    """What is stored in *value* as *name*; `UNKNOWN` for what code of its class would compute."""
    if value is MISSING or value is UNKNOWN or value is DEFINED:
        return value if value is MISSING else UNKNOWN
    if is_a(value, (type(torch.ops), type(torch.ops.aten))):
        return getattr(value, name, UNKNOWN)  # made by torch when it is asked for
    if is_a(value, ModuleType) and name not in vars(value):
        absent = UNKNOWN if is_library_module(value.__name__) else MISSING
        return sys.modules.get(f"{value.__name__}.{name}", absent)
    found = inspect.getattr_static(value, name, UNKNOWN)
    return UNKNOWN if isinstance(found, property) else found


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
    given: object = extra
    listed = tuple(given) if isinstance(given, Iterable) else (given,)
    for kernel in listed:
        if not is_kernel(kernel):
            fix = "Give a list of what @triton.jit, @triton.autotune or @triton.heuristics returned."
            raise UnsupportedKernelError(f"an extra kernel is {kernel!r} (a {type(kernel).__name__}). {fix}")
    return _found((fn, *_class_of_method(fn), *classes.values()), listed)


def _class_of_method(fn: Any) -> Iterator[type]:
    """The class of a method that is given without its object: its `self` is an instance of that."""
    if is_a(fn, FunctionType):
        found: Any = sys.modules.get(fn.__module__)
        for name in fn.__qualname__.split(".")[:-1]:
            found = vars(found).get(name) if is_a(found, (ModuleType, type)) else None
        if is_a(found, type) and vars(found).get(fn.__name__) is fn:
            yield found


def _found(roots: tuple[Any, ...], listed: tuple[Any, ...] = (), inside: frozenset[str] = frozenset()) -> KernelReport:
    """The kernels *listed*, and what the code of *roots* leads to; *inside* are the ops whose bodies led here."""
    walk = _Finder(frozenset(map(root_of, roots)))
    places = {"listed in extra=": listed, "the body": roots}
    walk.result((value, Place(text)) for text, values in places.items() for value in values)
    functions = [one for one in walk.met() if is_a(one, FunctionType) and standing_of(one) not in _NOT_FOLLOWED]
    found = [*walk.kernels(), *(kernel for function in functions for kernel in _made_by(function))]
    inner_ops = []
    for name, how in walk.ops.items():
        body = body_of_custom_op(name)
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
        effects=tuple(f"{call.text}(...) {call.effect} ({call.file}:{call.line})" for call in calls if call.effect),
        wraps=walk.wraps,
        tells_fake=walk.tells_fake,
    )


def _why_whole(op: str, report: KernelReport | None) -> str:
    """Why the launches of an opaque op cannot be seen through where another op calls it; empty if they can."""
    if report is None:
        return "torch keeps no Python body of it"
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
        self.ops: dict[str, str] = {}  # how each is reached
        self.wraps = self.tells_fake = False
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
        self.tells_fake |= any(value is one for one in TELL_FAKE)
        by_name = self._reader is None or (is_a(self._reader, FunctionType) and id(self._reader) in self._named)
        if by_name and not place.text.endswith(_INSIDE):
            self._named.add(id(value))
        return super().form(value, place)

    def _description(self, value: Any, place: Place) -> str:
        self._reader = value
        self.wraps |= any(value is wrapper for wrapper in TRITON_WRAPPERS)
        return super()._description(value, place)

    def unordered(self, values: Iterable[Any], place: Place) -> list[str]:
        return [self.form(value, place.inner(" (an item)")) for value in values]

    def unloaded(self, place: Place, names: list[str]) -> str:  # noqa: ARG002 - for those that want a digest
        code = self._reader.__code__
        for name in names:
            why = f"the module {name!r} is imported by the body and not loaded yet"
            launch = UnresolvedLaunch(f"import {name}", why, code.co_filename, code.co_firstlineno, is_launch=False)
            self._unloaded.append(launch)
        return digest("unloaded")

    def mentioned(self, names: CodeNames, place: Place) -> Iterator[str]:
        self.wraps |= not {"wrap_triton", "capture_triton"}.isdisjoint(names.mentioned)
        self.tells_fake |= not {one.__name__ for one in TELL_FAKE}.isdisjoint(names.mentioned)
        for op in ops_mentioned(names):
            yield self.form(op, place.of(f"{op} called by {place.text}"))

    def special_form(self, value: Any, place: Place) -> str | None:
        kernel = kernel_in_wrapper(value)
        self.wraps |= kernel is not None
        kernel = value if kernel is None else kernel
        if is_kernel(kernel):
            self._kernels.append((value, kernel, place.text))
            return digest("kernel")
        if (op := as_overload(value)) is not None:
            name = op.name()
            body = body_of_op(name)
            if body is not None:
                return self.form(body, place)
            if op.namespace not in NAMESPACES_OF_TORCH:
                self.ops.setdefault(name, place.text)
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
