# SPDX-License-Identifier: Apache-2.0
"""Real classes by magi: right where stock is not, a repair named there only; and models with a registered operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import _models
import pytest
import torch
from _real_classes import CLASSES, RealClass
from magi_backend import explain
from torch import Tensor, nn


OF_SPEED = {"keep_floats_of_modules"}
"""Repairs of what is slow in stock, and not wrong."""
OF_LATER_STEPS = {"keep_saved_strides_symbolic"}
"""Repairs of what stock does at a later size of a training step, of which the first is run here."""
# The Longformer is in no table, and of this one the number of images alone is symbolic: torch cannot resize embeddings
# of places backward at symbolic sizes.
VIT: Any = {"settings": {"img_size": 32, "num_classes": 10}, "shapes": {"x": ("h // 16", 3, 32, 32)}}
LONG = {"attention_window": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
OWN = {
    "LongformerModel": replace(
        CLASSES["RobertaModel"], model="LongformerModel", settings={**CLASSES["RobertaModel"].settings, **LONG}
    ),
    "vit_tiny_patch16_224": replace(CLASSES["vit_tiny_patch16_224"], **VIT),
}
STATIC = {"AutoencoderKL", "DiTTransformer2DModel"}
INFERENCE = (
    *("LlamaForCausalLM", "LongformerModel", "MambaModel", "Wav2Vec2Model", "ConvNextModel", "UNet2DModel"),
    *("SegformerForSemanticSegmentation", "DiTTransformer2DModel", "mambaout_femto"),
)
TRAINING = ("LlamaForCausalLM", "BertModel", "vit_tiny_patch16_224", "UNet2DModel", "AutoencoderKL", "ResNetModel")
CASES = [*((name, False) for name in INFERENCE), *((name, True) for name in TRAINING)]


def results(kind: RealClass, training: bool, model: nn.Module, fn: Callable[..., Tensor]) -> list[Tensor]:
    """The gradients at the first size, or the outputs at both."""
    if training:
        output = fn(**kind.inputs(kind.small[0]))
        wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found: tuple[Tensor | None, ...] = torch.autograd.grad(output.square().mean(), wanted, allow_unused=True)
        return [gradient for gradient in found if isinstance(gradient, Tensor)]
    with torch.no_grad():
        return [fn(**kind.inputs(size)) for size in kind.small]


def agree(actual: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether each is right within what reordered sums cost, relative to the largest value of all."""
    scale = max(float(tensor.abs().max()) for tensor in expected)
    return len(actual) == len(expected) and all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-4 * scale) for a, b in zip(actual, expected, strict=True)
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
# transformers looks up the release of torch, and whether FSDP is used, in functions that cache the result.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function:UserWarning")
@pytest.mark.parametrize(("name", "training"), CASES)
def test_a_repair_is_named_only_where_stock_is_not_right(name: str, training: bool) -> None:
    kind = OWN.get(name) or CLASSES[name]
    dynamic = name not in STATIC
    model = kind.build().requires_grad_(training)
    expected = results(kind, training, model, model)
    try:
        found = results(kind, training, model, torch.compile(model, dynamic=dynamic))
    except torch._dynamo.exc.TorchDynamoException:
        found = []
    is_right = agree(found, expected)
    torch.compiler.reset()

    explained = explain(model, dynamic=dynamic)
    with torch.set_grad_enabled(training):
        for size in kind.small[: 1 if training else 2]:
            report = explained(**kind.inputs(size))

    assert report.agrees
    named = [repair.name for each in report.compilations for graph in each.graphs for repair in graph.repairs]
    repairs = set(named) - OF_SPEED - (OF_LATER_STEPS if training else set())
    assert bool(repairs) is not is_right, (
        f"stock is {'right' if is_right else 'not right'}, and the repairs are {named}"
    )


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
