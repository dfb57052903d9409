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
        half = {"mov.b64": np.uint32, "mov.b32": np.uint16}[name]
        bits = 8 * np.dtype(half).itemsize
        registers[low], registers[high] = (half(int(registers[whole]) >> at & 2**bits - 1) for at in (0, bits))
        return
    target, *sources = operands.split(", ")
    values = [registers[s] if s in registers else np.uint32(int(s, 0)) for s in sources]
    registers[target] = INSTRUCTIONS[name](*values)


def _float(value: Register) -> np.float32:
    return np.uint32(value).view(np.float32)


def _bits(value: Any) -> Register:
    return np.float32(value).view(np.uint32)


def _halves(value: Register) -> Any:
    return np.array([value & 0xFFFF, value >> 16], np.uint16).view(np.float16).astype(np.float64)


def _packed(halves: Any) -> Register:
    low, high = np.asarray(halves).astype(np.float16).view(np.uint16)
    return np.uint32(int(high) << 16 | int(low))


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
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, n: np.uint32(a << n),
    "shr.u32": lambda a, n: np.uint32(a >> n),
    "and.b32": lambda a, b: a & b,
    "lop3.b32": _lop3,
    "shf.l.wrap.b32": _rotate_left,
    "shf.r.wrap.b32": lambda low, high, by: _rotate_left(low, high, 32 - by),
    "max.u32": max,
    "sub.u32": lambda a, b: np.uint32(a - b),
    "abs.f32": lambda a: a & np.uint32(0x7FFFFFFF),
    "max.f32": lambda a, b: _bits(np.fmax(_float(a), _float(b))),
    "mul.f32": lambda a, b: _bits(_float(a) * _float(b)),
    "add.f32": lambda a, b: _bits(_float(a) + _float(b)),
    "cvt.rn.f16x2.f32": lambda high, low: _packed([_float(low), _float(high)]),
    "cvt.f32.f16": lambda a: _bits(np.uint16(a).view(np.float16)),
    "mul.rn.f16x2": lambda a, b: _packed(_halves(a) * _halves(b)),
    # A product of float16 is exact in float64, so this rounds once, as fma does.
    "fma.rn.f16x2": lambda a, b, c: _packed(_halves(a) * _halves(b) + _halves(c)),
}
