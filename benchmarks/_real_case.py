# SPDX-License-Identifier: Apache-2.0
"""One whole decode under one arm, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _arms import Arm, arm_named
from _case import Case, Given, Plan, Row, in_float32, measure_case
from _clock import Clock, true_float32
from _difference import difference, judged
from _ratios import DEFAULT_LIMIT
from _real_models import MODELS, compiled_part, decode, denoise, without_the_break
from torch import Tensor


RECOMPILE_LIMIT = 64


@dataclass(frozen=True)
class Conditions:
    """Under which every arm of a model runs.

    Attributes:
        no_break: Whether the model is changed, see `_real_models.without_the_break`.
        default_limit: Whether Dynamo gives up on a function after eight compilations, as it does unless told otherwise,
            and leaves it to eager code. Else it gives up after 64, which no arm reaches.
        tiny: Whether the model is a small one on the CPU.
    """

    no_break: bool = False
    default_limit: bool = False
    tiny: bool = False

    @property
    def suffix(self) -> str:
        """What the names of the rows end in."""
        return "_nobreak" * self.no_break + f"_limit{DEFAULT_LIMIT}" * self.default_limit


class RealCase(Case):
    """The model *name* under *arm* and *conditions*; *references* is a folder that all arms of it share."""

    def __init__(self, name: str, arm: Arm, references: Path, conditions: Conditions) -> None:
        self.name, self.arm = name + conditions.suffix, arm
        self.no_break, self.tiny = conditions.no_break, conditions.tiny
        self.kind, self.references = MODELS[name], references
        self.clock = Clock("cpu" if self.tiny else "cuda")
        self.dtype = torch.float32 if self.tiny else torch.bfloat16
        self.module = self.compiled = self.built().to(self.dtype)
        part = compiled_part(self.module)
        self.eager = part.forward
        if arm.channels_last:
            torch.backends.cudnn.benchmark = True
            for parameter in self.module.parameters():
                if parameter.dim() > 3:
                    layout = torch.channels_last if parameter.dim() == 4 else torch.channels_last_3d
                    parameter.data = parameter.data.contiguous(memory_format=layout)
        if arm.is_compiled:
            part.forward = arm.compile(part.forward, dynamic=arm.dynamic)

    def built(self) -> Any:
        """The model with the weights that all arms have, in float32."""
        torch.manual_seed(0)
        with torch.device(self.clock.device):
            model = self.kind.build(tiny=self.tiny).to(self.clock.device)
        if self.no_break:
            without_the_break(model)
        return model

    def arguments(self, *, second: bool = False) -> Given:
        return self.kind.arguments(self.clock.device, self.dtype, tiny=self.tiny, second=second)

    def called(self, module: Any, given: Given) -> Tensor:
        return decode(module, **given) if hasattr(module, "decode") else denoise(module, **given)

    def compared(self, *, second: bool) -> Row:
        given = self.arguments(second=second)
        ours = self.called(self.module, given)
        reference, eager = self._references(given, second=second)
        return judged(difference(ours, reference), eager, self.where(second=second))

    def _references(self, given: dict[str, Tensor], *, second: bool) -> tuple[Tensor, Any]:
        """Eager code's output in float32, and how far from it eager code lies in the arm's type; once for all arms."""
        file = self.references / f"{self.name}{'-second' * second}.pt"
        if file.exists():
            kept = torch.load(file, weights_only=False)
            return kept["reference"].to(self.clock.device), kept["eager"]
        model = self.built().to(self.dtype)
        out = self.called(model, given)
        model = model.float()
        with true_float32():
            reference = self.called(model, in_float32(given))
        eager = difference(out, reference)
        torch.save({"reference": reference.cpu(), "eager": eager}, file)
        return reference, eager


def measure(
    name: str, arm: str, plan: Plan, references: str, conditions: Conditions, *, commands: Iterator[str]
) -> list[Row]:
    """Compile and measure one case in this process, on the parent's *commands*; its rows."""
    if conditions.tiny:
        torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = DEFAULT_LIMIT if conditions.default_limit else RECOMPILE_LIMIT  # noqa: SLF001 (documented)
    case = RealCase(name, arm_named(arm), Path(references), conditions)
    return measure_case(case, plan, commands)
