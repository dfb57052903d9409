# SPDX-License-Identifier: Apache-2.0
"""Whole models by magi: right where stock is not, with a registered operator, padded, at sizes that come back.

A repair is named only where stock is not right, and ``magi.check`` names an operator that is compiled wrong.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import _models
import _planted
import pytest
import torch
import transformers
from _python import python
from _real_classes import CLASSES, RealClass
from magi_backend import explain
from torch import Tensor, nn
from torch.nn import functional


OF_SPEED = {"keep_floats_of_modules", "number_for_quotient"}
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


SIZES = (7, 2, 4, 9, 10)
BUCKETS = (4, 9)


def padded(call: Callable[..., Any], dim: int) -> Any:
    """*call*, compiled, with dimension *dim* of its `ids` padded."""
    torch.compiler.reset()
    options: dict[str, Any] = {"magi.buckets": {"ids": {dim: BUCKETS}}}
    return torch.compile(call, backend="magi", dynamic=True, options=options)


@pytest.fixture
def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("dim", [0, 1])
@torch.no_grad()
def test_a_prefill_is_padded_by_batches_and_by_steps(llama: Any, dim: int) -> None:
    def prefill(ids: Tensor, mask: Tensor) -> Any:
        return llama(ids, attention_mask=mask, use_cache=False).logits

    compiled = padded(prefill, dim)
    for size in SIZES:
        ids = torch.randint(0, 64, (size, 5) if dim == 0 else (3, size))
        mask = torch.ones_like(ids)
        mask[0, :1] = 0
        torch.testing.assert_close(compiled(ids, mask), prefill(ids, mask), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_decode_is_padded_by_batches(llama: Any) -> None:
    def decode(ids: Tensor, mask: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple[Any, ...]:
        cache = transformers.DynamicCache()
        for layer, pair in enumerate(zip(keys, values, strict=True)):
            cache.update(*pair, layer)
        found = llama(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        return found.logits, [layer.keys for layer in found.past_key_values.layers]

    compiled = padded(decode, 0)
    for size in SIZES:
        past = [torch.randn(size, 1, 12, 8) for _ in range(2)], [torch.randn(size, 1, 12, 8) for _ in range(2)]
        inputs = (torch.randint(0, 64, (size, 1)), torch.ones(size, 13, dtype=torch.long), *past)
        torch.testing.assert_close(compiled(*inputs), decode(*inputs), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_bert_is_padded_by_batches_and_refused_by_steps() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=64, **sizes)).eval()

    def encode(ids: Tensor, mask: Tensor) -> Any:
        return model(ids, attention_mask=mask).last_hidden_state

    compiled = padded(encode, 0)
    for size in SIZES:
        ids = torch.randint(0, 64, (size, 5))
        mask = (torch.rand(size, 5) < 0.7).long().index_fill(1, torch.tensor([0]), 1)
        torch.testing.assert_close(compiled(ids, mask), encode(ids, mask), rtol=1e-4, atol=1e-5)
    with pytest.raises(Exception, match=r"magi.buckets: ids.shape\[1\] cannot be padded"):
        padded(encode, 1)(torch.randint(0, 64, (3, 7)), torch.ones(3, 7, dtype=torch.long))


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


PLANTED = [
    (case, place, way) for case in _planted.MODELS.values() for place in _planted.PLACES for way in _planted.DIRECTIONS
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "place", "direction"), PLANTED)
def test_the_planted_operator_is_named(case: str, place: str, direction: str) -> None:
    text = _planted.blamed(*_planted.planted(case, place), direction)

    assert _planted.names_it(text), text
