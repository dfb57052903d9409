# SPDX-License-Identifier: Apache-2.0
"""examples/nvfp4: the format against float64, modules against float, one graph for many layers, the program, a copy."""

from __future__ import annotations

import copy
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from _nvfp4 import EXAMPLES, ROUTINGS, VALUES, by_hand, make_moe, nvfp4, routing
from _pages import read_page
from _python import python
from magi_opschema import opcheck
from torch import Tensor, nn


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
    torch.manual_seed(0)
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
    torch.manual_seed(0)
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
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    layers = [nvfp4.NVFP4Linear.from_float(nn.Linear(32, 32)) for _ in range(32)]
    x = torch.randn(2, 32)
    compiled = torch.compile(lambda layer, x: layer(x).relu(), backend=backend, fullgraph=True)
    for layer in layers:
        torch.testing.assert_close(compiled(layer, x), layer(x).relu())
    for copied in (copy.deepcopy(layer) for layer in layers):
        torch.testing.assert_close(compiled(copied, x), copied(x).relu())
    assert len(graphs) == 1
    stack = nn.Sequential(*layers)
    torch.testing.assert_close(torch.compile(stack, backend=backend, fullgraph=True)(x), stack(x))
    assert len(graphs) == 2


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
    page = read_page(EXAMPLES.parent / "docs" / "nvfp4.md")
    programs = [block for block in page.blocks if block.language == "python" and "from fp4" in block.code]
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
