# SPDX-License-Identifier: Apache-2.0
"""examples/nvfp4: the format against float64, modules in models: gradients, copies, compilation, FSDP2, a Llama."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _nvfp4 import EXAMPLES, ROUTINGS, VALUES, by_hand, make_moe, nvfp4, routing
from _pages import read_page
from _python import python
from _signatures import count_graphs
from magi_opschema import opcheck
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def reference(x: Tensor) -> tuple[list[int], list[float], float]:
    """Codes, block scales and tensor scale of a vector, by brute force over all codes in Python's floats."""
    values = [float(v) for v in x.double()]
    tensor_scale = float(torch.tensor(max(map(abs, values)) / (6 * 448), dtype=torch.float64).float()) or 1.0
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()
    codes: list[int] = []
    scales: list[float] = []
    for start in range(0, len(values), 16):
        block = values[start : start + 16]
        wanted = max(map(abs, block)) / 6
        scale = grid[_nearest([s * tensor_scale for s in grid], wanted)]
        scales.append(scale)
        steps = [v * scale * tensor_scale for v in VALUES[:8]]
        for value in block:
            code = _nearest(steps, abs(value)) if scale else 0
            codes.append(code | (8 if str(value).startswith("-") else 0))
    return codes, scales, tensor_scale


def _nearest(grid: list[float], value: float) -> int:
    """The nearest; of two equally near the even one."""
    return min(range(len(grid)), key=lambda i: (abs(grid[i] - value), i % 2))


def test_all_16_codes_are_exact() -> None:
    block = torch.tensor(VALUES)
    quantised = nvfp4.quantize_nvfp4(block * 448)
    assert quantised.packed.tolist() == [low | high << 4 for low, high in itertools.pairwise(range(16))][::2]
    assert quantised.block_scale.float().tolist() == [448.0]
    back = nvfp4.dequantize_nvfp4(quantised)
    assert torch.equal(back, block * 448)
    assert torch.equal(back.signbit(), block.signbit())


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-30, 3e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantise_is_exact_against_float64(scale: float, dtype: torch.dtype) -> None:
    if dtype is torch.float16 and scale not in {1.0, 1e-3}:
        pytest.skip("out of the range of float16")
    x = (torch.randn(40, 16) * torch.logspace(-6, 2, 40).unsqueeze(1) * scale).flatten().to(dtype)
    quantised = nvfp4.quantize_nvfp4(x)
    codes, scales, tensor_scale = reference(x)
    found = torch.stack([quantised.packed & 15, quantised.packed >> 4], -1).flatten()
    assert quantised.tensor_scale.item() == tensor_scale
    assert quantised.block_scale.float().tolist() == scales
    assert found.tolist() == codes
    exact = torch.tensor(
        [VALUES[code] * scales[i // 16] * tensor_scale for i, code in enumerate(codes)], dtype=torch.float64
    )
    assert torch.equal(nvfp4.dequantize_nvfp4(quantised), exact.float())


def test_ties_go_to_the_even_code() -> None:
    block = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 2) * 448
    codes = nvfp4.quantize_nvfp4(block).packed
    assert torch.stack([codes & 15, codes >> 4], -1).flatten().tolist()[:8] == [7, 0, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("shape", [(16,), (3, 32), (2, 3, 48), (0, 16)])
def test_shapes(shape: tuple[int, ...]) -> None:
    quantised = nvfp4.quantize_nvfp4(torch.ones(shape))
    assert quantised.packed.shape == (*shape[:-1], shape[-1] // 2)
    assert quantised.block_scale.shape == (*shape[:-1], shape[-1] // 16)
    assert torch.equal(nvfp4.dequantize_nvfp4(quantised), torch.ones(shape))
    assert torch.equal(nvfp4.dequantize_nvfp4(nvfp4.quantize_nvfp4(torch.zeros(shape))), torch.zeros(shape))


@pytest.mark.parametrize("bad", [torch.ones(15), torch.tensor(1.0), torch.full((16,), float("nan"))])
def test_what_the_format_cannot_hold(bad: Tensor) -> None:
    with pytest.raises(ValueError, match="quantize_nvfp4"):
        nvfp4.quantize_nvfp4(bad)


@pytest.mark.parametrize("rows", [(), (1,), (5,), (2, 3), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_the_product_with_the_decoded_weight(rows: tuple[int, ...], dtype: torch.dtype) -> None:
    linear = nn.Linear(64, 24)
    quantised = nvfp4.NVFP4Linear.from_float(linear).to(dtype)
    x = torch.randn(*rows, 64, dtype=dtype)
    weight = nvfp4.dequantize_nvfp4(quantised.runner.weight.tensor).double()
    expected = (x.double() @ weight.T).to(dtype) + quantised.bias
    torch.testing.assert_close(quantised(x), expected)
    assert quantised(x).dtype == dtype
    assert quantised.weight_tensor_scale.dtype == torch.float32


@pytest.mark.parametrize("name", ROUTINGS)
def test_moe_by_every_routing(name: str) -> None:
    moe, quantised, runner = make_moe()
    x, weights, ids = routing(name)
    out = nvfp4.moe_gemm(x, weights, ids, runner)
    torch.testing.assert_close(out, by_hand(moe, x, weights, ids).float(), atol=1e-4, rtol=1e-4)
    if len(ids):
        torch.testing.assert_close(quantised(x), moe(x), atol=1e-4, rtol=1e-4)


def test_experts_have_scales_of_their_own() -> None:
    moe = nvfp4.ReferenceMoE(32, 16, 2, 1)
    with torch.no_grad():
        moe.gate_up[1] *= 1000
    runner = nvfp4.NVFP4MoE.from_float(moe).runner
    assert runner.gate_up.tensor_scale.shape == (2, 1, 1)
    ratio = runner.gate_up.tensor_scale[1] / runner.gate_up.tensor_scale[0]
    assert 300 < ratio < 3000


def test_opcheck() -> None:
    _, _, runner = make_moe()
    linear = nvfp4.NVFP4Linear.from_float(nn.Linear(32, 16))
    assert set(opcheck(nvfp4.linear_gemm, (torch.randn(3, 32), linear.runner)).values()) == {"SUCCESS"}
    assert set(opcheck(nvfp4.moe_gemm, (*routing("every expert"), runner)).values()) == {"SUCCESS"}


def test_32_layers_share_one_graph_and_one_model_has_no_break() -> None:
    layers = [nvfp4.NVFP4Linear.from_float(nn.Linear(32, 32)) for _ in range(32)]
    x = torch.randn(2, 32)
    compiled, graphs = count_graphs(lambda layer, x: layer(x).relu())
    for layer in layers:
        torch.testing.assert_close(compiled(layer, x), layer(x).relu())
    for copied in (copy.deepcopy(layer) for layer in layers):
        torch.testing.assert_close(compiled(copied, x), copied(x).relu())
    assert len(graphs) == 1
    stack = nn.Sequential(*layers)
    whole, graphs = count_graphs(stack)
    torch.testing.assert_close(whole(x), stack(x))
    assert len(graphs) == 1


@pytest.mark.slow
def test_the_program(tmp_path: Path) -> None:
    shown = python("-m", "nvfp4", cwd=EXAMPLES, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    assert "28 linears quantised, one graph" in shown


def copied(to: Path) -> None:
    """docs/nvfp4.md says to copy the folder and own it."""
    shutil.copytree(EXAMPLES / "nvfp4", to, ignore=shutil.ignore_patterns("__pycache__"))


@pytest.mark.slow
def test_the_program_of_the_page_runs_beside_a_copy(tmp_path: Path) -> None:
    copied(tmp_path / "fp4")
    blocks = read_page(EXAMPLES.parent / "docs" / "nvfp4.md")
    programs = [block for block in blocks if block.language == "python" and "from fp4" in block.code]
    assert len(programs) == 1
    assert python("-c", programs[0].code, cwd=tmp_path, env={"PYTHONPATH": ""}) == "['0', '2'] (('3', 'the filter'),)\n"


def test_copies_do_not_meet(tmp_path: Path) -> None:
    package = tmp_path / "mypackage"
    copied(package / "fp4")
    copied(package / "other")
    (package / "__init__.py").touch()
    program = """
import torch
from mypackage import fp4, other
assert fp4.linear_gemm is not other.linear_gemm
print(torch.ops.fp4.linear_gemm, torch.ops.other.linear_gemm)
for package in (fp4, other):
    layer = package.NVFP4Linear.from_float(torch.nn.Linear(32, 16))
    expected = layer.runner.weight.decoded().sum(1) + layer.bias
    torch.testing.assert_close(layer(torch.ones(32)), expected)
"""
    assert python("-c", program, cwd=tmp_path, env={"PYTHONPATH": ""}) == "fp4.linear_gemm other.linear_gemm\n"


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
    model = nn.Sequential(linear(), nn.ReLU(), nvfp4.NVFP4Linear.from_float(nn.Linear(16, 8)))
    x, rows = torch.randn(4, 32), torch.export.Dim("rows", min=1, max=64)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=({0: rows},))
        torch.testing.assert_close(program.module()(x[:3]), model(x[:3]))
    assert sum(name.endswith("weight_codes") for name in program.state_dict) == 2


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_a_linear(compiled: bool) -> None:
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


@pytest.mark.slow
def test_fsdp_leaves_it_whole() -> None:
    model = nn.Sequential(nn.Linear(32, 32), linear())
    x, before = torch.randn(4, 32), {name: tensor.clone() for name, tensor in model[1].named_buffers()}
    expected = model(x)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    try:
        for layer in (*model, model):
            fully_shard(layer)
        assert isinstance(model[0].weight, DTensor)
        for name, tensor in model[1].named_buffers():
            assert type(tensor) is Tensor
            assert torch.equal(tensor, before[name])
        torch.testing.assert_close(model(x), expected)
        model(x).sum().backward()
        gradient: Any = model[0].weight.grad
        assert gradient.full_tensor().abs().sum() > 0
    finally:
        dist.destroy_process_group()


def test_a_llama_is_quantised_in_place_and_compiled() -> None:
    transformers = pytest.importorskip("transformers")
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
