# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of examples/nvfp4: interpreted, compiled for a GPU that is not there, and on one."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import _ptx
import numpy as np
import pytest
import torch
import triton
from _nvfp4 import ROUTINGS, by_hand, every_code, interpret, make_moe, nvfp4, routing
from _packages import check_elsewhere
from _pretended_gpu import generated
from magi_tritonwrap.testing import stub_driver
from nvfp4 import _decode
from nvfp4 import _tilings as tilings
from nvfp4._copy import nvfp4_copy_kernel
from nvfp4._gemm import nvfp4_gemm_kernel
from nvfp4._launch import Rows, accelerator_loads, decoded_copy, launch
from nvfp4._patches import patches_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


NOTICE_BROKEN_KERNELS = {"every expert", "one token", "an expert twice"}


def test_the_assembly_decodes_every_code_under_every_scale() -> None:
    """The assembly of the kernel, by another program than a GPU: registers of a left operand, as `_patches` says."""
    weight, exact = every_code()
    codes, scales = patches_of(weight)
    values = exact.T.double() / float(weight.tensor_scale) / _decode.LEFT_TO_SCALE.value
    values = torch.nn.functional.pad(values, (0, 48, 0, 1)).view(8, 2, 8, 4, 2, 4, 2)
    for strip, lane, pair in itertools.product(range(8), range(32), range(2)):
        g, t = divmod(lane, 4)
        words = codes[strip, 0, 4 * lane + 2 * pair :][:2].numpy().view(np.uint32)
        of_words = scales[strip, 0, 2 * g + pair].numpy().view(np.uint32)
        inputs = [words[0]] * 8 + [words[1]] * 8 + [of_words] * 16
        registers = _ptx.run(_decode.DECODE.value, outputs=8, inputs=inputs)
        found = np.array(registers, np.uint32).view(np.uint16).astype(np.uint32) << 16
        # block, half of its features, half of the columns, one of two features
        expected = values[strip, :, g, 2 * pair : 2 * pair + 2, :, t].permute(1, 2, 0, 3).flatten()
        assert found.view(np.float32).tolist() == expected.tolist()


@pytest.mark.parametrize("shape", [(64, 128), (24, 48), (1, 16), (3, 40, 80), (2, 2, 16, 192)])
def test_patches_hold_the_weight(shape: tuple[int, ...]) -> None:
    weight = nvfp4.quantize_nvfp4(torch.randn(shape) * torch.logspace(-6, 1, shape[-1]))
    held = nvfp4.NVFP4Weight.of(weight)
    assert held.codes.shape == (*shape[:-2], -(-shape[-2] // 16), -(-shape[-1] // 64), 128)
    assert torch.equal(held.tensor.packed, weight.packed)
    assert torch.equal(held.tensor.block_scale.view(torch.uint8), weight.block_scale.view(torch.uint8))


def test_patches_hold_every_scale() -> None:
    """Also those that `quantize_nvfp4` does not make: negative ones, and what is not a number."""
    weight, _ = every_code()
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    weight = nvfp4.NVFP4Tensor(weight.packed[:1].expand(256, 8), scales, torch.tensor(2.0))
    held = nvfp4.NVFP4Weight.of(weight)
    torch.testing.assert_close(held.decoded(), nvfp4.dequantize_nvfp4(weight), atol=0, rtol=0, equal_nan=True)


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
    from nvfp4._launch import Rows, decoded_copy, launch
    from nvfp4._tilings import ALONE, BY_COLUMNS, LARGE, MANY, SHARING
    weight, exact = every_code()
    weight = nvfp4.NVFP4Weight.of(weight)
    assert torch.equal(decoded_copy(weight, torch.float32), exact.T)
    tables = ALONE, SHARING, *(table for _, table in BY_COLUMNS)
    for tile in {MANY, LARGE, *(tile for table in tables for _, tile in table)}:
        x = torch.eye(16)
        assert torch.equal(launch(x, weight, tile, Rows.of(x, tile)), exact), tile
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


def empty_parts(columns: int, k: int, *experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and tensor scales of a weight, of no value."""
    patches = (*experts, columns // 16, k // 64)
    codes, scales = (torch.empty(*patches, words, dtype=torch.int32) for words in (128, 16))
    return codes, scales, torch.empty(*experts, 1, 1)


def launches(rows: int, columns: int = 512, k: int = 1024, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """The launches in the code that Inductor writes for a linear on a GPU, and what is opaque in it."""

    def linear(x: Tensor, *parts: Tensor) -> Tensor:
        out: Tensor = nvfp4.linear_gemm(x, nvfp4.NVFP4LinearRunner(nvfp4.NVFP4Weight(*parts, columns, k)))
        return out.relu()

    with torch.no_grad():
        code = generated(linear, torch.empty(rows, k, dtype=dtype), *empty_parts(columns, k))
    found = re.findall(
        r"(\w+)_kernel_0\.run\(|(extern_kernels\.\w+)\(|(torch\.ops\.\w+)", code[code.index("def call(") :]
    )
    return ["".join(each) for each in found]


@pytest.mark.parametrize("rows", [1, 16, 64, 4096])
def test_each_class_of_rows_has_its_kernel_and_nothing_is_opaque(rows: int) -> None:
    assert launches(rows) == ["nvfp4_gemm"]
    if rows == 4096:  # many rows that no accelerator loads get a copy
        assert launches(rows, dtype=torch.float32) == ["nvfp4_copy", "extern_kernels.mm"]


def test_the_accelerator_loads_rows_that_lie_evenly() -> None:
    with FakeTensorMode(), stub_driver():
        x = torch.empty(40, 72, device="cuda", dtype=torch.bfloat16)
        assert accelerator_loads(x)
        assert accelerator_loads(x.as_strided((39, 64), (72, 1), 8))
        assert not accelerator_loads(x.as_strided((39, 64), (72, 1), 4)), "begins in the middle of 16 bytes"
        assert not accelerator_loads(x.as_strided((39, 64), (68, 1))), "every other row does"
        assert not accelerator_loads(torch.empty(40, 72, device="cuda"))
        with torch._inductor.config.patch(static_launch_user_defined_triton_kernels=True):
            assert not accelerator_loads(x)
    for other in (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 100, 32), GPUTarget("hip", "gfx942", 64)):
        with FakeTensorMode(), stub_driver(other):
            assert not accelerator_loads(torch.empty(40, 72, device="cuda", dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("rows", "columns", "block"),
    [
        (8, 16384, None),
        (16, 8192, None),
        (16, 14336, (16, 64, 4)),
        (17, 8192, (32, 64, 8)),
        (32, 4096, None),
        (32, 14336, (32, 64, 4)),
        (33, 1024, (64, 64, 4)),
        (64, 8512, (64, 64, 2)),
        (128, 16384, (128, 64, 2)),
        (128, 8192, (128, 64, 4)),
        (256, 8192, (128, 64, 2)),
        (257, 8192, (256, 128, 2)),
        (1024, 1024, (128, 64, 4)),
        (100_000, 1024, (256, 128, 2)),
    ],
)
def test_tiles_are_as_large_as_there_are_enough_of_them(
    rows: int, columns: int, block: tuple[int, int, int] | None
) -> None:
    tile = tilings.tile_of_accelerator(rows, columns)
    assert (tile and (tile.block_m, tile.block_n, tile.patches)) == block


def test_narrow_products_have_programs_for_every_multiprocessor() -> None:
    for rows, columns in itertools.product((1, 8, 9, 16), (8192, 4096, 1024)):
        # A tensor core takes 16 columns at least.
        assert triton.cdiv(columns, tilings.tile_for(rows, columns, torch.bfloat16).block_n) >= min(128, columns // 16)
    blocks = [tilings.tile_for(rows, 8192, torch.bfloat16).block_m for rows in (1, 2, 8, 9, 10_000)]
    assert blocks == [1, 8, 8, 16, tilings.MANY.block_m]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            (16, 32, 2, 4, False),
            r"2 parts of the features for 4 warps\. Use one for each warp, or several, or one part for 4",
        ),
        ((16, 32, 1, 2, False), r"1 parts of the features for 2 warps\."),
        ((64, 32, 1, 4, False), r"32 columns\. Use a multiple of 64, 16 for each warp\."),
        ((16, 24, 4, 4, False), r"24 columns\. Use a multiple of 16"),
        ((16, 32, 4, 4, True), r"the accelerator loads x for one part\. Use parts=1"),
    ],
)
def test_tiles_whose_warps_have_no_patches_of_their_own(
    settings: tuple[int, int, int, int, bool], sentence: str
) -> None:
    block_m, block_n, parts, warps, tiled = settings
    with pytest.raises(ValueError, match=sentence):
        tilings.Tile(block_m, block_n, parts, warps, patches=2, stages=3, tiled=tiled)


@pytest.mark.parametrize("part", ["codes", "scales", ""])
def test_a_weight_that_is_not_in_one_piece_and_rows_of_another_length(part: str) -> None:
    held = nvfp4.NVFP4Weight.of(nvfp4.quantize_nvfp4(torch.randn(32, 128)))
    if part:
        held = replace(held, **{part: getattr(held, part).transpose(0, 1).contiguous().transpose(0, 1)})
    sentence = r"The codes of a weight have strides .*Use \.clone"
    if not part:
        sentence = r"x has 64 features, but the weight is for 128\."
    with pytest.raises(ValueError, match=sentence):
        nvfp4.NVFP4LinearRunner(held).run_triton(torch.randn(2, 128 if part else 64))


def moe_launches(tokens: int) -> list[str]:
    experts, hidden, inner = 8, 256, 128
    shapes = [(2 * inner, hidden), (hidden, inner)]
    parts = [part for shape in shapes for part in empty_parts(*shape, experts)]

    def moe(x: Tensor, weights: Tensor, ids: Tensor, *parts: Tensor) -> Tensor:
        weights_of = [nvfp4.NVFP4Weight(*parts[i : i + 3], *shape) for i, shape in zip((0, 3), shapes, strict=True)]
        runner = nvfp4.NVFP4MoERunner(*weights_of)
        out: Tensor = nvfp4.moe_gemm(x, weights, ids, runner)
        return out

    x, ids = torch.empty(tokens, hidden, dtype=torch.bfloat16), torch.empty(tokens, 2, dtype=torch.int64)
    # Folding constants would make them on the GPU that is not there.
    with torch.no_grad(), torch._inductor.config.patch(joint_graph_constant_folding=False):
        code = generated(moe, x, torch.empty(tokens, 2), ids, *parts)
    assert "torch.ops.nvfp4" not in code
    return re.findall(r"(nvfp4_\w+)_kernel_\d\.run\(", code)


@pytest.mark.parametrize("tokens", [1, 200])
def test_a_mixture_of_experts_is_two_launches_for_any_routing(tokens: int) -> None:
    assert moe_launches(tokens) == ["nvfp4_gemm"] * 2


def compiled_for_hopper(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int, odd: tuple[str, ...] = ()
) -> Any:
    """A kernel compiled as for a launch with sizes and places that are multiples of 16, but for *odd*."""
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in signature if name not in ("m", *odd)},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


SHARED_MEMORY = 232448
"""Bytes that a program may have on Hopper."""
WEIGHT = {"codes": "*i32", "scales": "*i32", "tensor_scale": "*fp32"}


def tiles_of(dtype: torch.dtype) -> list[Any]:
    """Every tile that x of this type may get, in an order that does not change."""
    sizes = itertools.product((1, 8, 16, 32, 64, 128, 256, 512), (4096, 8192, 16384))
    return sorted({tilings.tile_for(rows, columns, dtype) for rows, columns in sizes}, key=repr)


TILES = tiles_of(torch.bfloat16)
OF_ACCELERATOR = [*(tile for _, tile in (*tilings.ALONE, *tilings.SHARING)), tilings.LARGE]
EVERY_TILE = [*TILES, *OF_ACCELERATOR]


def compiled_product(tile: Any, way: int, x: str = "bf16", odd: tuple[str, ...] = ()) -> Any:
    constants = {
        "N": 8192, "K": 8192, "ROUTING": way, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "PARTS": tile.parts,
        "PATCHES": tile.patches, "WARPS": tile.warps, "STAGES": tile.stages, "TILED": tile.tiled, "PACKED": x != "fp32",
    }  # fmt: skip
    sizes = dict.fromkeys(("m", "stride_x", "shared_rows"), "i32")
    of_x = f"tensordesc<{x}[{tile.block_m}, {64 * tile.patches}]>" if tile.tiled else f"*{x}"
    signature = {"x": of_x, **WEIGHT, "out": f"*{x}", **sizes, "routing": "*i64"}
    odd = (*odd, "x") if tile.tiled else odd
    return compiled_for_hopper(nvfp4_gemm_kernel, signature, constants, tile.warps, odd)


@pytest.mark.parametrize("tile", EVERY_TILE, ids=repr)
def test_the_products_compile_for_tensor_cores(tile: Any) -> None:
    for way in range(1 if tile.tiled else 3):
        kernel = compiled_product(tile, way)
        ptx = kernel.asm["ptx"]
        assert re.search(r"(wgmma\.mma_async|mma)\.sync\.aligned\.m\w+\S*\.f32\.bf16\.bf16", ptx)
        assert "cp.async.cg.shared.global" in ptx  # 16 bytes at once, while the tensor cores work
        assert ("cp.async.bulk.tensor" in ptx) == tile.tiled
        assert kernel.metadata.shared <= SHARED_MEMORY


@pytest.mark.parametrize("rows", [1, 32, 64, 256])
def test_float32_fits_in_shared_memory(rows: int) -> None:
    tile = tilings.tile_for(rows, 8192, torch.float32)
    assert compiled_product(tile, 0, "fp32").metadata.shared <= SHARED_MEMORY


@pytest.mark.parametrize("tile", EVERY_TILE, ids=repr)
@pytest.mark.parametrize(("x", "odd"), [("bf16", ()), ("fp16", ()), ("bf16", ("codes",))])
def test_the_assembly_gets_two_words_of_a_thread_at_once(tile: Any, x: str, odd: tuple[str, ...]) -> None:
    """What no type says: which elements Triton hands to assembly together follows from the layout that it chose."""
    ir = compiled_product(tile, 0, x, odd).asm["ttgir"]
    (layout,) = set(re.findall(r"elementwise_inline_asm.*packed_element = 16 .*: tensor<[^#]*x8xi32, (#\w+)>", ir))
    chosen = re.search(rf"^{layout} = #ttg\.(.*)$", ir, re.MULTILINE)
    assert chosen is not None
    assert re.search(
        r"blocked<\{sizePerThread = \[1, 1, 1, 4, 8\].* order = \[4, 3, "
        r"|linear<\{register = \[\[0, 0, 0, 0, 1\], \[0, 0, 0, 0, 2\], \[0, 0, 0, 0, 4\], \[0, 0, 0, 1, 0\]",
        chosen.group(1),
    )


@pytest.mark.parametrize("x", ["bf16", "fp16"])
@pytest.mark.parametrize("tile", [tile for tile in EVERY_TILE if tile.parts == 1], ids=repr)
def test_products_of_a_warp_group_end_before_their_registers_change(tile: Any, x: str) -> None:
    """In a step, whatever decodes or multiplies comes behind a wait for all products, or a wait for them ends it."""
    ptx = compiled_product(tile, 0, x).asm["ptx"]
    if not tile.tiled:
        assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", ptx)) == {"0"}
    # The loop is the block that multiplies and goes back to its own begin.
    blocks = re.split(r"^(\$L__BB\d+_\d+):", ptx, flags=re.MULTILINE)
    (step,) = (
        text[: back.start()]
        for label, text in itertools.pairwise(blocks)
        if "wgmma.mma" in text and (back := re.search(rf"bra\S* *\t*{re.escape(label)};", text))
    )
    found = re.findall(r"wgmma\.(wait_group\.sync\.aligned 0;|mma_async)|(mul)\.rn\.bf16x2", step)
    order = [kind for kind, _ in itertools.groupby("".join(each)[:4] for each in found)]
    assert order[0] == "wait" or order[-1] == "wait", order
    assert "wait" not in order[1:-1]


@pytest.mark.parametrize("tile", [tile for tile in TILES if tile.block_m <= 16], ids=repr)
def test_decoded_values_stay_in_their_registers(tile: Any) -> None:
    loop = compiled_product(tile, 0).asm["ttgir"].partition("scf.for")[2].partition("scf.yield")[0]
    assert "convert_layout" not in loop


def test_the_copy_compiles() -> None:
    signature = {**WEIGHT, "out": "*bf16", **dict.fromkeys(("n", "k", "patches"), "i32")}
    assert "st.global.v4.b32" in compiled_for_hopper(nvfp4_copy_kernel, signature, {"PATCHES": 4}, 4).asm["ptx"]


@pytest.mark.gpu
@pytest.mark.notices_broken_kernels
@pytest.mark.parametrize("rows", [1, 3, 16, 32, 64, 100, 300, 1000, 2100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_linear_on_the_gpu(rows: int, dtype: torch.dtype) -> None:
    layer = nvfp4.NVFP4Linear.from_float(nn.Linear(2064, 1544)).to("cuda", dtype)
    x = torch.randn(rows, 2064, device="cuda", dtype=dtype)
    expected = (
        nn.functional.linear(x.double(), nvfp4.dequantize_nvfp4(layer.runner.weight.tensor).double()) + layer.bias
    )
    torch.testing.assert_close(layer(x).double(), expected, atol=3e-2, rtol=2e-2)
    compiled: Any = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x).double(), expected, atol=3e-2, rtol=2e-2)


def on_the_gpu(weight: Any) -> Any:
    held = nvfp4.NVFP4Weight.of(weight)
    parts = {part: getattr(held, part).cuda() for part in ("codes", "scales", "tensor_scale")}
    return replace(held, **parts)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "ahead"),
    [(torch.float32, 0), (torch.bfloat16, 0), (torch.float16, 0), (torch.bfloat16, 1), (torch.bfloat16, 2)],
)
def test_every_code_is_exact_on_the_gpu_also_at_an_odd_place(dtype: torch.dtype, ahead: int) -> None:
    weight, exact = every_code()
    held, unit = on_the_gpu(weight), torch.eye(16, device="cuda", dtype=dtype)
    codes = torch.cat([held.codes.flatten()[:ahead], held.codes.flatten()])[ahead:].view_as(held.codes)
    if not ahead:
        assert torch.equal(decoded_copy(held, dtype).cpu(), exact.T.to(dtype))
    for tile in [*tiles_of(dtype), *(OF_ACCELERATOR if accelerator_loads(unit) else ())]:
        out = launch(unit, replace(held, codes=codes), tile, Rows.of(unit, tile))
        assert torch.equal(out.cpu(), exact.to(dtype)), tile


@pytest.mark.gpu
@pytest.mark.parametrize("tile", EVERY_TILE, ids=repr)
def test_every_tile_again_and_again_on_the_gpu(tile: Any) -> None:
    """Products that overtake what they read are wrong now and then, on a GPU with much to do."""
    if tile.tiled and not accelerator_loads(torch.empty(1, 8, device="cuda", dtype=torch.bfloat16)):
        pytest.skip("not on Hopper")
    weight = nvfp4.quantize_nvfp4(torch.randn(2048, 4096, device="cuda"))
    held = on_the_gpu(weight)
    x = torch.randn(1024 if tile.parts == 1 else tile.block_m, 4096, device="cuda", dtype=torch.bfloat16)
    expected = x.float() @ nvfp4.dequantize_nvfp4(weight).T
    for _ in range(20):
        out = launch(x, held, tile, Rows.of(x, tile)).float()
        assert float((out - expected).norm() / expected.norm()) < 6e-3


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize("size", [1e-30, 1e-8, 1.0, 1e4, 1e30])
def test_rows_of_any_size_on_the_gpu(size: float, rows: int) -> None:
    weight = nvfp4.quantize_nvfp4(torch.randn(520, 2064))
    spread = torch.logspace(-6, 0, 2064)[torch.randperm(2064)]
    x = (torch.randn(rows, 2064) * spread * size).bfloat16()
    x[0, :32] = 0
    expected = x.double() @ nvfp4.dequantize_nvfp4(weight).double().T
    bound = 2e-3 * (x.double().abs() @ nvfp4.dequantize_nvfp4(weight).double().abs().T)
    off = (nvfp4.NVFP4LinearRunner(on_the_gpu(weight)).run_triton(x.cuda()).double().cpu() - expected).abs()
    assert (off <= bound + 2**-8 * expected.abs()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 40, 600])
def test_rows_at_an_odd_place_on_the_gpu(rows: int) -> None:
    weight = nvfp4.quantize_nvfp4(torch.randn(64, 128))
    x = torch.randn(rows, 131, device="cuda", dtype=torch.bfloat16)[:, 1:129]
    expected = x.double() @ nvfp4.dequantize_nvfp4(weight).double().cuda().T
    out = nvfp4.NVFP4LinearRunner(on_the_gpu(weight)).run_triton(x)
    assert float((out - expected).norm() / expected.norm()) < 6e-3
    if rows < tilings.COPIED_FROM:  # a copy rounds the weight
        torch.testing.assert_close(out.double(), expected, atol=3e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_product_takes_rows_at_any_place_on_the_gpu(dynamic: bool) -> None:
    layer = nvfp4.NVFP4Linear.from_float(nn.Linear(256, 512, bias=False)).to("cuda", torch.bfloat16)
    compiled: Any = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    memory = torch.randn(700 * 256 + 8, device="cuda", dtype=torch.bfloat16)
    for begin, rows in ((0, 40), (1, 40), (8, 40), (3, 300), (0, 300), (0, 600), (2, 600), (0, 5)):
        x = memory[begin : begin + rows * 256].view(rows, 256)
        expected = x.float() @ layer.runner.weight.decoded().T
        torch.testing.assert_close(compiled(x).float(), expected, atol=3e-2, rtol=2e-2)
        torch.testing.assert_close(layer(x).float(), expected, atol=3e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch 2.11, which copies a graph
@pytest.mark.parametrize("rows", [1, 40, 300, 2100])
def test_a_package_multiplies_on_the_gpu(rows: int, tmp_path: Path) -> None:
    layer = nvfp4.NVFP4Linear.from_float(nn.Linear(256, 1536)).to("cuda", torch.bfloat16)
    x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        program = torch.export.export(layer, (x,))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "linear.pt2"))
        values = [torch.randn_like(x) for _ in range(2)]
        assert check_elsewhere(package, [(value, layer(value)) for value in values], tmp_path).strip() == "equal"


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
@pytest.mark.parametrize("rows", [9, 40])
def test_cuda_graphs_capture_the_ops(rows: int) -> None:
    _, quantised, _ = make_moe()
    model = nn.Sequential(nvfp4.NVFP4Linear.from_float(nn.Linear(64, 64)), quantised).to("cuda", torch.bfloat16)
    x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16)
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
