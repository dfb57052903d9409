# SPDX-License-Identifier: Apache-2.0
"""The code that the backend has Inductor write for a GPU: types of sizes and tiles. No GPU is needed to read it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from _card import moved_to_the_card
from _pretended_gpu import generated, module_of
from magi_tritonwrap import triton_op
from magi_tritonwrap.testing import stub_driver
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


BACKENDS = ("inductor", "magi")


def by_both(fn: Callable[..., Any], *given: Tensor) -> list[str]:
    """The code with symbolic sizes of stock Inductor, and of the backend."""
    return [generated(fn, *given, dynamic=True, backend=backend) for backend in BACKENDS]


def counts(pattern: str, fn: Callable[..., Any], *given: Tensor) -> list[int]:
    """How often *pattern* is in the code of stock and of the backend with symbolic sizes, and of stock without."""
    codes = [*by_both(fn, *given), generated(fn, *given, dynamic=False)]
    return [len(re.findall(pattern, code)) for code in codes]


def types_of_sizes(code: str) -> list[set[str]]:
    """For each kernel with symbolic sizes, the types in which it takes them."""
    signatures = re.findall(r"'signature': (\{.*?\})", code)
    return [set(found) for signature in signatures if (found := re.findall(r"'ks\d+': '(\w+)'", signature))]


def padded(x: Tensor) -> Tensor:
    return F.pad(x, (1, 2, 0, 1))


def test_sizes_are_32_bits_wide_unless_the_pass_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(2, 8, 40, 56)
    assert types_of_sizes(generated(padded, x, dynamic=True, backend="magi")) == [{"i32"}]
    assert types_of_sizes(generated(padded, x, dynamic=True)) == [{"i64"}]
    monkeypatch.setenv("MAGI_PASSES_DISABLE", "NarrowSizesPass")
    torch.compiler.reset()
    assert types_of_sizes(generated(padded, x, dynamic=True, backend="magi")) == [{"i64"}]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.sum((1, 2)) / (x.shape[1] * x.shape[2]),
        lambda x: x.sum((1, 2)) + x.shape[1] * x.shape[2],
        lambda x: x.sum((1, 2)) * (x.shape[1] * x.shape[2] // 7),
    ],
    ids=["mean", "added", "quotient"],
)
def test_a_product_of_sizes_that_does_not_fit_keeps_its_64_bits(fn: Any) -> None:
    """The last kernel of a mean counts few elements, and divides by the number of all of them."""
    large = torch.empty(2, 70_000, 80_000, device="meta")
    types = types_of_sizes(generated(fn, large, dynamic=True, backend="magi"))
    assert types
    assert all(each == {"i64"} for each in types), types


def attention(x: Tensor, y: Tensor) -> Tensor:
    """A softmax over rows of the length that a padded convolution with a stride of 2 gives, ``1 + (n - 1)//2``."""
    rows, weights = (F.avg_pool1d(each, 3, 2, 1).transpose(1, 2) for each in (x, y))
    scores = torch.bmm(rows, rows.transpose(1, 2)).view(2, 2, rows.shape[1], rows.shape[1])
    return torch.softmax(scores * weights.sum(2, keepdim=True), -1)


def test_rows_of_a_compound_length_are_read_along_themselves() -> None:
    """Stock takes the index of a row, a term of ``row + row*f``, for the one along which memory is contiguous."""
    x, y = torch.empty(4, 8, 4001), torch.empty(1, 8, 4001)
    reductions = [re.findall(r"def triton_red_fused__softmax\w*\((.*?)\):", code) for code in by_both(attention, x, y)]
    assert ["YBLOCK" in arguments for (arguments,) in reductions] == [True, False]


def test_a_softmax_of_rows_of_a_compound_length_is_one_kernel() -> None:
    """Stock compares numbers of elements that are equal and written differently."""
    x, y = torch.empty(4, 8, 4001), torch.empty(1, 8, 4001)
    assert counts(r"triton_\w+softmax\w*\.run\(", attention, x, y) == [2, 1, 1]


def normed_streams(x: Tensor, y: Tensor) -> Tensor:
    """A norm of the tokens of a text and of an image, side by side, as in a diffusion transformer."""
    tokens = torch.cat([x, y], 1) * 2
    normed = F.layer_norm(tokens, tokens.shape[-1:])
    return F.linear(tokens + normed, x.new_empty(64, 64)) + tokens


def normed_heads(x: Tensor, y: Tensor) -> Tensor:
    heads = F.linear(torch.cat([x, y], 1), x.new_empty(64, 64)).unflatten(-1, (-1, 16))
    return F.rms_norm(heads.float(), heads.shape[-1:]).to(x.dtype)


def normed_weight(x: Tensor, weight: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(weight, dim=(1, 2), keepdim=True)
    return F.conv1d(x, weight.new_empty(128, 1, 1) * weight / norm, padding=3)


@pytest.mark.parametrize(
    ("fn", "given"),
    [
        (normed_streams, [torch.empty(1, 33, 64), torch.empty(1, 70, 64)]),
        (normed_heads, [torch.empty(1, 33, 64), torch.empty(1, 70, 64)]),
        (normed_weight, [torch.empty(2, 128, 500), torch.empty(128, 128, 7)]),
    ],
)
def test_a_norm_and_what_is_computed_from_it_are_one_kernel(fn: Any, given: list[Tensor]) -> None:
    """Numbers of elements that are equal are written in one way, and tiles of their own part no two kernels."""
    three = {"triton.max_tiles": 3, "triton.prefer_nd_tiling": True}
    ours = generated(fn, *given, dynamic=True, backend="magi", options=three)
    static = generated(fn, *given, dynamic=False)
    assert ours.count(".run(") == static.count(".run(")


def of_patches(x: Tensor) -> Tensor:
    patches = F.conv2d(x, x.new_empty(32, 8, 4, 4), stride=4).permute(0, 2, 3, 1)
    return patches + torch.addcmul(x.new_empty(32), x.new_empty(32), patches.exp())


def test_sizes_that_are_never_zero_are_strides_as_they_are() -> None:
    """A contiguous tensor has strides such as ``Max(1, s//4)``, of which stock writes comparisons for each number."""
    codes = by_both(of_patches, torch.empty(2, 8, 40, 56))
    assert ["(1) >= (" in code for code in codes] == [True, False]


def normed_tokens(x: Tensor) -> Tensor:
    tokens = F.linear(F.conv2d(x, x.new_empty(32, 8, 4, 4), stride=4).permute(0, 2, 3, 1), x.new_empty(64, 32)).exp()
    normed: Tensor = tokens * tokens.norm(dim=(1, 2), keepdim=True) + tokens
    return normed


def enlarged(x: Tensor, mode: str, **how: Any) -> Tensor:
    parts = [F.interpolate(part, mode=mode, **how) for part in (x.sigmoid(), x.tanh(), x.exp())]
    return torch.cat(parts, 1)


def test_each_image_that_is_enlarged_is_written_to_its_place() -> None:
    """Stock computes all three for each element, from sums that it stores in float32."""

    def twice(x: Tensor) -> Tensor:
        return enlarged(x, "bilinear", size=(2 * x.shape[2] + 1, 3 * x.shape[3]))

    images = torch.empty(2, 8, 40, 56, dtype=torch.bfloat16)
    codes = by_both(twice, images)
    in_float32 = [re.findall(r"empty_strided_cuda\(.*?torch\.float32\)", code) for code in codes]
    assert [bool(found) for found in in_float32] == [True, False]
    assert len(re.findall(r"triton_\w+\.run\(", codes[1])) == 1  # the three are written side by side


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("nearest", {"scale_factor": 2.0}),
        ("bilinear", {"scale_factor": (1.7, 2.5)}),
        ("bilinear", {"size": (90, 70)}),
        ("bilinear", {"size": (90, 70), "align_corners": True}),
        ("bicubic", {"size": (90, 70)}),
    ],
)
def test_places_that_fit_are_32_bits_wide(mode: str, how: dict[str, Any]) -> None:
    images = torch.empty(2, 8, 40, 56)
    codes = by_both(lambda x: F.interpolate(x, mode=mode, **how), images)
    places = [re.findall(r"(?:maximum|minimum|floor|tmp\d+)\S*\.to\(tl\.int64\)", code) for code in codes]
    assert [bool(found) for found in places] == [True, False], places


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.gather(1, (x * 3).long()),
        lambda x: F.interpolate(x.unsqueeze(0), size=x.shape[1] + 3, mode="linear"),
    ],
    ids=["read", "too large"],
)
def test_places_that_may_not_fit_keep_their_64_bits(fn: Any) -> None:
    """Those that are computed from data, and those of rows that are too long."""
    rows = torch.empty(3, 50_000, device="meta")
    assert ".to(tl.int64)" in generated(fn, rows, dynamic=True, backend="magi")


def in_heads(x: Tensor, y: Tensor) -> Tensor:
    """Rows of tokens, by head: of a flat kernel, ``x // 32 % tokens``."""
    heads: Tensor = (x + y.unsqueeze(1)).unflatten(-1, (4, 32))
    return heads.transpose(1, 2).reshape(-1, 32) * 2


def test_no_kernel_divides_by_a_size_to_find_a_place() -> None:
    codes = by_both(in_heads, torch.empty(3, 50, 128), torch.empty(3, 128))
    divided = [re.findall(r"(?://|%) +ks\d", code) for code in codes]
    assert [bool(found) for found in divided] == [True, False], divided


def with_places(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pairs of a token's heads, and what is known of its row and its column, by which each kernel has to divide."""
    height, width = rows.shape[0], columns.shape[0]
    places = rows.unsqueeze(1).expand(height, width, 64) + columns.expand(height, width, 64)
    pairs = x.view(x.shape[0], height * width, 12, 64, 2).select(-1, 0)
    return pairs * places.reshape(1, height * width, 1, 64)


def test_no_tile_is_chosen_that_saves_no_division() -> None:
    of_stock, ours = by_both(with_places, torch.empty(2, 70 * 50, 1536), torch.empty(70, 64), torch.empty(50, 64))
    assert re.findall(r"size_hints=(.*?)\}", of_stock) == re.findall(r"size_hints=(.*?)\}", ours)


@pytest.mark.parametrize(
    ("fn", "lines"),
    [
        (lambda x: torch.relu(x @ x.new_empty(8, 40)), ["xnumel = xnumel // 8 * 8"]),
        (lambda x: torch.relu(x @ x.new_empty(8, 12)), ["xnumel = xnumel // 4 * 4"]),
        (lambda x: torch.relu(x @ x.new_empty(8, 7)), []),
        (lambda x: torch.relu(x @ x.new_empty(8, 48)), []),
    ],
    ids=["40", "12", "7", "48"],
)
def test_triton_is_told_which_small_number_a_size_is_a_multiple_of(
    fn: Callable[[Tensor], Tensor], lines: list[str]
) -> None:
    codes = by_both(fn, torch.empty(70, 8))
    assert [re.findall(r"xnumel = xnumel.*", code) for code in codes] == [[], lines]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="a tile of three dimensions counts as broadcast there")
def test_what_is_read_once_does_not_stay_in_the_cache() -> None:
    """In stock's code with symbolic sizes, the load along memory is taken for one that jumps."""
    kept = {}
    for backend, dynamic in (("inductor", True), ("magi", True), ("inductor", False)):
        torch.compiler.reset()
        code = generated(normed_tokens, torch.empty(2, 8, 40, 56), dynamic=dynamic, backend=backend)
        kept[backend, dynamic] = len(re.findall("evict_last", code[code.rindex("@triton.jit") :]))
    assert kept["inductor", True] > kept["magi", True] == kept["inductor", False]


def softmax_of_at_most(x: Tensor) -> Tensor:
    torch._check(x.shape[-1] <= 512)
    return torch.softmax(x, -1)


def test_the_warps_for_a_row_of_symbolic_length_are_measured() -> None:
    x = torch.empty(96, 500, 500)
    for backend, dynamic, hint in (("inductor", True, "INNER"), ("magi", True, "DEFAULT"), ("magi", False, "INNER")):
        torch.compiler.reset()
        code = generated(softmax_of_at_most, x, dynamic=dynamic, backend=backend)
        assert re.findall(r"reduction_hint=ReductionHint\.(\w+)", code) == [hint], backend


def tokens(x: Tensor, y: Tensor) -> Tensor:
    """The layers of an image transformer, on tokens of an image and one that stands for all of it."""
    x = torch.cat([y.expand(x.shape[0], 1, -1), x.flatten(2).transpose(1, 2)], 1)
    for _ in range(2):
        x = F.gelu(F.linear(F.gelu(x), x.new_empty(32, 32))) + x
    return x


def test_tokens_are_not_copied_before_they_are_multiplied() -> None:
    """A length like ``1 + h*w`` makes two terms of a stride; stock copies the first factor of each product then."""
    x, y = torch.empty(4, 32, 14, 10), torch.empty(1, 1, 32)
    launches = counts(r"triton_\w+\.run\(", tokens, x, y)
    assert launches[0] > launches[1] == launches[2]


@pytest.mark.parametrize("fn", [torch.var_mean, torch.std, torch.sum])
def test_a_reduction_over_two_tiled_dimensions(fn: Any) -> None:
    """The blocks of such a variance are strings among the expressions that a kernel prints."""
    options = {"triton.max_tiles": 3, "triton.prefer_nd_tiling": True, "triton.tile_reductions": True}
    x = torch.empty(14, 320, 4000, device="meta")
    code = generated(lambda x: fn(x, (0, 2)), x, dynamic=True, backend="magi", options=options)
    assert "R1_BLOCK" in code
    assert types_of_sizes(code)
    assert all(each == {"i32"} for each in types_of_sizes(code))


def configs_of(code: str, folder: Path) -> dict[str, list[triton.Config]]:
    """The configurations among which each kernel is tuned, by its name."""
    kernels = re.findall(r"async_compile\.triton\('(\w+)', \'\'\'(.*?)\'\'\'", code, re.DOTALL)
    with mock.patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu"), stub_driver():
        return {name: getattr(module_of(source, folder), name).configs for name, source in kernels}


def blocks(code: str, folder: Path, dims: str = "XYZ") -> dict[str, set[tuple[int, ...]]]:
    """The blocks along *dims* among which each kernel of these tile dimensions is tuned, by its name."""
    names = [f"{dim}BLOCK" for dim in dims]
    return {
        kernel: {tuple(config.kwargs[name] for name in names) for config in configs}
        for kernel, configs in configs_of(code, folder).items()
        if configs[0].kwargs.keys() == set(names)
    }


def downsample(x: Tensor) -> Tensor:
    """A padded convolution of stride two, as in encoders of images: its padding is written channels-last."""
    return F.conv2d(F.pad(x, (0, 1, 0, 1)), x.new_empty(128, 128, 3, 3), stride=2)


def snake(x: Tensor, scale: Tensor) -> Tensor:
    return x + (scale.exp() * x).sin().square()


def reflected(x: Tensor) -> Tensor:
    return F.pad(x, (1, 1, 1, 1), mode="reflect")


LINES = {(64, 8, 8), (1024, 1, 1)}
CUBES = {(16, 16, 16), (64, 8, 8), (8, 8, 64)}


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        pytest.param(snake, [(16, 128, 5000), (1, 128, 1)], LINES, id="along rows"),
        pytest.param(downsample, [(8, 128, 512, 512)], CUBES, id="transposed"),
        pytest.param(reflected, [(64, 400, 500)], {(16, 16, 16), (64, 8, 8), (512, 2, 1)}, id="in another way"),
    ],
)
def test_tiles_of_three_dimensions_are_tuned_among_the_blocks_that_can_suit(
    fn: Any, shapes: list[tuple[int, ...]], expected: set[tuple[int, ...]], tmp_path: Path
) -> None:
    given = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    three = {"triton.max_tiles": 3, "triton.prefer_nd_tiling": True}
    codes = [
        generated(fn, *given, dynamic=True, backend="magi", options=three | more)
        for more in ({}, {"max_autotune_pointwise": True}, {"triton.autotune_pointwise": False})
    ]
    ours, of_max_autotune, untuned = (blocks(code, tmp_path) for code in codes)
    ((name, seven),) = of_max_autotune.items()
    assert ours == {name: expected}
    assert expected < seven
    assert [len(found) for found in untuned.values()] == [1]


def repeated_twice_as_large(x: Tensor) -> Tensor:
    """`DupUp3D` of diffusers: each channel eight times, as the pixels of an image of twice the size and frames."""
    images, channels, *sizes = x.shape
    pixels = x.repeat_interleave(8, dim=1).view(images, channels, 2, 2, 2, *sizes).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return pixels.reshape(images, channels, *(2 * size for size in sizes)) + 1


def test_channels_that_are_repeated_are_read_together() -> None:
    given = torch.empty(1, 64, 3, 33, 47, device="meta").to(memory_format=torch.channels_last_3d)
    three = {"triton.max_tiles": 3, "triton.prefer_nd_tiling": True}
    code = generated(repeated_twice_as_large, given, dynamic=True, backend="magi", options=three)
    (place,) = re.findall(r"tl\.load\(in_ptr0 \+ \((.*)\), ", code)
    assert "%" not in place


def test_tiles_of_two_dimensions_are_tuned_among_the_blocks_that_can_suit(tmp_path: Path) -> None:
    """Rows of channels, scaled and shifted; and the same with one of them transposed, where all blocks stay."""
    given = [torch.empty(shape, device="meta") for shape in ((5000, 512), (512,), (512,))]
    two = {"triton.max_tiles": 2, "triton.prefer_nd_tiling": True}
    code = generated(lambda x, w, b: torch.relu(x * w + b), *given, dynamic=True, backend="magi", options=two)
    ((_, suitable),) = blocks(code, tmp_path, "XY").items()
    assert suitable == {(64, 64), (256, 16), (512, 2)}
    x, y = given[0], torch.empty(512, 5000, device="meta")
    code = generated(lambda x, y, w: x + y.t() * w, x, y, given[1], dynamic=True, backend="magi", options=two)
    ((_, every),) = blocks(code, tmp_path, "XY").items()
    assert every > suitable


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((50_000, 96), {}, {(8, 2), (32, 2), (64, 8)}),
        ((50_000, 64), {}, {(8, 2), (32, 2), (64, 4)}),
        # Few rows, longer ones, and blocks that somebody asked for.
        ((4_000, 96), {}, {(1, 2), (8, 2), (32, 2)}),
        ((50_000, 256), {}, {(8, 8)}),
        ((50_000, 96), {"max_autotune_pointwise": True}, {(1, 2), (8, 2), (32, 2)}),
    ],
)
def test_short_rows_are_reduced_by_more_threads_than_they_are_long(
    shape: tuple[int, int], options: dict[str, Any], expected: set[tuple[int, int]], tmp_path: Path
) -> None:
    given = [torch.empty(each, dtype=torch.bfloat16, device="meta") for each in (shape, shape[1:])]
    code = generated(lambda x, w: F.rms_norm(x, w.shape, w), *given, dynamic=False, backend="magi", options=options)
    ((name, configs),) = configs_of(code, tmp_path).items()
    assert name.startswith("triton_per_")
    assert {(each.kwargs["XBLOCK"], each.num_warps) for each in configs} == expected


def video(x: Tensor, *weights: Tensor) -> Tensor:
    """Causal convolutions over time; each weight becomes one of two dimensions, three taps side by side."""
    for weight in weights:
        x = F.silu(F.conv3d(F.pad(x, (0, 0, 0, 0, 2, 0)), weight, padding=(0, 1, 1)))
    return x


@pytest.mark.skipif(torch.__version__ < "2.12", reason="two widths are written one by one there")
def test_small_weights_are_written_together() -> None:
    """Three tile dimensions are allowed in such a graph, and a kernel with three would be launched on its own."""
    shapes = [(1, 128, 7, 30, 52), *[(128, 128, 3, 3, 3)] * 3]
    given = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    code = generated(video, *given, dynamic=False, backend="magi")
    # The first frames see two taps, the others three: two widths, of three weights each.
    launches = re.findall(r"triton_for\w*\.run\((.*?), stream", code)
    assert [len(re.findall(r"arg\d+_1", arguments)) for arguments in launches] == [3, 3]


def with_kept_frames(x: Tensor, kept: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A layer of a causal decoder: a norm over the channels, after the frames that it kept, and those it keeps."""
    x = F.silu(F.normalize(x, dim=1))
    frames = torch.cat([kept, x], 2)
    return F.conv3d(F.pad(frames, (1, 1, 1, 1, 2 - kept.shape[2], 0)), weight), x[:, :, -2:].clone()


def written_for_the_card(fn: Callable[..., Any], *given: Tensor) -> str:
    """The program for *fn* with convolutions whose results lie as a GPU's library leaves them."""
    with moved_to_the_card() as codes, pytest.raises(Exception, match="Generated"):
        torch.compile(fn, backend="magi")(*given)
    (code,) = codes
    return code


@pytest.mark.parametrize("frames_kept", [1, 2])
@pytest.mark.parametrize("dims", [(3, 4), ()])
def test_what_a_convolution_reads_is_written_where_it_is_joined(frames_kept: int, dims: tuple[int, ...]) -> None:
    """And not channels-first, as what was kept of the frames before is, and then copied."""
    shapes = (1, 256, 4, 30, 52), (1, 256, frames_kept, 30, 52), (256, 256, 3, 3, 3)
    given = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    for video in given[:2]:
        torch._dynamo.mark_dynamic(video, dims)
    code = written_for_the_card(with_kept_frames, *given)
    (joined,) = re.findall(r"extern_kernels\.convolution\((\w+), ", code)
    (strides,) = re.findall(rf"\b{joined} = empty_strided_cuda\(\(1, 256, 6, \S+ \S+, (\(.*?\)), torch", code)
    assert strides.split(", ")[1] == "1"
    parts = re.findall(rf"(\w+) = reinterpret_tensor\({joined}, ", code)
    assert len(parts) == 2
    launches = re.findall(r"^ +triton_\w+\.run\((.*)\)", code, re.MULTILINE)
    assert not any(joined in re.split(r"\W+", arguments) for arguments in launches)


@pytest.mark.parametrize("channels", [64, 256])
def test_what_is_joined_is_in_use_for_few_layers_at_a_time(channels: int) -> None:
    """Neither are the frames that all layers kept copied first, nor those that they keep last."""
    layers = 9

    def decoder(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        to_keep = []
        for kept, weight in zip(rest[:layers], rest[layers:], strict=True):
            x, frames = with_kept_frames(x, kept, weight)
            to_keep.append(frames)
        return x, *to_keep

    x, kept = (1, channels, 4, 128, 96), (1, channels, 2, 128, 96)
    weight = channels, channels, 3, 3, 3
    given = [torch.empty(shape, dtype=torch.bfloat16) for shape in (x, *[kept] * layers, *[weight] * layers)]
    code = written_for_the_card(decoder, *given)
    # The others use the memory of earlier ones.
    assert 1 <= len(re.findall(rf"empty_strided_cuda\(\(1, {channels}, 6, ", code)) <= 3
    assert len(re.findall(r"extern_kernels\.convolution", code)) == layers


@triton.jit
def doubled_tile(source, out):  # type: ignore[no-untyped-def]
    at = [tl.program_id(0) * 16, tl.program_id(1) * 32]
    out.store(at, source.load(at) * 2)


def doubled_columns(x: Tensor) -> Tensor:
    """Twice the first 32 columns of x."""
    out = x.new_empty(x.shape[0], 32)
    source = TensorDescriptor(x, list(out.shape), list(x.stride()), [16, 32])
    doubled_tile[triton.cdiv(x.shape[0], 16), 1](source, TensorDescriptor.from_tensor(out, [16, 32]))
    return out


@pytest.mark.parametrize("backend", ["inductor", "magi"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_descriptor_is_made_again_at_the_launch(backend: str, dynamic: bool) -> None:
    op = triton_op("gpu_code::doubled_columns", doubled_columns, mutates_args=())
    x = torch.empty(40, 64)
    code = generated(lambda x: op(x.relu()), x, dynamic=dynamic, backend=backend)
    rows, stride = (r"s\d+", r"s\d+") if dynamic else (40, 64)
    part = rf"reinterpret_tensor\(buf\d, \({rows}, 32\), \({stride}, 1\), 0\)"
    assert re.search(rf"TensorDescriptor\.from_tensor\({part}, \[16, 32\]\)", code)
    assert re.search(r"doubled_tile_\d\.run\(", code)


@triton.jit
def scaled_kernel(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * 3 + 1, at < n)


SMALL, LARGE = (triton.autotune([triton.Config({"BLOCK": size})], key=[])(scaled_kernel) for size in (128, 256))


def launching(name: str, kernel: Any, **options: Any) -> Any:
    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel(), **options)
        return out

    return triton_op(f"test_gpu_code::{name}", body, mutates_args=())


@pytest.mark.parametrize("backend", ["inductor", "magi"])
def test_launch_options_are_those_that_inductor_reads(backend: str) -> None:
    """Each launch with other options has a kernel of its own; equal ones share it."""
    options: list[tuple[dict[str, Any], str]] = [
        ({"launch_pdl": True}, "'launch_pdl': True"),
        ({"enable_fp_fusion": False, "num_warps": 8}, "'enable_fp_fusion': False"),
        ({"enable_reflect_ftz": False}, "'disable_ftz': True"),
        ({"launch_cooperative_grid": True}, "'launch_cooperative_grid': True"),
        ({}, ""),
    ]
    seen = [launching(f"{backend}_{at}", scaled_kernel, BLOCK=128, **each) for at, (each, _) in enumerate(options)]
    code = generated(lambda x: [op(x) for op in (*seen, seen[0])], torch.empty(300), backend=backend)
    metas = re.findall(r"configs=(.*),\n.*\n\s+triton_meta=\{(.*?)'signature'", code)
    assert [meta.strip(", ") for _, meta in metas] == [written for _, written in options]
    assert [configs.count("enable") + configs.count("launch") for configs, _ in metas] == [0] * 5
    assert re.findall(r"(scaled_kernel_\d)\.run", code) == [f"scaled_kernel_{at}" for at in (0, 1, 2, 3, 4, 0)]


@pytest.mark.parametrize("dynamic", [True, False])
def test_attention_of_symbolic_lengths_chooses_its_kernel_without_the_dispatcher(dynamic: bool) -> None:
    def attend(x: Tensor) -> Tensor:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        out: Tensor = cudnn(x, x, x, None, False, 0.0, True, scale=0.5)[0]
        return out.relu()

    x = torch.empty(2, 4, 130, 64, dtype=torch.bfloat16)
    code = generated(attend, x, dynamic=dynamic, backend="magi")
    name = "magi_passes.scaled_dot_product_attention.default.body" if dynamic else "cudnn_attention.default"
    assert re.search(rf"torch\.ops\.\S*{name}\(arg\d_1, arg\d_1, arg\d_1, None, False, 0\.0, True, scale=0\.5\)", code)
    by_name = torch.ops
    for part in ("magi_passes", "scaled_dot_product_attention", "default", "body"):
        by_name = getattr(by_name, part)


def test_a_program_in_cpp_launches_no_cooperative_grid() -> None:
    op = launching("cooperative", scaled_kernel, BLOCK=128, launch_cooperative_grid=True)
    with pytest.raises(
        AssertionError, match=r"launch_cooperative_grid=, and code for C\+\+ launches no kernel in that"
    ):
        generated(lambda x: op(x) + 1, torch.empty(300), options={"cpp_wrapper": True})


def test_launches_of_one_function_with_other_configs_have_other_kernels() -> None:
    """Stock Inductor launches the first kernel twice, the second time on the grid for larger blocks."""
    small, large = launching("small", SMALL), launching("large", LARGE)
    code = generated(lambda x: (small(x), large(x)), torch.empty(300))
    assert re.findall(r"'BLOCK': (\d+), 'num_warps'", code) == ["128", "256"]
    assert re.findall(r"scaled_kernel_(\d)\.run\(\w+, \w+, 300, (\d)", code) == [("0", "3"), ("1", "2")]
