# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of examples/nvfp4: interpreted, compiled for a GPU that is not there, and on one."""

from __future__ import annotations

import re
from typing import Any

import _ptx
import numpy as np
import pytest
import torch
import triton
from _nvfp4 import ROUTINGS, VALUES, by_hand, every_code, interpret, make_moe, nvfp4, routing
from _pretended_gpu import generated
from nvfp4 import _tilings as tilings
from nvfp4._copy import nvfp4_copy_kernel
from nvfp4._gemm import nvfp4_gemm_kernel
from nvfp4._launch import decoded_copy
from nvfp4._packed_gemv import nvfp4_packed_gemv_kernel
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


NOTICE_BROKEN_KERNELS = {"every expert", "one token", "an expert twice"}


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


@pytest.mark.interpreter
def test_linear_of_every_class_of_rows_under_the_interpreter() -> None:
    # The interpreter of Triton 3.7 multiplies bfloat16 matrices as the integers it keeps them in.
    script = """
    for dtype, off in ((torch.float32, 1e-4), (torch.float16, 2e-2)):
        for out_features, in_features in ((24, 64), (70, 528)):
            weight = nvfp4.NVFP4Weight.of(nvfp4.quantize_nvfp4(torch.randn(out_features, in_features)))
            runner = nvfp4.NVFP4LinearRunner(weight)
            for rows in ((), (4,), (9,), (2, 19), (65,), (257,), (0,)):
                x = torch.randn(*rows, in_features).to(dtype)
                torch.testing.assert_close(runner.run_triton(x), runner.run(x), atol=off, rtol=off)
            x = torch.randn(3, in_features * 2).to(dtype)[:, :in_features]
            torch.testing.assert_close(runner.run_triton(x), runner.run(x), atol=off, rtol=off)
            grad = torch.randn(5, out_features).to(dtype)
            torch.testing.assert_close(
                runner.run_transposed_triton(grad), runner.run_transposed(grad), atol=off, rtol=off
            )
    print("equal")
    """
    assert interpret(script).strip() == "equal"


@pytest.mark.interpreter
def test_every_code_is_exact_under_the_interpreter() -> None:
    script = """
    from nvfp4._launch import decoded_copy, launch_gemm
    from nvfp4._tilings import GemmTile
    weight, exact = every_code()
    weight = nvfp4.NVFP4Weight.of(weight)
    assert torch.equal(decoded_copy(weight, torch.float32), exact.T)
    for parts in (1, 2, 4):
        tile = GemmTile(16, 64, 128, parts, 4, 2)
        assert torch.equal(launch_gemm(torch.eye(16), weight, tile), exact), tile
    print("equal")
    """
    assert interpret(script).strip() == "equal"


@pytest.mark.interpreter
def test_moe_under_the_interpreter() -> None:
    script = """
    import nvfp4._runners as runners
    moe, quantised, runner = make_moe()
    ways, by_default = set(), runners.GROUPED_FROM
    for grouped_from in (by_default, 1):
        runners.GROUPED_FROM = grouped_from
        for name in ROUTINGS:
            arguments = routing(name)
            if grouped_from < by_default <= arguments[2].numel():
                continue  # grouped by default
            ways.add(arguments[2].numel() >= grouped_from)
            expected = by_hand(moe, *arguments).float()
            torch.testing.assert_close(runner.run_triton(*arguments), expected, atol=1e-4, rtol=1e-4, msg=name)
            if name not in ("every expert", "one token"):
                continue
            small = tuple(a.half() if a.is_floating_point() else a for a in arguments)
            torch.testing.assert_close(runner.run_triton(*small).float(), expected, atol=0.3, rtol=0.1, msg=name)
    print(sorted(ways))
    """
    assert interpret(script).strip() == "[False, True]"


def launches(rows: int, columns: int = 512, k: int = 1024) -> list[str]:
    """The launches in the code that Inductor writes for a linear in bfloat16 on a GPU, and what is opaque in it."""
    parts = (
        torch.empty(columns, k // 2, dtype=torch.uint8),
        torch.empty(columns, k // 16, dtype=torch.uint8),
        torch.empty(()),
    )

    def linear(x: Tensor, *parts: Tensor) -> Tensor:
        out: Tensor = nvfp4.linear_gemm(x, nvfp4.NVFP4LinearRunner(nvfp4.NVFP4Weight(*parts)))
        return out.relu()

    with torch.no_grad():
        code = generated(linear, torch.empty(rows, k, dtype=torch.bfloat16), *parts)
    found = re.findall(
        r"(\w+)_kernel_0\.run\(|(extern_kernels\.\w+)\(|(torch\.ops\.\w+)", code[code.index("def call(") :]
    )
    return ["".join(each) for each in found]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (1, ["nvfp4_packed_gemv"]),
        (2, ["nvfp4_gemm"]),
        (16, ["nvfp4_gemm"]),
        (64, ["nvfp4_gemm"]),
        (4096, ["nvfp4_copy", "extern_kernels.mm"]),
    ],
)
def test_each_class_of_rows_has_its_kernel_and_nothing_is_opaque(rows: int, expected: list[str]) -> None:
    assert launches(rows) == expected


def test_narrow_products_have_programs_for_every_multiprocessor() -> None:
    for columns, fewest in ((8192, 256), (1024, 256), (256, 64)):
        tile = tilings.VECTOR.for_columns(columns)
        assert triton.cdiv(columns, tile.block_n) >= fewest
        for rows in (2, 8, 9, 16):
            # A tensor core takes 16 columns at least.
            assert triton.cdiv(columns, tilings.gemm_tile(rows, columns).block_n) >= min(256, columns // 16)
    assert tilings.gemm_tile(8, 8192).block_m == 8
    assert tilings.gemm_tile(9, 8192).block_m == 16
    assert tilings.gemm_tile(10_000, 8192) == tilings.MANY


@pytest.mark.parametrize(("parts", "block_k"), [(2, 64), (4, 32), (8, 16)])
def test_a_tile_that_is_miscompiled_is_refused(parts: int, block_k: int) -> None:
    with pytest.raises(ValueError, match=rf"{parts} parts has a block_k of {block_k}\. .* Use 128 or more\."):
        tilings.GemmTile(16, 32, block_k, parts, 4, 3)
    tilings.GemmTile(16, 32, block_k, 1, 4, 3)


def moe_launches(tokens: int) -> list[str]:
    experts, hidden, inner = 8, 256, 128
    shapes = [(2 * inner, hidden), (hidden, inner)]
    parts = [
        part
        for n, k in shapes
        for part in (
            torch.empty(experts, n, k // 2, dtype=torch.uint8),
            torch.empty(experts, n, k // 16, dtype=torch.uint8),
            torch.empty(experts),
        )
    ]

    def moe(x: Tensor, weights: Tensor, ids: Tensor, *parts: Tensor) -> Tensor:
        runner = nvfp4.NVFP4MoERunner(nvfp4.NVFP4Weight(*parts[:3]), nvfp4.NVFP4Weight(*parts[3:]))
        out: Tensor = nvfp4.moe_gemm(x, weights, ids, runner)
        return out

    x, ids = torch.empty(tokens, hidden, dtype=torch.bfloat16), torch.empty(tokens, 2, dtype=torch.int64)
    # Folding constants would make them on the GPU that is not there.
    with torch.no_grad(), torch._inductor.config.patch(joint_graph_constant_folding=False):
        code = generated(moe, x, torch.empty(tokens, 2), ids, *parts)
    assert "torch.ops.nvfp4" not in code[code.index("def call(") :]
    return re.findall(r"(nvfp4_\w+)_kernel_\d\.run\(", code)


@pytest.mark.parametrize(("tokens", "kernel"), [(1, "nvfp4_packed_gemv"), (200, "nvfp4_gemm")])
def test_a_mixture_of_experts_is_two_launches_for_any_routing(tokens: int, kernel: str) -> None:
    assert moe_launches(tokens) == [kernel] * 2


def compiled_for_hopper(kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int) -> str:
    """The PTX of a kernel, as a launch with sizes that are multiples of 16 has it compiled."""
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in signature if name != "m"},
    )
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    ptx: str = found.asm["ptx"]
    return ptx


WEIGHT = {"packed": "*u8", "block_scale": "*u8", "tensor_scale": "*fp32"}
TILES = sorted({*(tile for _, tile in tilings.BY_ROWS), tilings.MANY}, key=repr)


@pytest.mark.parametrize("tile", TILES, ids=repr)
@pytest.mark.parametrize("experts", [0, 64])
def test_the_products_compile_for_tensor_cores(tile: Any, experts: int) -> None:
    sizes = dict.fromkeys(("m", "n", "words", "blocks", "stride_x"), "i32")
    groups = dict.fromkeys(("tile_expert", "tile_row", "tile_end", "row_source"), "*i64")
    constants = {
        "EXPERTS": experts, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        "PARTS": tile.parts, "STAGES": tile.stages, "EVEN": True, "PACKED": True,
    }  # fmt: skip
    signature = {"x": "*bf16", **WEIGHT, "out": "*bf16", **sizes, **groups}
    ptx = compiled_for_hopper(nvfp4_gemm_kernel, signature, constants, tile.warps)
    assert re.search(r"(wgmma\.mma_async|mma)\.sync\.aligned\.m\w+\S*\.f32\.bf16\.bf16", ptx)
    assert "cp.async.cg.shared.global" in ptx  # 16 bytes at once, while the tensor cores work
    # Two codes an instruction: nothing becomes a float on the way.
    assert not re.search(r"cvt\.\w+\.bf16\.f32|cvt\.f32\.bf16", ptx.split("st.global")[0].split("$L__BB")[2])


def test_the_vector_kernel_reads_16_bytes_at_once() -> None:
    tile = tilings.VECTOR
    constants = {"SHARED_ROWS": 0, "BLOCK_N": tile.block_n, "BLOCKS": tile.blocks, "STAGES": tile.stages, "EVEN": True}
    sizes = dict.fromkeys(("n", "blocks", "stride_x"), "i32")
    signature = {"x": "*bf16", **WEIGHT, "out": "*bf16", **sizes, "row_expert": "*i64"}
    ptx = compiled_for_hopper(nvfp4_packed_gemv_kernel, signature, constants, tile.warps)
    assert re.search(r"ld\.global\.v2\.b64|cp\.async\.cg\.shared\.global", ptx)


def test_the_copy_compiles() -> None:
    signature = {**WEIGHT, "out": "*bf16", "words": "i32"}
    assert "st.global.v4.b32" in compiled_for_hopper(nvfp4_copy_kernel, signature, {"WORDS": 512}, 4)


@pytest.mark.gpu
@pytest.mark.notices_broken_kernels
@pytest.mark.parametrize("rows", [1, 3, 64, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_on_the_gpu(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nvfp4.NVFP4Linear.from_float(nn.Linear(2064, 520)).to("cuda", dtype)
    x = torch.randn(rows, 2064, device="cuda", dtype=dtype)
    expected = (
        nn.functional.linear(x.double(), nvfp4.dequantize_nvfp4(layer.runner.weight.tensor).double()) + layer.bias
    )
    torch.testing.assert_close(layer(x).double(), expected, atol=3e-2, rtol=2e-2)
    compiled: Any = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x).double(), expected, atol=3e-2, rtol=2e-2)


def on_the_gpu(weight: Any) -> Any:
    return nvfp4.NVFP4Weight(*(part.cuda() for part in vars(nvfp4.NVFP4Weight.of(weight)).values()))


@pytest.mark.gpu
def test_every_code_is_exact_on_the_gpu() -> None:
    weight, exact = every_code()
    runner = nvfp4.NVFP4LinearRunner(on_the_gpu(weight))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        unit = torch.eye(16, device="cuda", dtype=dtype)
        assert torch.equal(runner.run_triton(unit).cpu(), exact.to(dtype))
        rows = torch.cat([runner.run_triton(row[None]) for row in unit])
        assert torch.equal(rows.cpu(), exact.to(dtype))
        assert torch.equal(decoded_copy(runner.weight, dtype).cpu(), exact.T.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("size", [1e-30, 1e-8, 1.0, 1e4, 1e30])
def test_rows_of_any_size_on_the_gpu(size: float, rows: int) -> None:
    """The kernel for bfloat16 brings blocks of x into the range of float16 first."""
    torch.manual_seed(0)
    weight = nvfp4.quantize_nvfp4(torch.randn(520, 2064))
    spread = torch.logspace(-6, 0, 2064)[torch.randperm(2064)]
    x = (torch.randn(rows, 2064) * spread * size).bfloat16()
    x[0, :32] = 0
    expected = x.double() @ nvfp4.dequantize_nvfp4(weight).double().T
    bound = 2e-3 * (x.double().abs() @ nvfp4.dequantize_nvfp4(weight).double().abs().T)
    off = (nvfp4.NVFP4LinearRunner(on_the_gpu(weight)).run_triton(x.cuda()).double().cpu() - expected).abs()
    assert (off <= bound + 2**-8 * expected.abs()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_at_an_odd_place_on_the_gpu(rows: int) -> None:
    torch.manual_seed(0)
    weight = nvfp4.quantize_nvfp4(torch.randn(64, 128))
    x = torch.randn(rows, 131, device="cuda", dtype=torch.bfloat16)[:, 1:129]
    expected = x.double() @ nvfp4.dequantize_nvfp4(weight).double().cuda().T
    out = nvfp4.NVFP4LinearRunner(on_the_gpu(weight)).run_triton(x)
    torch.testing.assert_close(out.double(), expected, atol=3e-2, rtol=2e-2)


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
    runner = nvfp4.NVFP4MoERunner(on_the_gpu(runner.gate_up.tensor), on_the_gpu(runner.down.tensor))
    out = nvfp4.moe_gemm(*(argument.cuda() for argument in arguments), runner)
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
