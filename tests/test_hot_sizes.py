# SPDX-License-Identifier: Apache-2.0
"""Sizes that come, go and return on whole models: right results with code for any size and for single ones."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _models
import pytest
import torch
from _python import python
from torch import Tensor, nn
from torch.nn import functional


ROOT = Path(__file__).parents[1]
OPTIONS: Any = {"magi.hot_sizes": 3, "magi.hot_after": 2}
COME_GO_AND_RETURN = (0, 1, 0, 1, 0, 2, 2, 0, 1, 2, 0)
"""Which of three sizes each call has: the first two get code, then the third, and all come back."""


def of_shapes(*shapes: tuple[int, ...]) -> list[Callable[[], Tensor]]:
    return [partial(torch.randn, shape) for shape in shapes]


MODELS: dict[str, tuple[Callable[[], nn.Module], list[Callable[[], Tensor]]]] = {
    "llama": (_models.llama, [partial(torch.randint, 0, 97, (1, length)) for length in (9, 10, 17)]),
    "vae": (_models.vae, of_shapes((2, 4, 6, 10), (2, 4, 8, 12), (3, 4, 6, 10))),
    "video": (_models.VideoBlock, of_shapes((1, 8, 3, 6, 10), (1, 8, 4, 6, 10), (1, 8, 3, 7, 12))),
    "vit": (_models.vit, of_shapes((2, 3, 32, 32), (3, 3, 32, 32), (5, 3, 32, 32))),
}


def made(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The sizes that got code, in order."""
    texts = (record.getMessage() for record in caplog.records)
    return [match[1] for text in texts if (match := re.search("code for the sizes (.*) made in", text))]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_at_sizes_that_come_go_and_return(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "magi_backend")
    build, inputs = MODELS[name]
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
    """The loss of a few layers, with dropout that never drops."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout(0.0)
        self.layers = nn.Sequential(*block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 4))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return functional.cross_entropy(self.layers(x), wanted)


@pytest.mark.slow
def test_training_steps_at_sizes_that_come_go_and_return(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "magi_backend")
    ours = Classifier()
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
    only = "wan21,kl,llama,groupnorm_480p"
    command = (ROOT / "benchmarks" / "hot_sizes.py", "--tiny", "--out", tmp_path, "--repeats", "2", "--compiling", "2")
    printed = python(*command, "--only", f"{only},dispatch", seconds=1700)

    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert not [row for row in rows if not row["seconds"]], printed
    assert not [row for row in rows if "codes" in row and (row["codes"] > 0) != (row["arm"] == "magi_hot")]
    ratios = [f"{model}_hot_vs_stock_{how}_speedup" for model in only.split(",") for how in ("dynamic", "static")]
    assert [key for key in (*ratios, "dispatch_us", "dispatch_300_us") if f'"{key}"' not in printed] == []
