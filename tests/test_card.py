# SPDX-License-Identifier: Apache-2.0
"""What Inductor writes for a card that is not there, run without it, agrees with eager, and mistakes are noticed."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import triton
from _card import card, compared
from _interpreter import WrongLaunch
from torch import Tensor, nn
from torch._inductor.runtime import hints, triton_heuristics


pytestmark = pytest.mark.usefixtures("unmeasured_guards")
BACKENDS = ["inductor", "magi"]


class Image(nn.Module):
    """A convolution, a norm, a mean and a larger picture; and a view of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.silu(self.norm(self.conv(x)))
        return F.interpolate(y, scale_factor=2.0), y.mean((2, 3)), x.transpose(0, 1)


class Rows(nn.Module):
    """What reduces by rows in other ways than a sum: a variance, a softmax, the place of the largest, a running sum."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.var(1), x.softmax(1), x.argmax(1), x.cumsum(1), x.logcumsumexp(1), torch.special.erfcx(x).sort(1)[0]


class Written(nn.Module):
    """Writes into its argument, and into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(x.amax((0, 2)))
        x.mul_(2)
        return x[:, 1:].relu()


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 2) + 1


class Halved(nn.Module):
    """Sizes like ``1 + (n - 1)//2``: norms and a mean of an image with such sides, and a softmax over such rows."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        image, rows = F.avg_pool2d(x, 3, 2, 1) * 2, F.avg_pool1d(x.mean(2), 3, 2, 1)
        scores = (rows.transpose(1, 2) @ rows)[:, None]
        weights = (scores * rows.amax(1)[:, None, :, None]).softmax(-1)
        return weights, F.group_norm(image, 2), F.layer_norm(image.transpose(1, 3), (4,)), image.mean((2, 3))


class Unpatched(nn.Module):
    """Channels become pixels and frames: a copy in three tile dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(4, 24, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        y = y.unflatten(1, (3, 2, 2, 2)).permute(0, 1, 5, 2, 6, 3, 7, 4)
        return y.flatten(6, 7).flatten(4, 5).flatten(2, 3) * 2


class Enlarged(nn.Module):
    """Two images that are enlarged side by side, one by a factor, and rows of heads."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        size = (2 * x.shape[2] + 1, 3 * x.shape[3])
        both = [F.interpolate(part, size=size, mode="bilinear") for part in (x.sigmoid(), x.tanh())]
        scaled = F.interpolate(x, scale_factor=1.7, mode="bilinear", align_corners=True)
        return torch.cat(both, 1), scaled, F.interpolate(x, scale_factor=2.0), x.transpose(1, 2).reshape(-1, 4) + 1


class Numbered(nn.Module):
    """Numbers that are larger than 32 bits hold, computed from places and sizes that are not."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h, w = x.shape
        places = torch.arange(h, device=x.device)
        stepped, rest = torch.arange(0, h * w**3, w**3, device=x.device), places % (h - 1) * w**3
        return places * w**3, F.pad(places, (1, 2), value=5) * w**3, places.flip(0) * w * w * w, stepped, rest


class Counted(nn.Module):
    """Numbers that are larger than 32 bits hold, computed from places alone, which torch computes in 32 bits."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        places = torch.arange(x.shape[0], device=x.device)
        chosen = torch.where(x > 0, places, places + 1) * torch.where(x > 1, places, places + 2)
        large = places * 40_000_000
        return places**2 * 5_000 + chosen * 5_000, large % 7, -large, large.float().mean(), (places << 24) + 1


def images(dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, ...]]:
    return [(torch.randn(2, 4, 5, 7).to(dtype),), (torch.randn(3, 4, 6, 9).to(dtype),)]


def test_sizes_that_a_padded_convolution_halves_agree() -> None:
    """Stock fails where both sides of an image are such symbols ("Invalid ranges")."""
    found, programs = compared(Halved(), images(), backend="magi", dynamic=True)
    assert found == []
    assert not programs.only_compiled


@pytest.mark.parametrize("dynamic", [True, False])
def test_numbers_that_32_bits_do_not_hold_agree(dynamic: bool) -> None:
    calls = [(torch.randn(size),) for size in (1000, 1500)]
    assert compared(Counted(), calls, backend="magi", dynamic=dynamic)[0] == []
    assert compared(Counted(), calls, backend="inductor", dynamic=dynamic)[0]


class Colours(nn.Module):
    """The end of a decoder of videos, with what it keeps for the frames that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(4, 32, (1, 3, 3), padding=(0, 1, 1)), nn.Conv3d(32, 1, 3, padding=(0, 1, 1))

    def forward(self, x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([kept, F.silu(self.first(x))], 2)
        return self.last(frames), frames[:, :, -2:].clone()


def test_a_convolution_to_few_channels_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magi_passes._rewrites.few_channels.MANY_PRODUCTS", 0)
    shapes = [((1, 4, 4, *size), (1, 32, 2, *size)) for size in ((9, 14), (12, 7))]
    calls = [tuple(torch.randn(shape).bfloat16() for shape in shapes_of_call) for shapes_of_call in shapes]
    found, programs = compared(Colours().bfloat16(), calls, dynamic=True)
    assert found == []
    assert ["mm_dtype" in code for code in programs.codes] == [True]
    assert not programs.only_compiled


def test_a_grid_of_three_dimensions_is_folded_where_it_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program serves all sizes: the first fits, the second is too long along z, the third along z and y."""
    for module in ("magi_passes._torch_compat.grids", "_interpreter"):
        monkeypatch.setattr(f"{module}.MAX_GRID_YZ", 16)
    blocks = triton.Config({"XBLOCK": 8, "YBLOCK": 4, "ZBLOCK": 1}, num_warps=1, num_stages=1)
    monkeypatch.setattr(triton_heuristics, "triton_config", lambda *_, **__: blocks)
    monkeypatch.setitem(hints.TRITON_MAX_BLOCK, "Z", 2)  # all are whole without folds, which torch writes no mask for
    calls = [(torch.randn(1, 4, *size),) for size in ((2, 5, 3), (5, 4, 6), (3, 9, 3))]
    found, programs = compared(Unpatched(), calls, backend="magi", dynamic=True)
    assert found == []
    assert len(programs.codes) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_inference_agrees(backend: str, dtype: torch.dtype) -> None:
    found, programs = compared(Image().to(dtype), images(dtype), backend=backend, dynamic=True)
    assert found == []
    assert len(programs.codes) == 1
    assert all("empty_strided_cuda" in code for code in programs.codes)
    assert set(programs.launches.values()) == {2}
    assert not programs.only_compiled


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_training_step_agrees(backend: str) -> None:
    found, programs = compared(Image(), images(), backend=backend, dynamic=True, training=True)
    assert found == []
    assert sum("backward" in code.partition("\n")[0] for code in programs.codes) == len(programs.codes) // 2 >= 1


ROWS = [(torch.randn(5, 33),), (torch.randn(6, 40),)]
WRITTEN = [(torch.randn(2, 3, 5),), (torch.randn(4, 3, 7),)]
NUMBERED = [(torch.randn(5, 1100),), (torch.randn(4, 1200),)]


@pytest.mark.parametrize(
    ("model", "calls"),
    [(Rows(), ROWS), (Written(), WRITTEN), (Enlarged(), images()), (Numbered(), NUMBERED)],
    ids=["rows", "written", "enlarged", "numbered"],
)
def test_other_programs_agree(model: nn.Module, calls: list[tuple[Tensor, ...]]) -> None:
    found, programs = compared(model, calls, backend="magi", dynamic=True)
    assert found == []
    assert programs.launches


def changed(pattern: str, replacement: str) -> Callable[[str], str]:
    """A change of a program at the first place of *pattern*, which has to be there."""

    def change(code: str) -> str:
        new, count = re.subn(pattern, replacement, code, count=1)
        assert count == 1, f"there is no {pattern} in\n{code}"
        return new

    return change


@pytest.mark.parametrize(
    ("pattern", "replacement", "sentence"),
    [
        (r"\(in_ptr0 \+ \(2\*x(\d)", r"(in_ptr0 + (x\1", r"output 0: wrong by"),
        (r"xindex < xnumel", "xindex < xnumel - 1", r"output 0: wrong by inf"),
        (r"(?m)^( +)return \((buf\d), ", r"\1return (\2.mT.contiguous().mT, ", r"strides of output 0: "),
        (r"'XBLOCK': 'constexpr'\}", "'XBLOCK': 'constexpr', }", ""),
    ],
    ids=["another element", "the last not written", "other strides", "nothing"],
)
def test_a_mistake_in_a_program_is_noticed(pattern: str, replacement: str, sentence: str) -> None:
    x = torch.arange(2 * 3 * 6 * 10.0).view(2, 3, 6, 10)
    found, _ = compared(Pooled(), [(x,)], change=changed(pattern, replacement), dynamic=True)
    assert bool(found) is bool(sentence)
    assert not sentence or any(re.search(sentence, each) for each in found), found


@pytest.mark.parametrize(
    ("pattern", "replacement", "sentence"),
    [
        (r"tl\.load\(in_ptr0 \+ \(", "tl.load(in_ptr0 + (1000000 + ", "reads .* that belong to none of its arguments"),
        (r"tl\.store\(out_ptr0 \+ \(", "tl.store(out_ptr0 + (1000000 + ", "writes .* that belong to none"),
        (r"(?m) ps0 = (.*)$", r" ps0 = \1 + 2**63", "does not fit in int64"),
        (r"\(0,\): \[\['tt.divisibility', 16\]\]", "(0,): [['tt.divisibility', 2**40]]", "in_ptr0 is said to be divis"),
        (r"'in_ptr0': '\*fp32'", "'in_ptr0': '*bf16'", r"in_ptr0 is declared .*bf16.*, and is .*fp32"),
    ],
    ids=["read outside", "written outside", "a number that is too large", "not aligned", "another type"],
)
def test_a_launch_that_breaks_its_word_is_refused(pattern: str, replacement: str, sentence: str) -> None:
    with card(change=changed(pattern, replacement)), torch.no_grad(), pytest.raises(WrongLaunch, match=sentence):
        torch.compile(Pooled(), dynamic=True)(torch.randn(2, 3, 6, 10))


def test_an_expression_of_the_wrapper_is_run() -> None:
    """The class of defect that this is for: x**-1 and the like among the arguments of a kernel."""
    change = changed(r"(?m)_xnumel = .*$", r"_xnumel = 1 // 0")
    with card(change=change), torch.no_grad(), pytest.raises(ZeroDivisionError):
        torch.compile(Pooled(), dynamic=True)(torch.randn(2, 3, 6, 10))


def test_a_kernel_that_is_too_long_is_compiled_and_named() -> None:
    found, programs = compared(Pooled(), [(torch.randn(2, 3, 6, 10),)], most_steps=0, dynamic=True)
    assert found == []
    (name,) = programs.only_compiled
    assert name.startswith("triton_poi_fused_")
    assert not programs.launches
    torch.compiler.reset()
    change = changed(r"tl\.load\(in_ptr0", "tl.load(in_ptr7")
    with card(change=change, most_steps=0), torch.no_grad(), pytest.raises(Exception, match="in_ptr7"):
        torch.compile(Pooled(), dynamic=True)(torch.randn(2, 3, 6, 10))
