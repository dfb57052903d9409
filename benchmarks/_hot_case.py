# SPDX-License-Identifier: Apache-2.0
"""A model under one arm, in this process: called at each size until nothing compiles, compared with float32, timed."""

from __future__ import annotations

import copy
import functools
import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from _arms import Arm, arm_named
from _clock import Clock, Turns, stay_on_one_core, time_in_turn, true_float32
from _decoders import build as build_yardstick
from _decoders import input_shape
from _difference import difference, judged
from _real_case import RECOMPILE_LIMIT
from _real_models import MODELS as REAL_MODELS
from _real_models import compiled_part, decode, sharing_weights
from _workers import Row
from torch import Tensor, nn
from torch._dynamo.utils import counters


ARMS = ("stock_dynamic", "stock_static", "magi_hot")
HOT = "magi_dynamic:magi.hot_sizes=8+magi.hot_after=2"
MOST_CALLS_UNTIL_SETTLED = 6
QUEUED_SECONDS = 0.1
Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Model:
    """A model of the benchmark.

    Attributes:
        build: Makes it, a tiny one where it is asked for that.
        shapes: The shape of its input in each case.
        tiny: The same for a tiny one.
        compiled: From the model and a compiler to what runs an input; without a compiler, eager.
        tokens: Whether inputs are token ids rather than numbers.
    """

    build: Callable[[bool], nn.Module]
    shapes: dict[str, tuple[int, ...]]
    tiny: dict[str, tuple[int, ...]]
    compiled: Callable[[Any, Callable[[Any], Any] | None], Run]
    tokens: bool = False


def _llama(tiny: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    width: dict[str, Any] = dict(zip(names, (64, 128, 4, 2) if tiny else (4096, 14336, 32, 8), strict=True))
    config = LlamaConfig(
        **width,
        num_hidden_layers=1 if tiny else 8,
        vocab_size=97 if tiny else 32000,
        max_position_embeddings=8192,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def _whole_decode(vae: Any, compile_it: Callable[[Any], Any] | None) -> Run:
    """A decode, with the decoder compiled where it stands, as users do."""
    if compile_it is not None:
        part = compiled_part(vae)
        part.forward = compile_it(part.forward)
    return lambda latent: decode(vae, latent)


def _real(name: str) -> Model:
    """The decode of one of the models of real_decoders at its first size."""
    real = REAL_MODELS[name]
    shape, tiny = (tuple(sizes[0]["latent"]) for sizes in (real.sizes, real.tiny_sizes))
    return Model(lambda tiny: real.build(tiny=tiny), {name: shape}, {name: tiny}, _whole_decode)


def _logits(model: Any, compile_it: Callable[[Any], Any] | None) -> Run:
    run = model if compile_it is None else compile_it(model)
    return lambda tokens: run(tokens).logits


def _itself(model: Any, compile_it: Callable[[Any], Any] | None) -> Run:
    return model if compile_it is None else compile_it(model)  # type: ignore[no-any-return]


MODELS = {
    "wan21": _real("wan21"),
    "kl": _real("kl"),
    "llama": Model(
        _llama,
        {f"llama_{tokens}": (1, tokens) for tokens in (128, 256, 512, 1024, 2048, 4096)},
        {f"llama_{tokens}": (1, tokens) for tokens in (8, 12)},
        _logits,
        tokens=True,
    ),
    "groupnorm_480p": Model(
        lambda tiny: build_yardstick("groupnorm", smoke=tiny),
        {"groupnorm_480p": input_shape("groupnorm", "480p")},
        {"groupnorm_480p": input_shape("groupnorm", "480p", smoke=True)},
        _itself,
    ),
}


def arm_of(name: str) -> Arm:
    """An arm by name; `magi_hot` gives sizes that come back code of their own."""
    return replace(arm_named(HOT), name=name) if name == "magi_hot" else arm_named(name)


class HotCase:
    """The model *name* under *arm*; a tiny one on the CPU."""

    def __init__(self, name: str, arm: Arm, *, tiny: bool) -> None:
        self.model = MODELS[name]
        self.shapes = self.model.tiny if tiny else self.model.shapes
        self.clock = Clock("cpu" if tiny else "cuda")
        self.dtype = torch.float32 if tiny else torch.bfloat16
        torch.manual_seed(0)
        with torch.device(self.clock.device):
            self.module = self.model.build(tiny).eval().to(self.dtype).requires_grad_(False)
        compile_it = (lambda call: arm.compile(call, dynamic=arm.dynamic)) if arm.is_compiled else None
        self.run = self.model.compiled(sharing_weights(self.module), compile_it)
        self.eager = self.model.compiled(self.module, None)

    def input(self, case: str) -> Tensor:
        """The input of *case*, the same one each time."""
        generator = torch.Generator(self.clock.device).manual_seed(1)
        shape, device = self.shapes[case], self.clock.device
        if self.model.tokens:
            return torch.randint(0, 97, shape, generator=generator, device=device)
        return torch.randn(shape, generator=generator, device=device).to(self.dtype)

    def settle(self, case: str) -> None:
        """Call it until a call compiles nothing."""
        given = self.input(case)
        for _ in range(MOST_CALLS_UNTIL_SETTLED):
            before = _compilations()
            self.run(given)
            if _compilations() == before and before:
                return

    def compared(self, case: str) -> dict[str, dict[str, float]]:
        """How far the arm and eager code lie from eager code in float32.

        Raises:
            WrongResultError: The arm lies too far.
        """
        given = self.input(case)
        ours, eager = self.run(given), self.eager(given)
        with true_float32():
            exact = self.model.compiled(copy.deepcopy(self.module).float(), None)
            reference = exact(given if self.model.tokens else given.float())
        return judged(difference(ours, reference), difference(eager, reference), case)


def _compilations() -> int:
    """How many graphs AOTAutograd was given in this process, by Dynamo or for one size."""
    return int(counters["aot_autograd"]["total"])


class _Codes(logging.Handler):
    """The sizes for which code was made, and what was said of those for which none was."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.made: set[str] = set()
        self.failed: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if match := re.search(r"code for the sizes (.*) made in", text):
            self.made.add(match[1])
        elif "no code could be made" in text:
            self.failed.append(text)


def measure(name: str, arm_name: str, tiny: bool, lock_file: str, *, commands: Iterator[str]) -> list[Row]:
    """Compile and measure one model in this process, on the parent's *commands*; a row for each size."""
    if tiny:
        torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT  # noqa: SLF001 (documented)
    codes = _Codes()
    logging.getLogger("magi_backend").addHandler(codes)
    logging.getLogger("magi_backend").setLevel(logging.INFO)
    case = HotCase(name, arm_of(arm_name), tiny=tiny)
    clock = case.clock
    with torch.no_grad():
        started = time.perf_counter()
        with Turns("" if tiny else lock_file).for_first_calls():
            for each in case.shapes:
                case.settle(each)
        clock.wait()
        compile_seconds = time.perf_counter() - started
        clock.make_room()
        next(commands)
        stay_on_one_core()
        base: Row = {"arm": arm_name, "compile_seconds": compile_seconds, "codes": len(codes.made)}
        base["without_code"] = codes.failed[:5]
        rows = [base | {"case": each} | case.compared(each) for each in case.shapes]
        clock.make_room()
        calls = [functools.partial(case.run, case.input(each)) for each in case.shapes]
        time_in_turn(rows, calls, commands, clock, queued_seconds=0.0 if tiny else QUEUED_SECONDS)
    return rows
