# SPDX-License-Identifier: Apache-2.0
"""A class of wide.yaml under one arm, in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _arms import Arm
from _case import Case, Given, Plan, Row, measure_case
from _clock import Clock
from _hot_case import arm_of


sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from _real_classes import CLASSES, RealClass, classes_in


WIDE = classes_in(Path(__file__).with_name("wide.yaml"))
CALLS_UNTIL_HOT = 3


class WideCase(Case):
    """The class *name* under *arm*; a *tiny* one on the CPU."""

    def __init__(self, name: str, arm: Arm, *, tiny: bool) -> None:
        self.name, self.arm = name, arm
        self.kind = _small(WIDE[name]) if tiny else WIDE[name]
        self.sizes = self.kind.small if tiny else self.kind.large
        self.clock = Clock("cpu" if tiny else "cuda")
        torch.manual_seed(0)
        with torch.device(self.clock.device):
            self.module = self.kind.build(whole=not tiny)
        # Some parameters are made where no default device is asked for.
        self.module.to(self.clock.device)
        self.compiled = arm.compile(self.module, dynamic=arm.dynamic) if arm.is_compiled else self.module

    def arguments(self, *, second: bool = False) -> Given:
        return self.kind.inputs(self.sizes[second], self.clock.device)

    def called(self, module: Any, given: Given) -> Any:
        return module(**given)


def _small(kind: RealClass) -> RealClass:
    """A small class for a CPU: the one of the tests, where they have it."""
    return CLASSES.get(kind.model, replace(kind, keep=1))


def measure(name: str, arm: str, plan: Plan, tiny: bool, *, commands: Iterator[str]) -> list[Row]:
    """Compile and measure one class in this process, on the parent's *commands*; its rows."""
    if tiny:
        torch.set_num_threads(1)
    return measure_case(WideCase(name, arm_of(arm), tiny=tiny), plan, commands)
