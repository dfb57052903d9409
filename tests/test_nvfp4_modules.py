# SPDX-License-Identifier: Apache-2.0
"""examples/nvfp4 as part of a model: gradients, every way to save and load, FSDP2, a Llama quantised in place."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _nvfp4 import EXAMPLES, ROUTINGS, by_hand, make_moe, nvfp4, routing
from _python import python
from torch import Tensor, nn


def linear(features: int = 32, bias: bool = True) -> Any:
    return nvfp4.NVFP4Linear.from_float(nn.Linear(features, 16, bias=bias))


def reloaded(saved: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, **options)


def through_state(module: nn.Module, *, assign: bool = False) -> Any:
    other = linear() if isinstance(module, nvfp4.NVFP4Linear) else make_moe()[1]
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.zero_()
    other.load_state_dict(reloaded(module.state_dict(), weights_only=True), assign=assign)
    return other


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": lambda module: reloaded(module, weights_only=False),
    "state_dict": through_state,
    "state_dict, assigned": lambda module: through_state(module, assign=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [linear, lambda: make_moe()[1]], ids=["linear", "mixture of experts"])
def test_a_module_survives(make: Callable[[], Any], way: str) -> None:
    torch.manual_seed(0)
    module = make()
    x = torch.randn(3, 32 if isinstance(module, nvfp4.NVFP4Linear) else 64)
    expected = module(x)
    other = WAYS[way](module)
    torch.testing.assert_close(other(x), expected, atol=0, rtol=0)
    with torch.no_grad():
        for tensor in module.buffers():
            tensor.zero_()
    torch.testing.assert_close(other(x), expected, atol=0, rtol=0)


def test_a_compiled_graph_sees_the_weights_as_they_are() -> None:
    torch.manual_seed(0)
    x, first, second = torch.randn(2, 32), linear(), linear()
    compiled: Any = torch.compile(first, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), first(x))
    with torch.compiler.set_stance("fail_on_recompile"):
        first.load_state_dict(second.state_dict())
        torch.testing.assert_close(compiled(x), second(x))
        other = first.runner.weight.tensor
        negative = nvfp4.NVFP4Weight.of(other._replace(packed=other.packed ^ 0x88))
        first.weight_codes = negative.codes
        torch.testing.assert_close(compiled(x) - first.bias, second.bias - second(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_scales_keep_their_types(dtype: torch.dtype) -> None:
    module = linear()
    before = {name: tensor.clone() for name, tensor in module.named_buffers()}
    module.to(dtype)
    assert module.bias.dtype == dtype
    for name, tensor in module.named_buffers():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])


def test_an_exported_program_holds_the_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(linear(), nn.ReLU(), nvfp4.NVFP4Linear.from_float(nn.Linear(16, 8)))
    x, rows = torch.randn(4, 32), torch.export.Dim("rows", min=1, max=64)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=({0: rows},))
        torch.testing.assert_close(program.module()(x[:3]), model(x[:3]))
    assert sum(name.endswith("weight_codes") for name in program.state_dict) == 2


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_a_linear(compiled: bool) -> None:
    torch.manual_seed(0)
    module = linear()
    call: Any = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    x, weight = torch.randn(3, 5, 32, requires_grad=True), module.runner.weight.decoded()
    call(x).square().sum().backward()
    found = x.grad, module.bias.grad
    y, bias = x.detach().requires_grad_(), module.bias.detach().requires_grad_()
    nn.functional.linear(y, weight, bias).square().sum().backward()
    torch.testing.assert_close(found, (y.grad, bias.grad))
    assert [name for name, _ in module.named_parameters()] == ["bias"]


@pytest.mark.parametrize("name", ROUTINGS)
def test_gradients_of_a_mixture_of_experts(name: str) -> None:
    moe, _, runner = make_moe()
    x, weights, ids = routing(name)
    inputs = x.requires_grad_(), weights.requires_grad_()
    found = torch.autograd.grad(nvfp4.moe_gemm(*inputs, ids, runner).sin().sum(), inputs)
    by_float64 = by_hand(moe, *inputs, ids).sin().sum() if len(ids) else (x * 0).sum() + (weights * 0).sum()
    expected = torch.autograd.grad(by_float64, inputs)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_mixture_of_experts_is_compiled_in_grad_mode() -> None:
    moe, module, _ = make_moe()
    x = torch.randn(5, 64)
    compiled: Any = torch.compile(module, fullgraph=True, backend="aot_eager")
    compiled(x).square().sum().backward()
    moe(x).square().sum().backward()
    torch.testing.assert_close(module.router.weight.grad, moe.router.weight.grad, atol=1e-3, rtol=1e-3)


SHARDED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
import nvfp4

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 32), nvfp4.NVFP4Linear.from_float(nn.Linear(32, 16)))
x = torch.randn(4, 32)
expected = model(x)
before = {name: tensor.clone() for name, tensor in model[1].named_buffers()}
for layer in model:
    fully_shard(layer)
fully_shard(model)
assert isinstance(model[0].weight, DTensor)
for name, tensor in model[1].named_buffers():
    assert type(tensor) is torch.Tensor and torch.equal(tensor, before[name]), name
torch.testing.assert_close(model(x), expected)
model(x).sum().backward()
assert model[0].weight.grad.full_tensor().abs().sum() > 0
dist.destroy_process_group()
print("whole")
"""


@pytest.mark.slow
def test_fsdp_leaves_it_whole() -> None:
    assert python("-c", SHARDED, EXAMPLES, env={"OMP_NUM_THREADS": "1"}).strip() == "whole"


def test_a_llama_is_quantised_in_place_and_compiled() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model: Any = transformers.LlamaForCausalLM(config).eval()
    weights = {
        name: module.weight.detach().clone() for name, module in model.named_modules() if type(module) is nn.Linear
    }
    report = nvfp4.quantise_(model, lambda name, _: name != "lm_head")
    assert len(report.layers) == 14
    assert report.left == (("lm_head", "the filter"),)
    for layer in report.layers:
        module = model.get_submodule(layer.name)
        assert isinstance(module, nvfp4.NVFP4Linear)
        off = module.runner.weight.decoded() - weights[layer.name]
        assert layer.error == pytest.approx(float(off.norm() / weights[layer.name].norm()))
        assert 0.05 < layer.error < 0.15
        assert layer.bytes_before / layer.bytes_after > 6.5
        assert layer.name in str(report)
    assert not model.get_submodule("model.layers.0.mlp.up_proj").training
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(tokens, use_cache=False).logits, expected)
    assert expected.isfinite().all()


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_what_stays_and_why() -> None:
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": shared, "b": shared, "odd": nn.Linear(20, 8), "scaled": Scaled(32, 8)})
    report = nvfp4.quantise_(model)
    assert [layer.name for layer in report.layers] == ["a"]
    assert model["a"] is model["b"]
    assert dict(report.left) == {
        "odd": "in_features 20 is not a multiple of 16",
        "scaled": "a subclass of nn.Linear, Scaled",
    }


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (nn.Linear(32, 32), r"was given an nn\.Linear; .*NVFP4Linear\.from_float"),
        (nn.Sequential(nn.ReLU()), r"turned no linear of Sequential \(there is no nn\.Linear below it\)"),
        (
            nn.Sequential(nn.Linear(20, 8)),
            r"turned no linear of Sequential \(0: in_features 20 is not a multiple of 16\)",
        ),
    ],
)
def test_nothing_to_turn(model: nn.Module, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        nvfp4.quantise_(model)
