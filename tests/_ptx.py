# SPDX-License-Identifier: Apache-2.0
"""The few PTX instructions of the NVFP4 example, in NumPy: its inline assembly can be tested without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np


Register = Any  # an unsigned NumPy integer of the register's width


def run(ptx: str, *, outputs: int, inputs: list[Register]) -> list[Register]:
    """The values of ``$0`` … of a block of PTX, with *inputs* as the operands behind the *outputs*."""
    registers: dict[str, Register] = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    for instruction in re.sub(r"\.reg[^;]*;", "", ptx.strip("{} \n")).split(";"):
        if instruction.strip():
            _execute(instruction.strip(), registers)
    return [registers[f"${i}"] for i in range(outputs)]


def _execute(instruction: str, registers: dict[str, Register]) -> None:
    name, operands = instruction.split(None, 1)
    if split := re.match(r"\{(\w+), (\w+)\}, (\S+)", operands):
        low, high, whole = split.groups()
        registers[low], registers[high] = np.uint16(registers[whole] & 0xFFFF), np.uint16(registers[whole] >> 16)
        return
    if joined := re.match(r"(\S+), \{(\w+), (\w+)\}", operands):
        whole, low, high = joined.groups()
        registers[whole] = np.uint32(int(registers[low]) | int(registers[high]) << 16)
        return
    target, *sources = operands.split(", ")
    values = [registers[s] if s in registers else np.uint32(int(s, 0)) for s in sources]
    registers[target] = INSTRUCTIONS[name](*values)


def _halves(value: Register) -> Any:
    """The two bfloat16 of a register as float32, the lower first."""
    return np.array([value << 16, value & 0xFFFF0000], np.uint32).view(np.float32)


def _packed(halves: Any) -> Register:
    """Two float32 that bfloat16 can hold, as a register."""
    low, high = np.asarray(halves, np.float32).view(np.uint32)
    assert low & 0xFFFF == high & 0xFFFF == 0 or np.isnan(halves).any(), "the product has no room in bfloat16"
    return np.uint32(int(high) & 0xFFFF0000 | int(low) >> 16)


def _lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    """Bit by bit, the bit of the table at 4 a + 2 b + c."""
    every = np.uint32(0xFFFFFFFF)
    chosen = np.uint32(0)
    for place in (place for place in range(8) if int(table) >> place & 1):
        wanted = (each if place >> at & 1 else each ^ every for at, each in ((2, a), (1, b), (0, c)))
        chosen |= np.bitwise_and.reduce([np.uint32(each) for each in wanted])
    return chosen


def _rotate_left(low: Register, high: Register, by: Register) -> Register:
    assert low == high, "a funnel shift of two words"
    return np.uint32((int(low) << int(by) | int(low) >> 32 - int(by)) & 0xFFFFFFFF)


INSTRUCTIONS: dict[str, Callable[..., Register]] = {
    "shl.b32": lambda a, n: np.uint32(a << n),
    "and.b32": lambda a, b: a & b,
    "lop3.b32": _lop3,
    "shf.r.wrap.b32": lambda low, high, by: _rotate_left(low, high, 32 - by),
    "mul.rn.bf16x2": lambda a, b: _packed(_halves(a) * _halves(b)),
}
