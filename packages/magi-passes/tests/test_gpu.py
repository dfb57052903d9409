# SPDX-License-Identifier: Apache-2.0
"""On a CUDA GPU: the passes are right where only a GPU can tell."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from magi_passes import (
    AttentionPlansPass,
    ChannelMomentsPass,
    ConvChooser,
    ConvLayoutPass,
    ConvPaddingPass,
    MagiInductorPass,
    NDTilingWorkaroundPass,
    PassPipeline,
    TemporalConvPass,
    WrittenAttentionPass,
    collect_records,
)
from magi_passes._torch_compat import attention
from test_attention import FORMS, attention_inputs, temperature_and_rows_hidden_in_whole
from torch import nn
from torch.nn import functional


pytestmark = pytest.mark.gpu


class Video(nn.Module):
    """A causal block with a norm over channels and a group norm."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv3d(channels, channels, 3) for _ in range(2))
        self.norm = nn.GroupNorm(8, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            h = functional.silu(functional.normalize(x, dim=1))
            x = x + conv(functional.pad(h, (1, 1, 1, 1, 2, 0)))
        out: torch.Tensor = self.norm(x)
        return out


def _close(compiled: Any, model: Any, x: torch.Tensor) -> None:
    """Within bf16 tolerance: not much further from a float32 reference than eager bf16 is."""
    ours, eager = compiled(x).float(), model(x).float()
    assert ((ours - eager).norm() / eager.norm()).item() < 2e-2


@pytest.mark.parametrize("tiles", [2, 3])
@pytest.mark.parametrize("passes", [(), (ConvLayoutPass(),)], ids=["contiguous", "channels-last"])
def test_one_compiled_graph_below_and_above_the_limit_of_the_grid(
    inductor: Any, tiles: int, passes: tuple[MagiInductorPass, ...]
) -> None:
    """z holds batch times channels: 64, then 80,000, past the 65,535 that CUDA allows; then a long y."""
    weight = torch.randn(4, 4, 3, 3, device="cuda")

    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.conv2d(functional.silu(x.transpose(2, 3)), weight, padding=1)
        return y + y.transpose(2, 3).flip(3).transpose(2, 3).contiguous()

    options = PassPipeline([NDTilingWorkaroundPass(None, tiles), *passes]).inductor_options()
    compiled = torch.compile(model, dynamic=True, options=options)
    with torch.no_grad(), collect_records() as records:
        for shape in ((16, 4, 6, 10), (20000, 4, 6, 10), (3, 4, 70000, 6), (3, 4, 6, 70000)):
            x = torch.randn(shape, device="cuda")
            # Without TF32: a convolution in channels-last order takes another algorithm, which rounds elsewhere.
            with torch.backends.cudnn.flags(allow_tf32=False):
                torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)
    assert records[0].ran


@pytest.mark.parametrize(
    "passes",
    [
        (ConvPaddingPass(), TemporalConvPass()),
        (ConvPaddingPass(), TemporalConvPass(min_skipped=2.0), ChannelMomentsPass()),
        (ConvPaddingPass(), TemporalConvPass(), ChannelMomentsPass(), NDTilingWorkaroundPass(None, 2)),
        (ConvPaddingPass(), TemporalConvPass(), ChannelMomentsPass(), NDTilingWorkaroundPass(None, 3)),
        (ConvChooser(),),
    ],
    ids=["temporal", "all frames", "nd2", "nd3", "chooser"],
)
def test_a_video_block_in_bf16(inductor: Any, passes: tuple[MagiInductorPass, ...]) -> None:
    model = Video().cuda().bfloat16()
    compiled = torch.compile(model, options=PassPipeline(passes).inductor_options())
    with torch.no_grad():
        for frames, height, width in ((3, 20, 28), (3, 33, 17), (1, 20, 28)):
            x = torch.randn(1, 64, frames, height, width, device="cuda").bfloat16()
            torch._dynamo.mark_dynamic(x, [3, 4])
            _close(compiled, model, x)


@pytest.mark.parametrize("dynamic", [True, False], ids=["symbolic", "constant"])
def test_group_norms_are_right_for_blocks_of_several_groups(inductor: Any, dynamic: bool) -> None:
    """Sums over a tile of three dimensions, as ``triton.tile_reductions`` has them, were wrong for these sizes."""
    options = PassPipeline([ChannelMomentsPass(always=True), ConvChooser(min_share=0)]).inductor_options()
    for batch, channels, *size in ((2, 640, 64, 48), (1, 512, 128, 128), (2, 320, 128, 96), (1, 128, 3, 64, 80)):
        convolution = nn.Conv2d if len(size) == 2 else nn.Conv3d
        model = nn.Sequential(convolution(channels, channels, 1), nn.GroupNorm(32, channels), nn.SiLU())
        model = model.cuda().bfloat16()
        compiled = torch.compile(model, dynamic=dynamic, options=options)
        with torch.no_grad():
            _close(compiled, model, torch.randn(batch, channels, *size, device="cuda").bfloat16())


def test_channels_last_is_turned_on_for_symbolic_sizes(inductor: Any) -> None:
    model = (
        nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.SiLU(), nn.Conv2d(64, 128, 3, padding=1)).cuda().bfloat16()
    )
    compiled = torch.compile(model, dynamic=True, options=PassPipeline([ConvLayoutPass()]).inductor_options())
    with torch.no_grad(), collect_records() as records:
        for size in (32, 48):
            _close(compiled, model, torch.randn(2, 64, size, size + 8, device="cuda").bfloat16())
    assert records[0].config_changes == {"force_layout_optimization": (False, True)}


@pytest.mark.slow
def test_tuning_is_right_and_remembered(inductor: Any, tmp_path: Any) -> None:
    model = Video(32).cuda().bfloat16()
    options = PassPipeline([ConvChooser(tune=True, cache_dir=str(tmp_path))]).inductor_options()
    x = torch.randn(1, 32, 3, 24, 40, device="cuda").bfloat16()
    torch._dynamo.mark_dynamic(x, [3, 4])
    with torch.no_grad(), collect_records() as records:
        _close(torch.compile(model, options=options), model, x)
    assert next(record.reason for record in records if record.pass_name == "ConvChooser").startswith("tuned: ")
    assert len(list(tmp_path.glob("*.json"))) == 1


# Stock says this of the form in float16, which stays as it is.
@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_attention_that_is_written_out_is_one_kernel(inductor: Any, form: Any, dtype: torch.dtype) -> None:
    options = PassPipeline([WrittenAttentionPass()]).inductor_options()
    compiled: Any = torch.compile(form, options=options)
    for length in (49, 131, 512):
        given = attention_inputs(dtype, length, "cuda")
        for x in given:
            torch._dynamo.mark_dynamic(x, 2)
        torch._dynamo.mark_dynamic(given[3], 3)
        with collect_records() as records:
            found = compiled(*given)
        is_told = dtype is torch.float16 and form is temperature_and_rows_hidden_in_whole
        assert {record.reason for record in records} <= {f"{int(not is_told)} attentions are written out"}
        exact = form(*(x.float() for x in given))
        torch.testing.assert_close(found.float(), exact, rtol=0.02, atol=0.02 * exact.abs().max().item())


def _laid_out(layout: str, batch: int, heads: int, length: int, numbers: int) -> torch.Tensor:
    """Queries, keys or values on the GPU, which lie in memory as *layout* says; ``qkv`` is a part of a longer row."""
    if layout == "qkv":
        rows = torch.randn(batch, length, 3 * heads * numbers, device="cuda", dtype=torch.bfloat16)
        return rows.chunk(3, -1)[1].view(batch, length, heads, numbers).transpose(1, 2)
    sizes = {"b": batch, "h": heads, "l": length, "d": numbers}
    x = torch.randn([sizes[dim] for dim in layout], device="cuda", dtype=torch.bfloat16)
    return x.permute([layout.index(dim) for dim in "bhld"])


def _exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, is_causal: bool
) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, bias, is_causal=is_causal, enable_gqa=True)


# Torch gives cuDNN no bias of the last two forms.
@pytest.mark.parametrize(
    ("form", "has_plan"),
    [*itertools.product(("plain", "causal", "grouped", "rows"), (True, False)), ("column", False), ("odd", False)],
)
@pytest.mark.parametrize("layout", ["bhld", "blhd", "lbhd", "qkv"])
@pytest.mark.parametrize(("keys", "numbers"), [(77, 64), (256, 128), (129, 80)])
def test_either_kernel_of_attention_has_its_numbers_and_strides(
    monkeypatch: pytest.MonkeyPatch, has_plan: bool, layout: str, keys: int, numbers: int, form: str
) -> None:
    monkeypatch.setattr(attention.Plans, "has_one", lambda *_: has_plan)
    queries, held = keys if form == "causal" else 130, 2 if form == "grouped" else 4
    q, k, v = (_laid_out(layout, 2, *sizes, numbers) for sizes in ((4, queries), (held, keys), (held, keys)))
    bias = {"rows": torch.randn(queries, keys), "column": torch.randn(2, 1, queries, 1)}.get(form)
    if form == "odd":
        bias = torch.randn(2, 1, queries, keys + 3)
    bias = None if bias is None else bias.to("cuda", torch.bfloat16)[..., -keys:]
    forward, _ = attention.operators().values()
    found = forward(q, k, v, bias, False, 0.0, form == "causal")[0]
    exact = _exact(q.double(), k.double(), v.double(), None if bias is None else bias.double(), form == "causal")
    assert found.stride() == torch.empty_like(q).stride()
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=0.03)


# Torch says this once a process, of a product in the thread of the backward.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("had_plan", [True, False])
@pytest.mark.parametrize("has_plan", [True, False])
@pytest.mark.parametrize("layout", ["bhld", "blhd", "lbhd", "qkv"])
@pytest.mark.parametrize("form", ["plain", "causal", "grouped"])
def test_either_backward_of_attention_follows_either_forward(
    monkeypatch: pytest.MonkeyPatch, had_plan: bool, has_plan: bool, layout: str, form: str
) -> None:
    answers = iter([had_plan, has_plan])
    monkeypatch.setattr(attention.Plans, "has_one", lambda *_: next(answers))
    held = 2 if form == "grouped" else 4
    q, k, v = (_laid_out(layout, 2, heads, 129, 64) for heads in (4, held, held))
    given, is_causal = torch.randn(2, 4, 129, 64, device="cuda", dtype=torch.bfloat16), form == "causal"
    forward, backward = attention.operators().values()
    out, powers, starts, ends, most, fewest, seed, offset, _ = forward(q, k, v, None, True, 0.0, is_causal)
    found = backward(given, q, k, v, out, powers, seed, offset, None, starts, ends, most, fewest, 0.0, is_causal)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    _exact(exact[0], exact[1], exact[2], None, is_causal).backward(given.double())
    for x, gradient, of in zip(found, exact, (q, k, v), strict=True):
        assert x.stride() == torch.empty_like(of).stride()
        torch.testing.assert_close(x.double(), gradient.grad, rtol=0, atol=0.03)


def test_attention_of_fresh_lengths_forward_and_backward(inductor: Any) -> None:
    """More lengths than have a plan at once, so that both kernels run in one program."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).relu()

    compiled = torch.compile(attend, options=PassPipeline([AttentionPlansPass()]).inductor_options())
    for length in range(200, 203 + attention.AT_ONCE):
        given = [_laid_out("blhd", 2, 4, length, 64).requires_grad_() for _ in range(3)]
        for x in given:
            torch._dynamo.mark_dynamic(x, 2)
        with collect_records() as records:
            found = compiled(*given)
            found.square().sum().backward()
        exact = [x.detach().double().requires_grad_() for x in given]
        expected = attend(*exact)
        expected.square().sum().backward()
        assert {record.reason for record in records} <= {"1 attentions by cuDNN have symbolic lengths"}
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.03)
        for x, of in zip(given, exact, strict=True):
            torch.testing.assert_close(x.grad, of.grad, rtol=0, atol=0.06, check_dtype=False)
