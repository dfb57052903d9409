# SPDX-License-Identifier: Apache-2.0
"""The calls in the code of a function: what each one calls, as far as names tell, and what it does besides computing.

Names are read from code objects and followed to the objects that are stored under them. Nothing of the user's runs.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from ._identity.library import is_library_module
from ._identity.members import MISSING, contents_of, is_a
from ._kernel.bodies import as_overload
from ._torch_compat.operators import is_collective


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
            if one.opname.startswith(("LOAD_", "BUILD_", "CALL", "BINARY_")):
                self._chains.setdefault(_start(one), []).append(one)
                if _subscripts(one) and before is not None and _is_grid(before):
                    self._grids.add(one.offset)
            before = one
        for inner in (constant for constant in self._code.co_consts if isinstance(constant, CodeType)):
            outer = {name: self._names[name] for name in inner.co_freevars if name in self._names}
            yield from _Code(inner, self._function, outer).calls()

    def _is_of_python(self, call: dis.Instruction) -> bool:
        """Whether *call* stands for an `assert`, the end of a `with`, or a comprehension."""
        for one in self._chains.get(_start(call), ()):
            is_artificial = one.opname == "LOAD_ASSERTION_ERROR" or one.argval in (None, AssertionError)
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
    if is_a(value, ModuleType) and name not in vars(value):
        absent = UNKNOWN if is_library_module(value.__name__) else MISSING
        return sys.modules.get(f"{value.__name__}.{name}", absent)
    found = inspect.getattr_static(value, name, UNKNOWN)
    return UNKNOWN if isinstance(found, property) else found
