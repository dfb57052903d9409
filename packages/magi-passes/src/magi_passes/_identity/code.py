# SPDX-License-Identifier: Apache-2.0
"""What a code object does and which names it can read, the same in every process."""

from __future__ import annotations

import dis
import functools
import hashlib
from dataclasses import dataclass
from types import CodeType


_READ_A_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_READ_AN_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")
# Methods of containers that tell nothing about what is in them.
_WRITES = frozenset({"add", "append", "appendleft", "clear", "discard", "extend", "insert", "update"})
_SILENT = ("CACHE", "PUSH_NULL", "EXTENDED_ARG", "RESUME", "COPY_FREE_VARS", "MAKE_CELL", "NOP")


@dataclass(frozen=True)
class Import:
    """An `import` statement inside a function: module, leading dots, names taken from it, the variable it binds."""

    module: str
    level: int
    names: tuple[str, ...]
    variable: str


@dataclass(frozen=True)
class CodeNames:
    """Names that a code object and the functions nested in it use.

    Attributes:
        globals: Names read as globals.
        mentioned: Every name and every string constant, a superset of the attributes it can read; `getattr(ns, "k")`
            is in it.
        attributes: Names that it asks objects for.
        whole: Variables that are used other than for an attribute: passed on, stored, called.
        asked: Variables with the attributes that they are used for.
        imports: Modules it imports when it runs.
    """

    globals: tuple[str, ...]
    mentioned: frozenset[str]
    attributes: frozenset[str]
    whole: frozenset[str]
    asked: frozenset[tuple[str, str]]
    imports: tuple[Import, ...]

    def is_only_written(self, name: str) -> bool:
        """Whether a list, set or dict of this name is a log: the code puts something in and never looks."""
        return name not in self.whole and {used for variable, used in self.asked if variable == name} <= _WRITES


def digest(kind: str, *parts: str) -> str:
    """A sha256 of *parts*, in which ``("ab", "c")`` and ``("a", "bc")`` differ."""
    hasher = hashlib.sha256(kind.encode())
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(f":{len(data)}:".encode() + data)
    return hasher.hexdigest()


@functools.lru_cache(maxsize=16384)
def code_digest(code: CodeType) -> str:
    """What *code* does, without line numbers and file names: moving a function does not change it."""
    settings = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    described = (_constant(part) for part in (*settings, *names, *code.co_consts))
    return digest("code", code.co_name, code.co_code.hex(), code.co_exceptiontable.hex(), *described)


def _constant(value: object) -> str:
    if isinstance(value, CodeType):
        return code_digest(value)
    if isinstance(value, tuple):
        return digest("tuple", *map(_constant, value))
    if isinstance(value, frozenset):
        return digest("frozenset", *sorted(map(_constant, value)))
    return digest(type(value).__name__, value.hex() if isinstance(value, float) else repr(value))


@functools.lru_cache(maxsize=16384)
def code_names(code: CodeType) -> CodeNames:
    """Names used by *code* and by the functions nested in it."""
    read: dict[str, None] = {}
    imports: dict[Import, None] = {}
    mentioned: set[str] = set()
    attributes: set[str] = set()
    whole: set[str] = set()
    asked: set[tuple[str, str]] = set()
    for one in nested(code):
        mentioned.update(one.co_names)
        mentioned.update(constant for constant in one.co_consts if isinstance(constant, str))
        instructions = [one for one in dis.get_instructions(one) if one.opname not in _SILENT]
        for at, instruction in enumerate(instructions):
            if instruction.opname in _READ_A_GLOBAL:
                read[str(instruction.argval)] = None
            if instruction.opname in _READ_AN_ATTRIBUTE:
                attributes.add(str(instruction.argval))
                before = instructions[at - 1]
                if at and before.opname.startswith("LOAD_"):
                    variable = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
                    asked.add((str(variable), str(instruction.argval)))
            if instruction.opname == "IMPORT_NAME":
                imports[_import(instructions, at)] = None
            whole.update(_used_whole(instructions, at))
    if "globals" in read:
        # globals()["name"] reads what no instruction names.
        read.update(dict.fromkeys(sorted(mentioned)))
    return CodeNames(
        tuple(read), frozenset(mentioned), frozenset(attributes), frozenset(whole), frozenset(asked), tuple(imports)
    )


def _import(instructions: list[dis.Instruction], at: int) -> Import:
    # The compiler pushes the level and the list of names right before, in this order.
    level, names, after = instructions[at - 2].argval, instructions[at - 1].argval, instructions[at + 1]
    variable = str(after.argval) if after.opname.startswith("STORE_") else ""
    listed = tuple(map(str, names)) if isinstance(names, tuple) else ()
    return Import(str(instructions[at].argval), level if isinstance(level, int) else 0, listed, variable)


def _used_whole(instructions: list[dis.Instruction], at: int) -> tuple[str, ...]:
    """Variables that this instruction loads for something else than `variable.name` or `getattr(variable, "name")`."""
    loaded = instructions[at]
    if not loaded.opname.startswith("LOAD_") or loaded.opname.split("_")[1] not in ("GLOBAL", "NAME", "DEREF", "FAST"):
        return ()
    # Python 3.13 loads two variables in one instruction; the first of them has no attribute next to it.
    names = loaded.argval if isinstance(loaded.argval, tuple) else (loaded.argval,)
    following = instructions[at + 1].opname if at + 1 < len(instructions) else ""
    is_getattr = at > 0 and instructions[at - 1].argval == "getattr" and following.startswith("LOAD_CONST")
    for_an_attribute = is_getattr or following in ("LOAD_ATTR", "LOAD_METHOD")
    return tuple(map(str, names[:-1] if for_an_attribute else names))


def nested(code: CodeType) -> list[CodeType]:
    """*code*, and the code of the functions and classes inside it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return [code, *(each for one in inner for each in nested(one))]
