# SPDX-License-Identifier: Apache-2.0
"""A model or a part of one under an arm, in this process: compiled, compared, timed, profiled."""

from __future__ import annotations

import copy
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from _arms import Arm
from _ceilings import measure_ceilings, work
from _clock import Clock, Turns, calls_in_a_queue, stay_on_one_core, true_float32
from _difference import difference, judged
from _kernels import by_kind, by_name, kernels_of
from _workers import Row as Row
from torch import Tensor
from torch._dynamo.utils import counters


Given = dict[str, Tensor]
WARM_UPS, ALONE = 2, 9


class Case(ABC):
    """What `measure_case` measures: `name` under `arm`, on the device of `clock`.

    `module` is what is called in eager mode, and `compiled` as the arm has it.
    """

    name: str
    arm: Arm
    clock: Clock
    module: Any
    compiled: Any
    given: Given | None = None

    @abstractmethod
    def arguments(self, *, second: bool = False) -> Given:
        """Arguments at its size or at a *second* one, the same each time."""

    def called(self, module: Any, given: Given) -> Any:
        """What *module* returns for *given*."""
        return module(*given.values())

    def call(self) -> object:
        """Call it once as the arm has it."""
        self.given = self.given or self.arguments()
        return self.called(self.compiled, self.given)

    def call_eagerly(self) -> object:
        """Call it once without a compiler."""
        self.given = self.given or self.arguments()
        return self.called(self.module, self.given)

    def forget(self) -> None:
        """Give up the arguments until the next call."""
        self.given = None

    def compared(self, *, second: bool) -> Row:
        """How far the arm's outputs lie from eager ones, at its size or at a *second* one; raises if too far."""
        given = self.arguments(second=second)
        ours, eager = self.called(self.compiled, given), self.called(self.module, given)
        with true_float32():
            reference = self.called(copy.deepcopy(self.module).float(), in_float32(given))
        return judged(difference(ours, reference), difference(eager, reference), self.where(second=second))

    def where(self, *, second: bool) -> str:
        """What a message says that was compared."""
        return f"{self.name}{' at its second size' if second else ''}"


def in_float32(given: Given) -> Given:
    """Inputs with their floats in float32."""
    return {name: value.float() if value.is_floating_point() else value for name, value in given.items()}


@dataclass(frozen=True)
class Plan:
    """What is measured of a case, and how.

    Attributes:
        lock_file: Held while a compiled graph is called first; empty where nothing else compiles.
        beside: How many other cases compile at the same time.
        cold_calls: After how many calls everything is compiled.
        compilation_alone: Whether compiling is all that is measured.
        compilation_has_a_row: Whether it has a row of its own beside that of the calls.
        queued_seconds: How long a queue of calls runs.
        alone: How often a call on an idle device is timed.
        with_floor: Whether eager arms measure what the device reaches.
        kernels: Whether kernels are recorded "by kind", "by name", or not at all, "".
        second_size: Whether a second size is compared, where the arm's sizes are symbols or it is not compiled.
    """

    lock_file: str = ""
    beside: int = 0
    cold_calls: int = 1
    compilation_alone: bool = False
    compilation_has_a_row: bool = True
    queued_seconds: float = 0.25
    alone: int = ALONE
    with_floor: bool = True
    kernels: str = "by kind"
    second_size: bool = False


def measure_case(case: Case, plan: Plan, commands: Iterator[str]) -> list[Row]:
    """The rows of *case*: one of its calls, one of its compilation. *commands* say when nothing else runs."""
    arm, clock = case.arm, case.clock
    turns = Turns(plan.lock_file if clock.device == "cuda" else "")
    with torch.no_grad():
        if arm.is_compiled:
            # The first compilation of a process also starts the compiler's workers.
            torch.compile(lambda x: x + 1)(torch.ones(8, device=clock.device))
        before = graphs_compiled()
        with turns.for_first_calls() if arm.is_compiled else turns.alone():
            cold = [_seconds_without_waits(case, turns) for _ in range(plan.cold_calls)]
        compilation: Row = {"graphs": graphs_compiled() - before, "cold_seconds": cold}
        rows = []
        if arm.is_compiled and plan.compilation_has_a_row:
            name = f"{case.name}_compile_together" if plan.beside else f"{case.name}_compile"
            rows = [
                {"arm": arm.name, "case": name, "seconds": [sum(cold)], "compiled_beside": plan.beside, **compilation}
            ]
        if plan.compilation_alone:
            return rows
        case.forget()
        clock.make_room()
        # Nothing else may compile or run while this process measures: the parent says when.
        next(commands)
        stay_on_one_core()
        row: Row = {"arm": arm.name, "case": case.name, **compilation, **case.compared(second=False)}
        clock.make_room()
        alone = [clock.seconds(case.call) for _ in range(WARM_UPS + plan.alone)][WARM_UPS:]
        calls = calls_in_a_queue(statistics.median(alone), plan.queued_seconds)
        row["seconds"] = [clock.seconds_in_turn(case.call, calls) for _ in commands]
        row |= {"alone_seconds": alone, "peak_bytes": clock.peak_bytes(), "passes": pass_lines() if arm.is_ours else []}
        row |= _profile(case, plan)
        if plan.with_floor and not arm.is_compiled:
            row |= _floor(case)
        if plan.second_size and (arm.dynamic or not arm.is_compiled):
            case.forget()
            clock.make_room()
            # Last, so that what another size brings about is not in the times.
            row["second_size"] = case.compared(second=True)
            row["graphs_after_second_size"] = graphs_compiled() - before
    return [row, *rows]


def _seconds_without_waits(case: Case, turns: Turns) -> float:
    waited = turns.waited_seconds
    seconds = case.clock.seconds(case.call)
    return seconds - (turns.waited_seconds - waited)


def _profile(case: Case, plan: Plan) -> Row:
    if case.clock.device != "cuda" or not plan.kernels:
        return {"seconds_by_kind": {}, "launches": {}}
    kernels = kernels_of(case.call)
    return by_kind(kernels) | ({"kernels": by_name(kernels)} if plan.kernels == "by name" else {})


def _floor(case: Case) -> Row:
    done = work(case.call_eagerly)
    if case.clock.device != "cuda":
        return {"work": done}
    ceilings = measure_ceilings()
    floor = ceilings.floor_seconds(done["flops"], done["bytes"])
    return {"work": done, "ceilings": asdict(ceilings), "floor_seconds": floor}


def graphs_compiled() -> int:
    """How many graphs Dynamo gave to the backend in this process."""
    return int(counters["stats"]["unique_graphs"])


def pass_lines() -> list[str]:
    """What ConvChooser reported in this process, or the last passes of an arm without it."""
    if "magi_passes" not in sys.modules:
        return []
    from magi_passes import pass_records

    lines = [str(record) for record in pass_records()]
    # A tuned choice leaves the records of its candidates' passes too.
    return ([line for line in lines if line.startswith("ConvChooser ")] or lines)[-3:]
