# SPDX-License-Identifier: Apache-2.0
"""What a code object does and which names it can read, the same in every process."""

from __future__ import annotations

import dis
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterator


_SILENT = ("CACHE", "PUSH_NULL", "EXTENDED_ARG", "RESUME", "COPY_FREE_VARS", "MAKE_CELL", "NOP")


@dataclass(frozen=True)
class Import:
    """An `import` statement inside a function: module name, leading dots, the variable it binds if it binds one."""

    module: str
    level: int
    variable: str


@dataclass(frozen=True)
class CodeNames:
    """Names that a code object and the functions nested in it use.

    Attributes:
        globals: names read as globals.
        mentioned: every name and every string constant, a superset of the attributes it can read; `getattr(ns, "k")`
            is in it.
        whole: variables that are used other than for an attribute: passed on, stored, called.
        imports: modules it imports when it runs.
    """

    globals: tuple[str, ...]
    mentioned: frozenset[str]
    whole: frozenset[str]
    imports: tuple[Import, ...]


def code_form(code: CodeType) -> tuple[object, ...]:
    """The behaviour of *code*, without line numbers and file names: moving a function does not change it."""
    return (
        code.co_name,
        code.co_code,
        code.co_exceptiontable,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        code.co_consts,
    )


def code_names(code: CodeType) -> CodeNames:
    """Names used by *code* and by the functions nested in it."""
    read: dict[str, None] = {}
    imports: dict[Import, None] = {}
    mentioned: set[str] = set()
    whole: set[str] = set()
    for one in _nested(code):
        mentioned.update(one.co_names)
        mentioned.update(constant for constant in one.co_consts if isinstance(constant, str))
        instructions = [one for one in dis.get_instructions(one) if one.opname not in _SILENT]
        for at, instruction in enumerate(instructions):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                read[str(instruction.argval)] = None
            if instruction.opname == "IMPORT_NAME":
                # The compiler pushes the level and the list of names right before, in this order.
                level = instructions[at - 2].argval
                after = instructions[at + 1]
                variable = str(after.argval) if after.opname.startswith("STORE_") else ""
                imports[Import(str(instruction.argval), level if isinstance(level, int) else 0, variable)] = None
            whole.update(_used_whole(instructions, at))
    return CodeNames(tuple(read), frozenset(mentioned), frozenset(whole), tuple(imports))


def _used_whole(instructions: list[dis.Instruction], at: int) -> tuple[str, ...]:
    """Variables that this instruction loads for something else than `variable.name` or `getattr(variable, "name")`."""
    loaded = instructions[at]
    if not loaded.opname.startswith("LOAD_") or loaded.opname.split("_")[1] not in ("GLOBAL", "NAME", "DEREF", "FAST"):
        return ()
    # Python 3.13 loads two variables in one instruction; the first of them has no attribute next to it.
    names = loaded.argval if isinstance(loaded.argval, tuple) else (loaded.argval,)
    following = instructions[at + 1] if at + 1 < len(instructions) else None
    before = instructions[at - 1].argval if at else None
    if following is not None and following.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return tuple(str(name) for name in names[:-1])
    if before == "getattr" and following is not None and following.opname.startswith("LOAD_CONST"):
        return tuple(str(name) for name in names[:-1])
    return tuple(str(name) for name in names)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
