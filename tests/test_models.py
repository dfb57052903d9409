# SPDX-License-Identifier: Apache-2.0
"""Real models of transformers with a registered operator: eager = magi at several sizes, and in a training step."""

from __future__ import annotations

from collections.abc import Callable

import _models
import pytest
import torch
from magi_backend import explain
from torch import Tensor, nn


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(batch * length))


def images(batch: int, _: int) -> Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(batch))


@pytest.mark.parametrize(
    ("build", "inputs", "sizes"),
    [
        pytest.param(_models.llama, tokens, [(2, 12), (3, 20), (5, 7)], id="llama"),
        pytest.param(_models.vit, images, [(2, 0), (5, 0)], id="vit", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_inference_at_several_sizes_and_a_training_step(
    build: Callable[[int], nn.Module], layers: int, inputs: Callable[[int, int], Tensor], sizes: list[tuple[int, int]]
) -> None:
    model = build(layers).eval()
    inference, training = explain(model, dynamic=True), explain(model, dynamic=True)

    with torch.no_grad():
        for size in sizes:
            report = inference(inputs(*size))
    step = training(inputs(*sizes[0]))

    assert report.agrees
    assert [call.compilations for call in report.calls][1:] == [0] * (len(sizes) - 1), "a second size recompiled"
    (op,) = report.compilations[0].ops
    assert (op.name, op.path) == ("magi_models::norm", "flattened")
    assert step.agrees
    gradients = [d for d in step.calls[0].differences if d.name.startswith("gradient")]
    assert len(gradients) == sum(p.requires_grad for p in model.parameters())
    assert not step.calls[0].graph_breaks
