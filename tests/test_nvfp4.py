# SPDX-License-Identifier: Apache-2.0
"""examples/nvfp4: the format against float64, both bodies of the runners, one graph for many layers, the program."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _ptx
import numpy as np
import pytest
import torch
from magi_opschema import opcheck, register_object
from torch import Tensor, nn


if TYPE_CHECKING:
    from collections.abc import Iterator


nvfp4: Any = None  # an example is no installed package: a fixture imports it
EXAMPLES = Path(__file__).parent.parent / "examples"
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@pytest.fixture(autouse=True, scope="module")
def _examples_on_the_path() -> Iterator[None]:
    global nvfp4  # noqa: PLW0603
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import nvfp4 as package

        nvfp4 = package
        yield


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


def make_moe(experts: int = 4, hidden: int = 64, intermediate: int = 48) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    moe = nvfp4.ReferenceMoE(hidden, intermediate, experts, 2)
    quantised = nvfp4.NVFP4MoE.from_float(moe)
    runner = quantised.runner
    with torch.no_grad():
        moe.gate_up.copy_(nvfp4.dequantize_nvfp4(runner.gate_up))
        moe.down.copy_(nvfp4.dequantize_nvfp4(runner.down))
    return moe, quantised, runner


def by_hand(moe: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """A mixture of experts, token by token, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for token, place in itertools.product(range(ids.shape[0]), range(ids.shape[1])):
        gate, up = (moe.gate_up[ids[token, place]].double() @ x[token].double()).chunk(2)
        inner = gate * gate.sigmoid() * up
        out[token] += weights[token, place].double() * (moe.down[ids[token, place]].double() @ inner)
    return out


ROUTINGS = {
    "every expert": [[0, 1], [2, 3], [1, 2], [3, 0], [0, 2]],
    "an expert without tokens": [[0, 1], [3, 1], [0, 3]],
    "all on one expert": [[2, 2]] * 37,
    "an expert twice": [[1, 1], [0, 1], [3, 3]],
    "one token": [[3, 0]],
    "no token": [],
    "not a multiple of the tile": [[i % 4, (i * i + 1) % 4] for i in range(53)],
}
NOTICE_BROKEN_KERNELS = {"every expert", "one token", "an expert twice"}


def routing(name: str) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.tensor(ROUTINGS[name], dtype=torch.long).reshape(-1, 2)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(ids), 64, generator=generator), torch.rand(len(ids), 2, generator=generator), ids


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
    weight = nvfp4.dequantize_nvfp4(quantised.runner.weight).double()
    expected = (x.double() @ weight.T).to(dtype) + quantised.bias
    torch.testing.assert_close(quantised(x), expected)
    assert quantised(x).dtype == dtype
    assert quantised.weight_tensor_scale.dtype == torch.float32


@pytest.mark.parametrize("name", ROUTINGS)
def test_moe_by_every_routing(name: str) -> None:
    moe, quantised, runner = make_moe()
    x, weights, ids = routing(name)
    out = nvfp4.moe_gemm(x, weights, ids, runner, 64)
    torch.testing.assert_close(out, by_hand(moe, x, weights, ids).float(), atol=1e-4, rtol=1e-4)
    if len(ids):
        torch.testing.assert_close(quantised(x), moe(x), atol=1e-4, rtol=1e-4)


def test_experts_have_scales_of_their_own() -> None:
    moe = nvfp4.ReferenceMoE(32, 16, 2, 1)
    with torch.no_grad():
        moe.gate_up[1] *= 1000
    runner = nvfp4.NVFP4MoE.from_float(moe).runner
    assert runner.gate_up.tensor_scale.shape == (2,)
    ratio = runner.gate_up.tensor_scale[1] / runner.gate_up.tensor_scale[0]
    assert 300 < ratio < 3000


def test_opcheck() -> None:
    _, _, runner = make_moe()
    linear = nvfp4.NVFP4Linear.from_float(nn.Linear(32, 16))
    assert set(opcheck(nvfp4.linear_gemm, (torch.randn(3, 32), linear.runner, 16)).values()) == {"SUCCESS"}
    assert set(opcheck(nvfp4.moe_gemm, (*routing("every expert"), runner, 64)).values()) == {"SUCCESS"}


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


def test_runners_follow_their_modules() -> None:
    torch.manual_seed(0)
    x, first, second = torch.randn(2, 32), *(nvfp4.NVFP4Linear.from_float(nn.Linear(32, 16)) for _ in range(2))
    expected = second(x)
    copied = copy.deepcopy(first)
    first.load_state_dict(second.state_dict())
    torch.testing.assert_close(first(x), expected)
    copied.load_state_dict(second.state_dict(), assign=True)
    torch.testing.assert_close(copied(x), expected)
    first.to(torch.float64).to(torch.float32)
    torch.testing.assert_close(first(x), expected)
    assert register_object(first.runner) != register_object(copied.runner)


# The interpreter of Triton 3.7 multiplies bfloat16 matrices as the integers it keeps them in, so they are not tried.
INTERPRETED = """
import sys
sys.path[:0] = [{examples!r}, {tests!r}]
import torch
import nvfp4, test_nvfp4
test_nvfp4.nvfp4 = nvfp4
torch.manual_seed(0)
"""


def interpret(script: str) -> str:
    """Run a script under Triton's interpreter, in a process of its own."""
    head = INTERPRETED.format(examples=str(EXAMPLES), tests=str(Path(__file__).parent))
    result = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.interpreter
def test_triton_linear_under_the_interpreter() -> None:
    script = """
    from nvfp4._runners import GemvTile
    for dtype in (torch.float32, torch.float16):
        for out_features, in_features in ((24, 64), (70, 528)):
            weight = nvfp4.quantize_nvfp4(torch.randn(out_features, in_features))
            runner = nvfp4.NVFP4LinearRunner(weight)
            for rows in ((), (4,), (2, 19), (0,)):
                x = torch.randn(*rows, in_features).to(dtype)
                torch.testing.assert_close(runner.run_triton(x), runner.run(x), atol=2e-2, rtol=2e-2)
            runner.gemv_tile = GemvTile(4, 64, 4, 1)
            # The rows of the vector kernel may be bfloat16, apart from each other too.
            x = torch.randn(3, in_features * 2).bfloat16()[:, :in_features]
            torch.testing.assert_close(runner.run_triton(x), runner.run(x), atol=2e-2, rtol=2e-2)
    # Every code under every scale, with x a unit vector, is decoded exactly.
    scales = torch.arange(127, dtype=torch.uint8)
    packed = torch.arange(8, dtype=torch.uint8) * 2
    packed = (packed | (packed + 1) << 4).expand(127, 8).contiguous()
    weight = nvfp4.NVFP4Tensor(packed, scales.view(torch.float8_e4m3fn)[:, None], torch.tensor(0.75))
    runner = nvfp4.NVFP4LinearRunner(weight)
    exact = nvfp4.dequantize_nvfp4(weight).T
    assert torch.equal(runner.run_triton(torch.eye(16)), exact)
    assert torch.equal(torch.cat([runner.run_triton(row[None]) for row in torch.eye(16)]), exact)
    print("equal")
    """
    assert interpret(script).strip() == "equal"


@pytest.mark.interpreter
def test_triton_moe_under_the_interpreter() -> None:
    script = """
    moe, quantised, runner = test_nvfp4.make_moe()
    for name in test_nvfp4.ROUTINGS:
        arguments = test_nvfp4.routing(name)
        expected = test_nvfp4.by_hand(moe, *arguments).float()
        torch.testing.assert_close(runner.run_triton(*arguments), expected, atol=1e-4, rtol=1e-4, msg=name)
        small = tuple(a.half() if a.is_floating_point() else a for a in arguments)
        torch.testing.assert_close(runner.run_triton(*small).float(), expected, atol=0.3, rtol=0.1, msg=name)
    print("equal")
    """
    assert interpret(script).strip() == "equal"


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-8, 1.0, 1e4, 1e30])
def test_the_packed_arithmetic_of_a_block(size: float) -> None:
    """The assembly of the kernel for one row in bfloat16, by another program than a GPU."""
    import nvfp4._packed_gemv as kernels

    torch.manual_seed(0)
    for _ in range(40):
        x = (torch.randn(16) * torch.logspace(-4, 0, 16)[torch.randperm(16)] * size).bfloat16()
        codes = torch.randint(16, (16,))
        pairs = [
            np.uint32(low & 0xFFFF | (high & 0xFFFF) << 16) for low, high in x.view(torch.int16).view(8, 2).tolist()
        ]
        word = np.uint64(sum(code << 4 * place for place, code in enumerate(codes.tolist())))

        *halves, unit = _ptx.run(kernels.HALVES_OF_A_BLOCK.value, outputs=9, inputs=pairs)
        (dot,) = _ptx.run(kernels.DOT_OF_A_BLOCK.value, outputs=1, inputs=[word, *halves])

        found = float(dot.view(np.float32)) * float(unit.view(np.float32))
        products = x.double() * torch.tensor(VALUES, dtype=torch.float64)[codes]
        assert abs(found - float(products.sum())) <= 2e-3 * float(products.abs().sum())


@pytest.mark.slow
def test_the_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nvfp4"],
        capture_output=True,
        text=True,
        check=False,
        cwd=EXAMPLES,
        timeout=500,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "28 linears quantised, one graph" in done.stdout


@pytest.mark.gpu
@pytest.mark.notices_broken_kernels
@pytest.mark.parametrize("rows", [1, 3, 64, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_on_the_gpu(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nvfp4.NVFP4Linear.from_float(nn.Linear(2064, 520)).to("cuda", dtype)
    x = torch.randn(rows, 2064, device="cuda", dtype=dtype)
    expected = nn.functional.linear(x.double(), nvfp4.dequantize_nvfp4(layer.runner.weight).double()) + layer.bias
    torch.testing.assert_close(layer(x).double(), expected, atol=3e-2, rtol=2e-2)
    compiled: Any = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x).double(), expected, atol=3e-2, rtol=2e-2)


@pytest.mark.gpu
def test_every_code_is_exact_on_the_gpu() -> None:
    scales = torch.arange(127, dtype=torch.uint8)
    packed = torch.arange(8, dtype=torch.uint8) * 2
    packed = (packed | (packed + 1) << 4).expand(127, 8).contiguous()
    weight = nvfp4.NVFP4Tensor(packed, scales.view(torch.float8_e4m3fn)[:, None], torch.tensor(0.75))
    runner = nvfp4.NVFP4LinearRunner(nvfp4.NVFP4Tensor(*(part.cuda() for part in weight)))
    exact, unit = nvfp4.dequantize_nvfp4(weight).T, torch.eye(16, device="cuda")
    assert torch.equal(runner.run_triton(unit).cpu(), exact)
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.cat([runner.run_triton(row[None].to(dtype)) for row in unit])
        assert torch.equal(rows.cpu(), exact.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-30, 1e-8, 1.0, 1e4, 1e30])
def test_one_row_of_any_size_on_the_gpu(size: float) -> None:
    """The kernel for bfloat16 brings blocks of x into the range of float16 first."""
    torch.manual_seed(0)
    weight = nvfp4.quantize_nvfp4(torch.randn(520, 2064))
    runner = nvfp4.NVFP4LinearRunner(nvfp4.NVFP4Tensor(*(part.cuda() for part in weight)))
    spread = torch.logspace(-6, 0, 2064)[torch.randperm(2064)]
    x = (torch.randn(1, 2064) * spread * size).bfloat16()
    x[0, :32] = 0
    expected = x.double() @ nvfp4.dequantize_nvfp4(weight).double().T
    bound = 2e-3 * (x.double().abs() @ nvfp4.dequantize_nvfp4(weight).double().abs().T)
    for stages in (1, 2):
        runner.gemv_tile = dataclasses.replace(runner.gemv_tile, stages=stages)
        off = (runner.run_triton(x.cuda()).double().cpu() - expected).abs()
        assert (off <= bound + 2**-8 * expected.abs()).all()


@pytest.mark.gpu
def test_one_row_at_an_odd_place_on_the_gpu() -> None:
    torch.manual_seed(0)
    weight = nvfp4.quantize_nvfp4(torch.randn(64, 128))
    runner = nvfp4.NVFP4LinearRunner(nvfp4.NVFP4Tensor(*(part.cuda() for part in weight)))
    x = torch.randn(3, 131, device="cuda", dtype=torch.bfloat16)[:, 1:129]
    expected = x.double() @ nvfp4.dequantize_nvfp4(weight).double().cuda().T
    torch.testing.assert_close(runner.run_triton(x).double(), expected, atol=3e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.notices_broken_kernels] if name in NOTICE_BROKEN_KERNELS else [])
        for name in ROUTINGS
    ],
)
def test_moe_on_the_gpu(name: str) -> None:
    moe, _, runner = make_moe()
    arguments = routing(name)
    expected = by_hand(moe, *arguments).float()
    for part in ("gate_up", "down"):
        setattr(runner, part, nvfp4.NVFP4Tensor(*(tensor.cuda() for tensor in getattr(runner, part))))
    on_gpu = [argument.cuda() for argument in arguments]
    out = nvfp4.moe_gemm(*on_gpu, runner, 64)
    torch.testing.assert_close(out.cpu(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled:UserWarning")  # Inductor, about the router
def test_cuda_graphs_capture_the_ops() -> None:
    torch.manual_seed(0)
    _, quantised, _ = make_moe()
    model = nn.Sequential(nvfp4.NVFP4Linear.from_float(nn.Linear(64, 64)), quantised).to("cuda", torch.bfloat16)
    x = torch.randn(9, 64, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        compiled(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(x)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            torch.testing.assert_close(out, model(x), atol=3e-2, rtol=3e-2)
