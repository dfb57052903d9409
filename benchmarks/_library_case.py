# SPDX-License-Identifier: Apache-2.0
"""An op of a library under one arm, in this process: at two sizes compiled, compared with the library, timed."""

from __future__ import annotations

import functools
import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _arms import Arm
from _case import Row, graphs_compiled
from _clock import Clock, Turns, stay_on_one_core, time_in_turn
from _difference import Difference, difference, judged
from _kernels import by_name, kernels_of
from _library_op import Body, LibraryOp, Program, program_of
from torch import Tensor


sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from _stand_ins import import_only_kernels_of


ARMS = {
    "eager": Arm("eager", "eager"),
    "dynamo": Arm("dynamo", "inductor"),
    "opaque": Arm("opaque", "inductor"),
    "seen_through": Arm("seen_through", "magi"),
    "seen_through_inductor": Arm("seen_through_inductor", "inductor"),
}
"""The library's call in eager mode and under `torch.compile`, and the same as an op, opaque and seen through."""

BLOCK = "llama_block"
SIZES = ("small", "large")
QUEUED_SECONDS = 0.05
ROUNDING = Difference(1.0, 2.0**-9, 2.0**-8)
"""How far two right results in bfloat16 may lie apart; a fused kernel rounds less often."""


def program_named(name: str) -> Program:
    """The block, or one op of the library that *name* begins with."""
    if name == BLOCK:
        program: Program = importlib.import_module("_llama_block").PROGRAM
        return program
    return program_of(name, ops_of(name.partition("_")[0])[name])


def ops_of(library: str) -> dict[str, LibraryOp]:
    """The ops of *library* by name; imports the library."""
    import_only_kernels_of(library)
    ops: dict[str, LibraryOp] = importlib.import_module(f"_{library}_ops").OPS
    return ops


def with_one_config() -> None:
    """Let each kernel that Triton measures configs of have the middle one.

    Measuring takes minutes for the chunked ops, and each arm would choose by chance.
    """
    from triton.runtime.autotuner import Autotuner

    original: Callable[..., None] = Autotuner.__init__

    def one_config(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        middle = len(configs) // 2
        original(self, fn, arg_names, configs[middle : middle + 1], *args, **kwargs)

    Autotuner.__init__ = one_config


class OpaqueOp:
    """*body* as torch's own custom op, with a fake by hand: it knows what the calls of `learn` gave."""

    def __init__(self, name: str, body: Body) -> None:
        self.body = body
        self.learnt: dict[Any, list[tuple[torch.Size, tuple[int, ...], torch.dtype]]] = {}
        self.op: Any = torch.library.custom_op(name, body, mutates_args=())
        self.op.register_fake(self.fake)

    def fake(self, *inputs: Tensor) -> Any:
        """Empty outputs."""
        like = self.learnt[tuple(x.shape for x in inputs)]
        made = [torch.empty_strided(size, stride, dtype=kind, device=inputs[0].device) for size, stride, kind in like]
        return made[0] if len(made) == 1 else tuple(made)

    def learn(self, *inputs: Tensor) -> Any:
        """Run the body, and keep what its outputs are like."""
        found = self.body(*inputs)
        outputs = found if isinstance(found, tuple) else (found,)
        self.learnt[tuple(x.shape for x in inputs)] = [(x.shape, x.stride(), x.dtype) for x in outputs]
        return found


def seen_through(name: str, body: Body) -> Body:
    """*body* as an op *name* that the compiler sees through."""
    from magi_backend import magi_register_custom_op

    op: Body = magi_register_custom_op(name)(body)
    return op


class LibraryCase:
    """The program *name* under *arm*, at the *sizes* that it is measured at, on *device*."""

    def __init__(self, name: str, arm: Arm, sizes: Sequence[str], device: str, dtype: torch.dtype) -> None:
        self.name, self.arm, self.device, self.dtype = name, arm, device, dtype
        self.program = program_named(name)
        self.inputs = {size: self._made(functools.partial(self._inputs, size)) for size in sizes}
        library = {name: op.library or op.body for name, op in self.program.ops.items()}
        self.eager = self._built(library)
        self.call = self.eager
        if arm.is_compiled:
            self.call = arm.compile(self._built(self._ops(library)), dynamic=False)

    def _made(self, make: Callable[[], Any]) -> Any:
        """What *make* makes on the device, the same each time."""
        torch.manual_seed(0)
        with torch.device(self.device):
            return make()

    def _inputs(self, size: str) -> tuple[Tensor, ...]:
        return self.program.inputs(self.program.sizes[size], self.dtype)

    def _built(self, ops: Mapping[str, Body]) -> Body:
        body: Body = self._made(lambda: self.program.build(ops, self.dtype))
        return body

    def _ops(self, library: Mapping[str, Body]) -> Mapping[str, Body]:
        """What stands for each op in what is compiled."""
        if self.arm.name == "dynamo":
            return library
        named = {
            name: (f"library_{self.name}_{self.arm.name}::{name}", op.body) for name, op in self.program.ops.items()
        }
        if self.arm.name != "opaque":
            return {name: seen_through(*op) for name, op in named.items()}
        opaque = {name: OpaqueOp(*op) for name, op in named.items()}
        learning = self._built({name: op.learn for name, op in opaque.items()})
        for given in self.inputs.values():
            learning(*given)
        return {name: op.op for name, op in opaque.items()}

    def compared(self, size: str) -> Row:
        """How far the arm lies from the library's eager call.

        Raises:
            WrongResultError: It lies too far.
        """
        expected = self.eager(*self.inputs[size])
        return judged(difference(self.call(*self.inputs[size]), expected), ROUNDING, f"{self.name}, {size}")


def measure(name: str, arm: str, lock_file: str, tiny: bool, kernels: bool, *, commands: Iterator[str]) -> list[Row]:
    """Compile and compare one program in this process, then time it on the parent's *commands*; a row for each size."""
    if tiny:
        torch.set_num_threads(1)
    turns = Turns("" if tiny else lock_file)
    with_one_config()
    clock = Clock("cpu" if tiny else "cuda")
    sizes = ("tiny",) if tiny else SIZES
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case = LibraryCase(name, ARMS[arm], sizes, clock.device, torch.float32 if tiny else torch.bfloat16)
        rows, calls = [], []
        for size in sizes:
            started, before = time.perf_counter(), graphs_compiled()
            with turns.for_first_calls():
                clock.seconds(functools.partial(case.call, *case.inputs[size]))
            row: Row = {"arm": arm, "case": f"{name}_{size}", "compile_seconds": time.perf_counter() - started}
            rows.append(row | {"graphs": graphs_compiled() - before} | case.compared(size))
            calls.append(functools.partial(case.call, *case.inputs[size]))
        said = [str(one.message) for one in caught if type(one.message).__name__ == "OpaqueFallbackWarning"]
        clock.make_room()
        next(commands)
        stay_on_one_core()
        time_in_turn(rows, calls, commands, clock, queued_seconds=0.0 if tiny else QUEUED_SECONDS)
        for row, call in zip(rows, calls, strict=True):
            row["stays_opaque"] = said
            if kernels and not tiny:
                row["kernels"] = by_name(kernels_of(call))
    return rows
