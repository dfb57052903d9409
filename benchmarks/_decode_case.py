# SPDX-License-Identifier: Apache-2.0
"""One case of dynamic_decode in this process."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from _arms import Arm, arm_named
from _case import Case, Given, Plan, Row, measure_case
from _clock import Clock
from _decoders import build, input_shape
from _difference import difference


class DecodeCase(Case):
    """One model at one size under one arm, on the GPU or for a smoke run on the CPU."""

    def __init__(self, model: str, size: str, arm: Arm, *, smoke: bool) -> None:
        self.name, self.arm = f"{model}_{size}", arm
        self.clock = Clock("cpu" if smoke else "cuda")
        dtype = torch.float32 if smoke else torch.bfloat16
        torch.manual_seed(0)
        self.module = build(model, smoke=smoke).eval().to(self.clock.device, dtype).requires_grad_(False)
        shape = input_shape(model, size, smoke=smoke)
        self.x = torch.randn(shape, device=self.clock.device).to(dtype)
        self.compiled = self.module
        if arm.is_compiled:
            if arm.dynamic:
                dims = [self.x.dim() - 2, self.x.dim() - 1]
                torch._dynamo.mark_dynamic(self.x, dims)  # noqa: SLF001 (documented, see torch.compile's dynamic shapes)
            self.compiled = arm.compile(self.module, dynamic=None if arm.dynamic else False)

    def arguments(self, *, second: bool = False) -> Given:
        del second  # the sizes of this benchmark are cases of their own
        return {"x": self.x}

    def compared(self, *, second: bool) -> Row:
        assert not second
        return {"relative_error": difference(self.call(), self.call_eagerly()).relative}


def measure(model: str, size: str, arm: str, plan: Plan, smoke: bool, *, commands: Iterator[str]) -> list[Row]:
    """The rows of one case, for the time of its calls and for that of its compilation."""
    return measure_case(DecodeCase(model, size, arm_of_decode(arm), smoke=smoke), plan, commands)


def arm_of_decode(name: str) -> Arm:
    """The arm *name*; here ``magi`` and ``magi_tuned`` are the chooser of magi-passes under stock `torch.compile`."""
    chooser = {"magi": "passes:chooser", "magi_tuned": "passes:tuned_chooser"}
    return arm_named(chooser[name], called=name) if name in chooser else arm_named(name)
