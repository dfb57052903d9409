# SPDX-License-Identifier: Apache-2.0
"""Decode an image with a compiled VAE, train the decoder for a step, and print what the compiler did.

The decoder is that of diffusers' ``AutoencoderKL`` with random weights. Its GroupNorm and SiLU are replaced by one
operator of our own, whose settings are a nested dataclass: a Triton kernel on a GPU, plain PyTorch on a CPU.

    python examples/vae_decode.py           # a narrow decoder, seconds on two cores
    python examples/vae_decode.py --full    # the width of SDXL's and FLUX's
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import magi_opschema
import torch
import triton
import triton.language as tl
from diffusers import AutoencoderKL
from magi_backend import Report, explain, magi_register_custom_op
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional


RTOL = ATOL = 1e-4


@dataclass(frozen=True)
class Groups:
    """How the channels of an image are normalised."""

    count: int = 32
    eps: float = 1e-6


@dataclass(frozen=True)
class NormAct:
    """A group normalisation and the activation after it."""

    groups: Groups = field(default_factory=Groups)
    act: Literal["silu", "none"] = "silu"


@triton.jit
def norm_act_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, out, channels, pixels, groups, eps, SILU: tl.constexpr, BLOCK: tl.constexpr
):
    """One program normalises one group of one image; its elements lie side by side."""
    group = tl.program_id(0)
    per_group = channels // groups
    size = per_group * pixels
    start = group.to(tl.int64) * size
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(x + start + at, at < size, other=0.0).to(tl.float32)
        total += value
        squares += value * value
    mean = tl.sum(total) / size
    scale = tl.rsqrt(tl.maximum(tl.sum(squares) / size - mean * mean, 0.0) + eps)
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < size
        channel = (group % groups) * per_group + at // pixels
        value = tl.load(x + start + at, inside, other=0.0).to(tl.float32)
        value = (value - mean) * scale * tl.load(weight + channel, inside) + tl.load(bias + channel, inside)
        if SILU:
            value = value * tl.sigmoid(value)
        tl.store(out + start + at, value, inside)


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what the gradients are made of."""
    del output
    x, weight, bias, cfg = inputs
    ctx.save_for_backward(x, weight, bias)
    ctx.cfg = cfg


def norm_act_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    """The gradients of x, weight and bias; the settings have none."""
    x, weight, bias = ctx.saved_tensors
    groups = ctx.cfg.groups
    grouped = x.reshape(x.shape[0], groups.count, -1)
    mean = grouped.mean(-1, keepdim=True)
    scale = (grouped.var(-1, unbiased=False, keepdim=True) + groups.eps).rsqrt()
    normal = ((grouped - mean) * scale).view(x.shape)
    if ctx.cfg.act == "silu":
        linear = normal * weight[:, None, None] + bias[:, None, None]
        gate = linear.sigmoid()
        grad = grad * gate * (1 + linear * (1 - gate))
    inner = (grad * weight[:, None, None]).reshape(grouped.shape)
    flat = normal.reshape(grouped.shape)
    grad_x = scale * (inner - inner.mean(-1, keepdim=True) - flat * (inner * flat).mean(-1, keepdim=True))
    return grad_x.view(x.shape), (grad * normal).sum((0, 2, 3)), grad.sum((0, 2, 3)), None


@magi_register_custom_op(
    "vae_example::norm_act",
    setup_context_fn=save_for_backward,
    backward_fn=norm_act_backward,
)
def norm_act(x: Tensor, weight: Tensor, bias: Tensor, cfg: NormAct) -> Tensor:
    """Normalise x, of shape [N, C, H, W], over groups of channels, then activate it."""
    x = x.contiguous()
    out = torch.empty_like(x)
    batch, channels, height, width = x.shape
    programs = batch * cfg.groups.count
    norm_act_kernel[(programs,)](
        *(x, weight, bias, out, channels, height * width, cfg.groups.count, cfg.groups.eps),
        SILU=cfg.act == "silu",
        BLOCK=1024,
    )
    return out


def norm_act_on_cpu(x: Tensor, weight: Tensor, bias: Tensor, cfg: NormAct) -> Tensor:
    """The same in plain PyTorch."""
    out = functional.group_norm(x.contiguous(), cfg.groups.count, weight, bias, cfg.groups.eps)
    return functional.silu(out) if cfg.act == "silu" else out


magi_opschema.register_kernel(norm_act, "cpu", norm_act_on_cpu)


class NormActModule(nn.Module):
    """A GroupNorm of diffusers and the SiLU after it, as our operator."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.cfg = NormAct(Groups(norm.num_groups, norm.eps))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the operator."""
        return norm_act(x, self.weight, self.bias, self.cfg)


def with_our_operator(decoder: Any) -> nn.Module:
    """Put the operator in place of every GroupNorm that a SiLU follows."""
    blocks: list[Any] = list(decoder.modules())
    for block in blocks:
        if hasattr(block, "nonlinearity") and hasattr(block, "norm2"):
            block.norm1, block.norm2 = NormActModule(block.norm1), NormActModule(block.norm2)
            block.nonlinearity = nn.Identity()
    decoder.conv_norm_out, decoder.conv_act = NormActModule(decoder.conv_norm_out), nn.Identity()
    replaced: nn.Module = decoder
    return replaced


@dataclass(frozen=True)
class Sizes:
    """The width of a decoder and the latents that it decodes."""

    channels: tuple[int, ...]
    layers: int
    groups: int
    latents: tuple[tuple[int, int], tuple[int, int]]
    training: tuple[int, int]


NARROW = Sizes((32, 64), layers=1, groups=8, latents=((32, 48), (40, 64)), training=(16, 24))
FULL = Sizes((128, 256, 512, 512), layers=2, groups=32, latents=((32, 48), (40, 64)), training=(16, 24))


def build(sizes: Sizes) -> nn.Module:
    """The decoder of an ``AutoencoderKL`` with random weights."""
    torch.manual_seed(0)
    vae: Any = AutoencoderKL(  # type: ignore[no-untyped-call]
        down_block_types=["DownEncoderBlock2D"] * len(sizes.channels),
        up_block_types=["UpDecoderBlock2D"] * len(sizes.channels),
        block_out_channels=sizes.channels,
        layers_per_block=sizes.layers,
        norm_num_groups=sizes.groups,
        latent_channels=4,
    )
    decoder: nn.Module = vae.decoder
    return decoder


def waves(height: int, width: int, device: torch.device) -> Tensor:
    """Latents [1, 4, height, width] of a few smooth waves, so that the decoded image has something to look at."""
    rows = torch.linspace(0, 6.0, height, device=device)[:, None]
    columns = torch.linspace(0, 9.0, width, device=device)[None, :]
    return torch.stack([torch.sin((1 + k) * rows / 2 + (2 - k) * columns / 3 + k) for k in range(4)])[None] * 2


class Step(nn.Module):
    """The loss of one training step."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, latents: Tensor, target: Tensor) -> Tensor:
        """Mean squared error of the decoded latents."""
        return functional.mse_loss(self.decoder(latents), target)


def decode(decoder: nn.Module, sizes: Sizes, device: torch.device) -> tuple[Report, Tensor]:
    """Decode at two sizes with one compiled decoder, each compared with eager."""
    compiled = torch.compile(decoder, backend="magi", dynamic=True)
    explained = explain(compiled)
    with torch.no_grad():
        for height, width in sizes.latents:
            print(f"decoding latents of {height} x {width}")
            report = explained(waves(height, width, device))
        image = compiled(waves(*sizes.latents[-1], device))
    return report, image


def train(decoder: nn.Module, sizes: Sizes, device: torch.device) -> Report:
    """One step of SGD, its loss and every gradient compared with eager."""
    step = Step(decoder)
    compiled = torch.compile(step, backend="magi", dynamic=True)
    latents = waves(*sizes.training, device)
    target = torch.zeros_like(decoder(latents))
    print(f"training on latents of {sizes.training[0]} x {sizes.training[1]}")
    report = explain(compiled)(latents, target)
    optimizer = torch.optim.SGD(step.parameters(), lr=1e-2)
    before = compiled(latents, target)
    before.backward()
    optimizer.step()
    print(f"loss {before.item():.4f} before the step, {step(latents, target).item():.4f} after it\n")
    return report


def save(image: Tensor, path: Path) -> None:
    """Write [1, 3, H, W], stretched to the full range, as a PNG."""
    low, high = image.amin(), image.amax()
    pixels = ((image[0] - low) / (high - low) * 255).round().to(torch.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy()).save(path)


def main(arguments: list[str] | None = None) -> int:
    """Run the example; the exit status is 1 if anything disagrees with eager."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the width of SDXL's and FLUX's decoder")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for the image and the pages (default: out)"
    )
    chosen = parser.parse_args(arguments)
    sizes = FULL if chosen.full else NARROW
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # A GPU's convolutions round their inputs to ten bits by default, each algorithm in its own way.
    torch.backends.cudnn.allow_tf32 = False
    start = time.perf_counter()

    original, decoder = build(sizes).to(device), with_our_operator(build(sizes)).to(device)
    with torch.no_grad():
        latents = waves(*sizes.latents[0], device)
        replaced = torch.allclose(decoder(latents), original(latents), rtol=RTOL, atol=ATOL)
    print(f"our operator against GroupNorm and SiLU, eager: {'agree' if replaced else 'DIFFER'}")

    decoded, image = decode(decoder, sizes, device)
    trained = train(decoder, sizes, device)
    print(decoded)
    print(trained)
    save(image, chosen.out / "vae_decode.png")
    (chosen.out / "vae_decode.html").write_text(decoded.to_html())
    (chosen.out / "vae_train.html").write_text(trained.to_html())
    print(
        f"wrote {chosen.out}/vae_decode.png, vae_decode.html and vae_train.html in {time.perf_counter() - start:.0f} s"
    )
    agrees = replaced and decoded.agrees and trained.agrees
    print("compiled and eager agree" if agrees else "compiled and eager DIFFER")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
