# SPDX-License-Identifier: Apache-2.0
"""What a code object does and which names it can read, the same in every process."""

from __future__ import annotations

import dis
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Import:
    """An `import` statement inside a function: module name, and the number of leading dots."""

    module: str
    level: int


@dataclass(frozen=True)
class CodeNames:
    """Names that a code object and the functions nested in it use.

    Attributes:
        globals: names read as globals.
        mentioned: every name and every string constant, a superset of the attributes it can read; `getattr(ns, "k")`
            is in it.
        imports: modules it imports when it runs.
    """

    globals: tuple[str, ...]
    mentioned: frozenset[str]
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
    for one in _nested(code):
        mentioned.update(one.co_names)
        mentioned.update(constant for constant in one.co_consts if isinstance(constant, str))
        instructions = list(dis.get_instructions(one))
        for at, instruction in enumerate(instructions):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                read[str(instruction.argval)] = None
            elif instruction.opname == "IMPORT_NAME":
                # The compiler pushes the level and the list of names right before, in this order.
                level = instructions[at - 2].argval
                imports[Import(str(instruction.argval), level if isinstance(level, int) else 0)] = None
    return CodeNames(tuple(read), frozenset(mentioned), tuple(imports))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
