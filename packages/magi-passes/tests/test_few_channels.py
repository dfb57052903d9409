# SPDX-License-Identifier: Apache-2.0
"""Convolutions with few output channels, as products of all taps, give the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from made_passes import calls, is_left_alone, pretend_cuda, rewritten, trace
from magi_passes import FewOutputChannelsPass, PassContext
from torch.nn.functional import pad


aten = torch.ops.aten


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kernel=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    padding=st.integers(0, 3),
    dilation=st.integers(1, 3),
    batch=st.integers(1, 2),
    sizes=st.tuples(*[st.integers(3, 9)] * 3),
    explicit=st.sampled_from([(), (1, 1, 1, 1), (0, 2, 3, 0), (-1, 0, 1, 1), (0, 0, 0, 0, 1, 1)]),
    bias=st.booleans(),
    joined=st.booleans(),
    dynamic=st.sampled_from([(), (2, 3), (0, 2, 3)]),
)
def test_exact_for_everything_it_accepts(
    kernel: list[int],
    padding: int,
    dilation: int,
    batch: int,
    sizes: tuple[int, ...],
    explicit: tuple[int, ...],
    bias: bool,
    joined: bool,
    dynamic: tuple[int, ...],
) -> None:
    space = len(kernel)

    def convolve(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x, x.relu()], 2) if joined else x
        x = pad(x, explicit) if explicit else x
        lists = [1] * space, [padding] * space, [dilation] * space
        return aten.convolution.default(x, w, b if bias else None, *lists, False, [0] * space, 1)  # type: ignore[no-any-return]

    x, w, b = (torch.randint(-3, 4, shape).double() for shape in ((batch, 5, *sizes[:space]), (3, 5, *kernel), (3,)))
    try:
        expected = convolve(x, w, b)
    except RuntimeError:
        assume(False)
    gm = trace(convolve, (x, w, b), [d for d in dynamic if x.shape[d] > 1])
    gm = rewritten(gm, FewOutputChannelsPass(always=True))
    if all(extent - 1 > (k - 1) * dilation for extent, k in zip(sizes, kernel, strict=False)):
        assert not calls(gm, aten.convolution.default)
    assert torch.equal(gm(x, w, b), expected)


def test_padding_of_space_is_not_written() -> None:
    x, w = torch.ones(1, 4, 3, 6, 7), torch.ones(3, 4, 3, 3, 3)
    gm = trace(lambda x, w: torch.conv3d(pad(x, (0, 0, 0, 0, 2, 0)), w, padding=(0, 1, 1)), (x, w), (3, 4))
    gm = rewritten(gm, FewOutputChannelsPass(always=True))
    (product,) = calls(gm, aten.mm.default)
    assert product.meta["val"].shape[0] == 3 * 27
    assert product.args[1].meta["val"].numel() == x.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_half_precision_are_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w, b = (each.to(dtype) for each in (torch.randn(2, 64, 12, 14), torch.randn(3, 64, 3, 3) / 24, torch.randn(3)))
    gm = rewritten(
        trace(lambda x, w, b: torch.conv2d(x, w, b, padding=1), (x, w, b)), FewOutputChannelsPass(always=True)
    )
    exact = torch.conv2d(x.double(), w.double(), b.double(), padding=1)
    assert gm(x, w, b).dtype == dtype
    # Half a unit in the last place, and a little for the sum in float32.
    torch.testing.assert_close(gm(x, w, b).double(), exact, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: torch.conv2d(x, w, stride=2),
        lambda x, w: torch.conv2d(x, w[:, :2], groups=2),
        lambda x, w: torch.conv1d(x[:, :, 0], w[:, :, 0]),
        torch.conv_transpose2d,
    ],
    ids=["stride", "groups", "1D", "transposed"],
)
def test_the_rest_is_left_alone(fn: Any) -> None:
    gm = trace(fn, (torch.ones(1, 4, 8, 8), torch.ones(4, 4, 3, 3)))
    assert is_left_alone(gm, FewOutputChannelsPass(always=True))


@pytest.mark.parametrize(
    ("channels", "out", "size", "dtype", "cuda", "pays"),
    [
        (128, 3, (1024, 1024), torch.bfloat16, True, True),
        (128, 3, (1024, 1024), torch.float16, True, True),
        (96, 3, (6, 544, 960), torch.bfloat16, True, True),
        (128, 3, (1024, 1024), torch.float32, True, False),
        (128, 3, (1024, 1024), torch.bfloat16, False, False),
        (128, 3, (128, 128), torch.bfloat16, True, False),  # small
        (64, 16, (1024, 1024), torch.bfloat16, True, False),  # many output channels for its input channels
        (256, 12, (6, 272, 480), torch.bfloat16, True, False),
        (96, 3, (3, 544, 960), torch.bfloat16, True, False),  # three frames of products for one of the output
    ],
)
def test_it_pays(channels: int, out: int, size: tuple[int, ...], dtype: torch.dtype, cuda: bool, pays: bool) -> None:
    def convolve(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ones, padding = [1] * len(size), [1, 1] if len(size) == 2 else [0, 1, 1]
        return aten.convolution.default(x, w, None, ones, padding, ones, False, [0] * len(size), 1)  # type: ignore[no-any-return]

    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        gm = trace(convolve, (torch.empty(1, channels, *size), torch.empty(out, channels, *[3] * len(size))))
    gm = pretend_cuda(gm, dtype) if cuda else gm
    assert bool(FewOutputChannelsPass().is_applicable(gm.graph, PassContext())) is pays
    if pays:
        gm = rewritten(gm, FewOutputChannelsPass())
        (product,) = calls(gm, aten.mm.dtype)
        assert product.meta["val"].dtype == torch.float32
