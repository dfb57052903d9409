# SPDX-License-Identifier: Apache-2.0
"""3D convolutions written as 2D ones give the same numbers, in float64, to the last bit on small integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from made_passes import calls, decomposed, is_left_alone, pretend_cuda, rewritten, trace
from magi_passes import (
    ChannelMomentsPass,
    ConvPaddingPass,
    PassContext,
    PassPipeline,
    TemporalConvPass,
    _torch_compat,
    collect_records,
)
from magi_passes._graph.nodes import CONVERT


aten = torch.ops.aten
triples = st.tuples(*[st.integers(1, 2)] * 3)


def _integers(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape).double()


def _rewritten(gm: torch.fx.GraphModule, **fields: Any) -> torch.fx.GraphModule:
    return rewritten(gm, ConvPaddingPass(), TemporalConvPass(always=True, **fields))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    groups=st.sampled_from([1, 2, 4]),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    stride=triples,
    padding=st.tuples(*[st.integers(0, 2)] * 3),
    dilation=triples,
    size=st.tuples(st.integers(1, 2), st.integers(1, 7), st.integers(5, 8), st.integers(5, 8)),
    explicit=st.sampled_from([None, (1, 1, 1, 1, 2, 0), (0, 1, 2, 0, 0, 3), (0, 0, 0, 0, 2, 2), (-1, 0, 0, 0, 1, 1)]),
    bias=st.booleans(),
    dynamic=st.sampled_from([(), (3, 4), (2, 3, 4), (0, 3, 4)]),
    min_skipped=st.sampled_from([0.0, 0.125, 2.0]),
    native_channels=st.sampled_from([1, 192]),
)
def test_exact_for_everything_it_accepts(
    groups: int,
    kernel: tuple[int, int, int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    size: tuple[int, int, int, int],
    explicit: Any,
    bias: bool,
    dynamic: tuple[int, ...],
    min_skipped: float,
    native_channels: int,
) -> None:
    def convolve(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.pad(x, explicit) if explicit else x
        lists = list(stride), list(padding), list(dilation)
        return aten.convolution.default(x, w, b if bias else None, *lists, False, [0, 0, 0], groups)  # type: ignore[no-any-return]

    batch, *space = size
    x, w, b = _integers(batch, 4, *space), _integers(8, 4 // groups, *kernel), _integers(8)
    try:
        expected = convolve(x, w, b)
    except RuntimeError:
        assume(False)
    traced = trace(convolve, (x, w, b), [d for d in dynamic if x.shape[d] > 1])
    gm = _rewritten(traced, min_skipped=min_skipped, native_channels=native_channels)

    if native_channels > 4:
        assert all(node.meta["val"].dim() == 4 for node in calls(gm, aten.convolution.default))
    assert torch.equal(gm(x, w, b), expected)


LAYOUT, JOINED, _ = _torch_compat.compiling.layout_ops()


@pytest.mark.parametrize(("channels", "is_native"), [(63, False), (64, True), (96, False), (128, True), (130, True)])
@pytest.mark.parametrize("kernel", [(3, 3, 3), (3, 1, 1)])
def test_many_channels_stay_in_three_dimensions(channels: int, is_native: bool, kernel: tuple[int, ...]) -> None:
    x, w = torch.zeros(1, channels, 9, 6, 6), torch.zeros(4, channels, *kernel)
    gm = _rewritten(trace(torch.conv3d, (x, w), (2, 3, 4)))
    (conv,) = calls(gm, aten.convolution.default)
    assert conv.meta["val"].dim() == (5 if is_native else 4)
    assert conv.args[0].target is LAYOUT


def _replicated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.conv3d(torch.nn.functional.pad(x.relu(), (1, 1, 1, 1, 2, 0), mode="replicate"), w)


def _upsampled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.conv3d(torch.nn.functional.interpolate(x.relu(), scale_factor=2, mode="nearest"), w)


def _joined(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = torch.cat([x, x.relu()], 2)
    return torch.conv3d(torch.nn.functional.pad(x, (1, 1, 1, 1, 2, 0), mode="replicate"), w)


@pytest.mark.parametrize("fn", [_replicated, _upsampled, _joined])
@pytest.mark.parametrize("memory", ["channels first", "channels last"])
def test_what_is_repeated_is_written_channels_last_before(fn: Any, memory: str) -> None:
    """Where it lies channels-first: a kernel that repeats pixels cannot transpose them in tiles."""
    x, w = _integers(1, 4, 3, 5, 5).float(), _integers(4, 4, 3, 3, 3).float()
    if memory == "channels last":
        x = x.contiguous(memory_format=torch.channels_last_3d)
    gm = decomposed(fn, x, w)
    _rewritten(gm, native_channels=1)
    (conv,) = calls(gm, aten.convolution.default)
    stored = [*calls(gm, JOINED), *calls(gm, LAYOUT)]
    assert conv.args[0] in stored
    assert len(stored) == (2 if memory == "channels first" else 1)
    assert torch.equal(gm(x, w), fn(x, w))


@pytest.mark.parametrize("scale", [None, (2, 2), (2, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_convolution_reads_through_views_is_written_channels_last(
    scale: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    """The frames of a video as images, as an upsampler of a decoder reads them: a view cannot be given a layout."""

    def fn(x: torch.Tensor, w: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        video = torch.conv3d(x, w).relu()
        if scale is not None and len(scale) == 3:
            video = torch.nn.functional.interpolate(video, scale_factor=scale)
        video = torch.cat([video, -video], 2) if scale is None else video
        images = video.transpose(1, 2).reshape(-1, 4, *video.shape[3:])
        if scale is not None and len(scale) == 2:
            images = torch.nn.functional.interpolate(images, scale_factor=scale)
        back = images.reshape(1, -1, *images.shape[1:]).transpose(1, 2)
        again = torch.conv2d(back.transpose(1, 2).reshape(images.shape), flat)
        return again + torch.conv2d(video.transpose(1, 2).reshape(-1, 4, *video.shape[3:]), flat).mean()

    x, w, flat = (_integers(*shape).to(dtype) for shape in ((1, 4, 5, 6, 7), (4, 4, 3, 3, 3), (3, 4, 3, 3)))
    gm = decomposed(fn, x, w, flat)
    converted = len(calls(gm, CONVERT))
    _rewritten(gm, native_channels=1)
    conv = next(each for each in calls(gm, aten.convolution.default) if each.meta["val"].dim() == 4)
    source = conv.args[0]
    while source.target not in (LAYOUT, JOINED):
        assert source.target in (aten.view.default, aten.permute.default)
        source = source.args[0]
    assert source is not conv.args[0]
    # torch upsamples in float32, which changes no number.
    assert converted - len(calls(gm, CONVERT)) == (2 if scale == (2, 2, 2) and dtype == torch.bfloat16 else 0)
    assert torch.equal(gm(x, w, flat), fn(x, w, flat))


@pytest.mark.parametrize("reads_item", [True, False])
def test_a_convolution_reads_one_of_several_results_of_an_operator(reads_item: bool) -> None:
    """Such as the output of attention, or the values of a pooling with indices; or a view of it."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        largest = torch.conv3d(x, w).relu()[:, :, 0].topk(3, dim=3)[0]
        return torch.conv2d(largest if reads_item else largest.transpose(2, 3), w[:, :, 0])

    x, w = _integers(1, 4, 5, 6, 7), _integers(4, 4, 3, 3, 3)
    gm = decomposed(fn, x, w)
    _rewritten(gm, native_channels=1)
    assert torch.equal(gm(x, w), fn(x, w))


def test_what_is_looked_up_elsewhere_is_not_a_repeated_video() -> None:
    """A video of entries of a table: what is stored is the video, and not the table."""

    def looked_up(image: torch.Tensor, places: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        table = image.relu().reshape(8, -1)
        return torch.conv3d(table[:, places].permute(1, 0, 2, 3, 4), w)

    image, places, w = _integers(1, 8, 3, 4), torch.randint(0, 12, (2, 4, 5, 5)), _integers(4, 8, 3, 3, 3)
    gm = _rewritten(trace(looked_up, (image, places, w)), native_channels=1)
    (stored,) = calls(gm, LAYOUT)
    assert stored.meta["val"].dim() == 5
    assert torch.equal(gm(image, places, w), looked_up(image, places, w))


def _cached(x: torch.Tensor, cache: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer of a causal decoder, with what it keeps for the frames that follow."""
    frames = torch.cat([cache, x.relu()], 2)
    return torch.conv3d(torch.nn.functional.pad(frames, (1, 1, 1, 1, 1, 0)), w), frames[:, :, -2:]


@pytest.mark.parametrize("native", [1, 192])
@pytest.mark.parametrize("dims", [(), (3, 4), (0, 2, 3, 4)])
@pytest.mark.parametrize("dim", [1, 2])
def test_each_operand_of_a_concatenation_is_written_channels_last(native: int, dims: tuple[int, ...], dim: int) -> None:
    def fn(x: torch.Tensor, cache: torch.Tensor, w: torch.Tensor) -> Any:
        return _cached(x, cache, w) if dim == 2 else torch.conv3d(torch.cat([cache, x.relu()], 1), w, padding=1)

    x, cache = _integers(2, 4, 3, 5, 6), _integers(2, 4, 1 if dim == 2 else 3, 5, 6)
    w = _integers(8, 4 if dim == 2 else 8, 3, 3, 3)
    gm = _rewritten(trace(fn, (x, cache, w), dims), native_channels=native, min_skipped=2.0)
    assert not [each for each in calls(gm, aten.cat.default) if each.meta["val"].dim() == 5]
    joined = calls(gm, JOINED)
    in_3d = native == 1 and dim == 2
    assert len(joined) == 1 + in_3d
    if in_3d:
        # The frame of zeros is written with what is kept of the frames before.
        (conv,) = calls(gm, aten.convolution.default)
        assert conv.args[0] is joined[-1]
        kept, new = joined[-1].args[0]
        assert (kept.target, new.target) == (aten.constant_pad_nd.default, aten.relu.default)
    assert all(each.meta["val"].stride(1) == 1 for each in joined)
    for ours, expected in zip(gm(x, cache, w), fn(x, cache, w), strict=True):
        assert torch.equal(ours, expected)


def test_a_concatenation_of_several_types_stays() -> None:
    def fn(x: torch.Tensor, cache: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.conv3d(torch.cat([cache, x], 2), w)

    x, cache, w = _integers(1, 4, 3, 5, 5), _integers(1, 4, 1, 5, 5).float(), _integers(8, 4, 3, 3, 3)
    gm = _rewritten(trace(fn, (x, cache, w)), native_channels=1)
    assert not calls(gm, JOINED)
    assert torch.equal(gm(x, cache, w), fn(x, cache, w))


def test_the_layout_operators_are_a_copy_and_a_concatenation() -> None:
    _rewritten(trace(torch.conv3d, (_integers(1, 2, 3, 5, 5), _integers(4, 2, 3, 3, 3))))
    for shape in ((2, 3, 4, 5), (2, 3, 4, 5, 6)):
        x, y = _integers(*shape), _integers(*shape)
        torch.library.opcheck(JOINED, ([x, y], 1), test_utils="test_schema")
        assert torch.equal(torch.ops.magi_passes.cat_channels_last([x, y], 2), torch.cat([x, y], 2))
        assert torch.ops.magi_passes.cat_channels_last([x, y], 2).stride(1) == 1
        torch.library.opcheck(torch.ops.magi_passes.channels_last.default, (x,), test_utils="test_schema")
        assert torch.equal(torch.ops.magi_passes.channels_last(x), x)
        assert torch.ops.magi_passes.channels_last(x).stride(1) == 1


def _causal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.conv3d(torch.nn.functional.pad(x, (1, 1, 1, 1, 2, 0)), w)


@pytest.mark.parametrize(
    ("fn", "frames", "channels", "dims", "convolutions"),
    [
        # Two frames of padding before three frames: one tap, two taps, three taps.
        (_causal, 3, 4, (3, 4), [4, 8, 12]),
        (_causal, 3, 192, (), [192, 384, 576]),
        # A small share of zeros is not worth more convolutions.
        (lambda x, w: torch.conv3d(x, w, padding=1), 16, 4, (), [12]),
        # Two cached frames and a new one, three taps, one frame out.
        (lambda x, w: torch.conv3d(torch.cat([x[:, :, :2], x[:, :, 2:]], 2), w, padding=(0, 1, 1)), 3, 4, (), [12]),
    ],
)
def test_taps_that_read_zeros_are_left_out(
    fn: Any, frames: int, channels: int, dims: tuple[int, ...], convolutions: list[int]
) -> None:
    x, w = _integers(1, channels, frames, 5, 5), _integers(4, channels, 3, 3, 3)
    gm = _rewritten(trace(fn, (x, w), dims))
    assert [node.args[1].meta["val"].shape[1] for node in calls(gm, aten.convolution.default)] == convolutions
    assert {tuple(node.args[4]) for node in calls(gm, aten.convolution.default)} == {(1, 1)}
    has_padding = bool(calls(gm, aten.constant_pad_nd.default))
    assert has_padding is (frames == 16)
    assert torch.equal(gm(x, w), fn(x, w))


def test_small_weights_are_written_together() -> None:
    x, weights = _integers(1, 2, 3, 6, 7), [_integers(2, 2, 3, 3, 3) for _ in range(3)]

    def convolutions(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.nn.functional.conv3d(x, weight, padding=(1, 0, 0)).sign()
            x = torch.nn.functional.pad(x, (1, 1, 1, 1))
        return x

    gm = _rewritten(trace(convolutions, (x, *weights), (3, 4)), min_skipped=2.0)
    (written,) = calls(gm, aten._foreach_mul.Scalar)
    assert len(written.args[0]) == 3
    assert torch.equal(gm(x, *weights), convolutions(x, *weights))


@pytest.mark.parametrize(
    "fn",
    [
        torch.conv_transpose3d,
        lambda x, w: torch.conv2d(x[:, :, 0], w[:, :, 0]),
        lambda x, w: torch.conv1d(x[:, :, 0, 0], w[:, :, 0, 0]),
    ],
    ids=["transposed", "2D", "1D"],
)
def test_the_rest_is_left_alone(fn: Any) -> None:
    gm = trace(fn, (_integers(1, 4, 3, 6, 6), _integers(4, 4, 3, 3, 3)))
    assert is_left_alone(gm, TemporalConvPass(always=True))


@pytest.mark.parametrize(
    ("cuda", "dtype", "groups", "taps", "pays"),
    [
        (True, torch.bfloat16, 1, 3, True),
        (True, torch.float16, 1, 3, True),
        (True, torch.float32, 1, 3, False),
        (True, torch.bfloat16, 2, 3, False),
        (True, torch.bfloat16, 1, 5, False),
        (False, torch.bfloat16, 1, 3, False),
    ],
)
def test_it_pays_in_half_precision_on_cuda(cuda: bool, dtype: torch.dtype, groups: int, taps: int, pays: bool) -> None:
    tensors = torch.ones(1, 4, 6, 6, 6), torch.ones(4, 4 // groups, taps, 3, 3)
    gm = trace(lambda x, w: torch.conv3d(x, w, groups=groups), tensors)
    if cuda:
        pretend_cuda(gm, dtype)
    assert TemporalConvPass().is_applicable(gm.graph, PassContext()).applies is pays


@pytest.mark.slow
def test_compiled_residual_blocks_agree_with_eager(inductor: Any) -> None:
    """Dynamic height and width, residual sums, norms over channels: the layouts that the pass asks for are legal."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = torch.nn.ModuleList(torch.nn.Conv3d(8, 8, 3) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for conv in self.convs:
                h = torch.nn.functional.silu(torch.nn.functional.normalize(x, dim=1))
                x = x + conv(torch.nn.functional.pad(h, (1, 1, 1, 1, 2, 0)))
            return x

    block, x = Block().double(), torch.randn(1, 8, 3, 10, 12, dtype=torch.float64)
    pipeline = PassPipeline([ConvPaddingPass(), TemporalConvPass(always=True)])
    with torch.no_grad(), collect_records() as records:
        compiled = torch.compile(block, dynamic=True, options=pipeline.inductor_options())
        for shape in (x, torch.randn(1, 8, 3, 14, 9, dtype=torch.float64)):
            torch.testing.assert_close(compiled(shape), block(shape), rtol=1e-10, atol=1e-10)
    assert [record.ran for record in records][:2] == [True, True]


@pytest.mark.slow
def test_training_agrees_with_eager(inductor: Any) -> None:
    model = torch.nn.Sequential(
        *(torch.nn.Conv3d(4, 8, 3, padding=1), torch.nn.GroupNorm(2, 8), torch.nn.SiLU(), torch.nn.Conv3d(8, 4, 3))
    ).double()
    x = torch.randn(2, 4, 4, 6, 7, dtype=torch.float64)
    pipeline = PassPipeline([ConvPaddingPass(), TemporalConvPass(always=True), ChannelMomentsPass(always=True)])
    torch.autograd.backward(model(x).square().sum())
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.autograd.backward(torch.compile(model, options=pipeline.inductor_options())(x).square().sum())
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-9)
