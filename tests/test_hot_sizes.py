# SPDX-License-Identifier: Apache-2.0
"""Sizes that come, go and return on whole models: right results with code for any size and for single ones."""

from __future__ import annotations

import copy
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _models
import pytest
import torch
from magi_backend import magi_register_custom_op
from magi_opschema import ObjectHandle, register_object
from torch import Tensor, nn
from torch.nn import functional


ROOT = Path(__file__).parents[1]
OPTIONS: Any = {"magi.hot_sizes": 3, "magi.hot_after": 2}
COME_GO_AND_RETURN = (0, 1, 0, 1, 0, 2, 2, 0, 1, 2, 0)
"""Which of three sizes each call has: the first two get code, then the third, and all come back."""


@dataclass(frozen=True)
class Scale:
    factor: float = 2.0
    shift: float = 0.5


@dataclass(frozen=True)
class Settings:
    scale: Scale = field(default_factory=Scale)


class Runner:
    def __init__(self, gain: float) -> None:
        self.gain = gain


@magi_register_custom_op("magi_hot_sizes::run", infer_output_meta_fn=["x"])
def run_with(x: Tensor, runner: ObjectHandle[Runner], settings: Settings) -> Tensor:
    out: Tensor = x * settings.scale.factor * runner.gain + settings.scale.shift
    return out


class Layer(nn.Module):
    """A record and a handle as arguments of one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.runner = Runner(1.5)
        self.settings = Settings(Scale(3.0))
        register_object(self.runner, weak=True)

    def forward(self, x: Tensor) -> Tensor:
        return run_with(self.linear(x).relu(), self.runner, self.settings)


class VideoBlock(nn.Module):
    """Norm, SiLU, a causal convolution over frames, twice, and a shortcut."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(2, channels) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv3d(channels, channels, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            out = convolution(functional.pad(functional.silu(norm(out)), (1, 1, 1, 1, 2, 0)))
        return x + out


def tokens(length: int) -> Tensor:
    return torch.randint(0, 97, (1, length))


MODELS: dict[str, tuple[Callable[[], nn.Module], list[Callable[[], Tensor]]]] = {
    "llama": (_models.llama, [lambda: tokens(9), lambda: tokens(10), lambda: tokens(17)]),
    "vae": (
        _models.vae,
        [lambda: torch.randn(2, 4, 6, 10), lambda: torch.randn(2, 4, 8, 12), lambda: torch.randn(3, 4, 6, 10)],
    ),
    "video": (
        VideoBlock,
        [lambda: torch.randn(1, 8, 3, 6, 10), lambda: torch.randn(1, 8, 4, 6, 10), lambda: torch.randn(1, 8, 3, 7, 12)],
    ),
    "vit": (
        _models.vit,
        [lambda: torch.randn(2, 3, 32, 32), lambda: torch.randn(3, 3, 32, 32), lambda: torch.randn(5, 3, 32, 32)],
    ),
    "record and handle": (Layer, [lambda: torch.randn(4, 8), lambda: torch.randn(5, 8), lambda: torch.randn(6, 8)]),
}


def made(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The sizes that got code, in order."""
    texts = (record.getMessage() for record in caplog.records)
    return [match[1] for text in texts if (match := re.search("code for the sizes (.*) made in", text))]


@pytest.mark.parametrize(
    "name",
    [name if name == "record and handle" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_a_model_at_sizes_that_come_go_and_return(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "magi_backend")
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    compiled = torch.compile(model, backend="magi", dynamic=True, fullgraph=True, options=OPTIONS)

    with torch.no_grad():
        for which in COME_GO_AND_RETURN:
            x = inputs[which]()
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)

    found = made(caplog)
    assert len(set(found)) == 3, found
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


class Classifier(nn.Module):
    """The loss of *layers*, which make four numbers of an image."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return functional.cross_entropy(self.layers(x), wanted)


def of_products() -> Classifier:
    """With dropout that never drops."""
    return Classifier(nn.Flatten(), nn.Linear(192, 8), nn.SiLU(), nn.Dropout(0.0), nn.Linear(8, 4))


def of_convolutions() -> Classifier:
    block = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout(0.0)
    return Classifier(*block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


@pytest.mark.parametrize("build", [of_products, pytest.param(of_convolutions, marks=pytest.mark.slow)])
def test_training_steps_at_sizes_that_come_go_and_return(
    build: Callable[[], Classifier], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "magi_backend")
    torch.manual_seed(0)
    ours = build()
    theirs = copy.deepcopy(ours)
    compiled = torch.compile(ours, backend="magi", dynamic=True, options=OPTIONS)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]

    for which in COME_GO_AND_RETURN:
        batch = (4, 5, 6)[which]
        x, wanted = torch.randn(batch, 3, 8, 8), torch.randint(0, 4, (batch,))
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [call(x, wanted) for call in (compiled, theirs)]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
        torch.testing.assert_close(dict(ours.named_parameters()), dict(theirs.named_parameters()), rtol=1e-4, atol=1e-5)

    assert len(set(made(caplog))) == 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_benchmark_measures_every_model(tmp_path: Path) -> None:
    """Tiny models on the CPU; each arm compiles, agrees with float32, and is timed."""
    program = [sys.executable, str(ROOT / "benchmarks" / "hot_sizes.py"), "--tiny", "--out", str(tmp_path)]
    program += ["--only", "wan21,kl,llama,groupnorm_480p,dispatch", "--repeats", "2", "--compiling", "2"]
    ran = subprocess.run(program, check=True, capture_output=True, text=True, timeout=1700)

    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert not [row for row in rows if not row["seconds"]], ran.stdout
    for row in rows:
        if "codes" in row:
            assert (row["codes"] > 0) == (row["arm"] == "magi_hot"), row
    for key in ("wan21", "kl", "llama", "groupnorm_480p"):
        assert f'"{key}_hot_vs_stock_dynamic_speedup"' in ran.stdout
        assert f'"{key}_hot_vs_stock_static_speedup"' in ran.stdout
    assert '"dispatch_us"' in ran.stdout
    assert '"dispatch_300_us"' in ran.stdout
