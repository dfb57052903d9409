# SPDX-License-Identifier: Apache-2.0
"""One fragment under one arm, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from _arms import Arm, arm_named
from _case import Case, Given, Plan, Row, measure_case
from _clock import Clock
from _fragment import EVERY, Fragment
from _fragment_calls import arguments, build, symbolic_dims
from _fragments import FRAGMENTS


class FragmentCase(Case):
    """The fragment *name* under *arm*; a *tiny* one on the CPU."""

    def __init__(self, name: str, arm: Arm, *, tiny: bool) -> None:
        self.name, self.arm, self.tiny = name, arm, tiny
        self.fragment: Fragment = FRAGMENTS[name]
        self.clock = Clock("cpu" if tiny else "cuda")
        self.dtype = torch.float32 if tiny else torch.bfloat16
        torch.manual_seed(0)
        with torch.device(self.clock.device):
            self.module = build(self.fragment, tiny=tiny).eval().requires_grad_(False)
        # Some parameters are made where no default device is asked for.
        self.module.to(self.clock.device, self.dtype)
        self.compiled = self.module
        if arm.is_compiled:
            every = self.fragment.symbolic == EVERY
            self.compiled = arm.compile(self.module, dynamic=(True if every else None) if arm.dynamic else False)

    def arguments(self, *, second: bool = False) -> Given:
        """By place; marked as dynamic where the arm is and only some sizes are symbols."""
        torch.manual_seed(1)
        device = self.clock.device
        made = arguments(self.fragment, tiny=self.tiny, second=second, device=device, dtype=self.dtype)
        if self.arm.is_compiled and self.arm.dynamic and self.fragment.symbolic != EVERY:
            for tensor, argument in zip(made, self.fragment.arguments, strict=True):
                if dims := symbolic_dims(argument):
                    torch._dynamo.mark_dynamic(tensor, dims)  # noqa: SLF001 (documented, see torch.compile's dynamic shapes)
        return {str(place): tensor for place, tensor in enumerate(made)}


def measure(name: str, arm: str, plan: Plan, tiny: bool, *, commands: Iterator[str]) -> list[Row]:
    """Compile and measure one case in this process, on the parent's *commands*; its row."""
    if tiny:
        torch.set_num_threads(1)
    return measure_case(FragmentCase(name, arm_named(arm), tiny=tiny), plan, commands)
