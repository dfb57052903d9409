# SPDX-License-Identifier: Apache-2.0
"""Train a small VAE on a picture that the program draws, decode it at two sizes, and print what the compiler did.

The model is diffusers' ``AutoencoderKL`` with random weights. GroupNorm and SiLU of its decoder are replaced by one
operator of our own, whose settings are a nested dataclass: a Triton kernel on a GPU, plain PyTorch on a CPU. The
decoder is compiled and compared with eager, and ``out/vae_decode.png`` shows both side by side.

    python examples/vae_decode.py           # a narrow model, about a minute on two cores that do nothing else
    python examples/vae_decode.py --full    # the width of SDXL's and FLUX's
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import magi_opschema
import torch
import triton
import triton.language as tl
from diffusers import AutoencoderKL
from magi_backend import Report, explain, magi_register_custom_op
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional


RTOL = ATOL = 1e-4
# Piped output would be kept back until a lot of it is there.
say = functools.partial(print, flush=True)


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
    """The width of a model, the pictures [height, width] that it sees, and how it is trained."""

    channels: tuple[int, ...]
    layers: int
    groups: int
    rate: float
    attention: bool
    training: tuple[int, int] = (32, 48)
    steps: int = 60
    decoded: tuple[tuple[int, int], ...] = ((64, 96), (96, 144))


NARROW = Sizes((16, 16), layers=0, groups=8, rate=4e-3, attention=False)
FULL = Sizes((128, 256, 512, 512), layers=2, groups=32, rate=2e-4, attention=True, steps=300)


def build(sizes: Sizes) -> Any:
    """An ``AutoencoderKL`` with random weights."""
    torch.manual_seed(0)
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * len(sizes.channels),
        up_block_types=["UpDecoderBlock2D"] * len(sizes.channels),
        block_out_channels=sizes.channels,
        layers_per_block=sizes.layers,
        norm_num_groups=sizes.groups,
        latent_channels=4,
        mid_block_add_attention=sizes.attention,
    )


def draw(height: int, width: int, device: torch.device) -> Tensor:
    """A sun over hills, as [1, 3, height, width] from -1 to 1."""
    y = torch.linspace(0, 1, height, device=device)[:, None].expand(height, width)
    x = torch.linspace(0, 1.5, width, device=device).expand(height, width)
    picture = torch.stack([0.25 + 0.65 * y, 0.45 + 0.35 * y, 0.85 - 0.15 * y])
    distance = ((x - 0.45).square() + (y - 0.3).square()).sqrt()
    shapes = [(((0.14 - distance) * 60).sigmoid(), (1.0, 0.85, 0.3))]
    hills = ((0.62, 0.08, 5, (0.35, 0.45, 0.6)), (0.74, 0.06, 9, (0.2, 0.4, 0.3)), (0.88, 0.03, 16, (0.1, 0.22, 0.15)))
    for base, swing, waves, color in hills:
        shapes.append((((y - base + swing * torch.sin(waves * x + 1)) * 60).sigmoid(), color))
    for inside, color in shapes:
        picture = picture * (1 - inside) + inside * torch.tensor(color, device=device)[:, None, None]
    return picture[None] * 2 - 1


@contextlib.contextmanager
def doing(what: str, every: float = 10.0) -> Iterator[None]:
    """Say what is being done, and every so many seconds that it still is."""
    start, ended = time.perf_counter(), threading.Event()

    def remind() -> None:
        while not ended.wait(every):
            say(f"  {time.perf_counter() - start:.0f} s so far")

    say(what)
    reminder = threading.Thread(target=remind, daemon=True)
    reminder.start()
    try:
        yield
    finally:
        ended.set()
        reminder.join()
    say(f"  done in {time.perf_counter() - start:.1f} s")


class Step(nn.Module):
    """The loss of one training step."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, latents: Tensor, target: Tensor) -> Tensor:
        """Mean squared error of the decoded latents."""
        return functional.mse_loss(self.decoder(latents), target)


def train(vae: Any, sizes: Sizes, device: torch.device) -> Report:
    """Train on one picture; the loss and the gradients of the first step are compared with eager."""
    picture = draw(*sizes.training, device)
    compiled = torch.compile(Step(vae.decoder), backend="magi", dynamic=False)
    with doing("compiling a training step of the decoder, and comparing its gradients with eager"):
        report = explain(compiled)(vae.encode(picture).latent_dist.sample().detach().requires_grad_(), picture)
    optimizer = torch.optim.Adam(vae.parameters(), lr=sizes.rate)
    with doing(f"training for {sizes.steps} steps"):
        for step in range(sizes.steps):
            latents = vae.encode(picture).latent_dist
            error = compiled(latents.sample(), picture)
            optimizer.zero_grad()
            (error + 1e-6 * latents.kl().mean()).backward()
            optimizer.step()
            if step in {0, sizes.steps - 1}:
                say(f"  error {error.item():.4f} in step {step + 1}")
    return report


def decode(vae: Any, sizes: Sizes, device: torch.device) -> tuple[Report, list[tuple[Tensor, Tensor, Tensor]]]:
    """Decode at two sizes with one compiled decoder; for each what was drawn, and what eager and it make of that."""
    decoder: nn.Module = vae.decoder
    compiled = torch.compile(decoder, backend="magi", dynamic=True)
    explained, decoded = explain(compiled), []
    with torch.no_grad():
        for height, width in sizes.decoded:
            picture = draw(height, width, device)
            latents = vae.encode(picture).latent_dist.mean
            with doing(f"decoding {height} x {width} pixels, and comparing them with eager"):
                report = explained(latents)
            decoded.append((picture, decoder(latents), compiled(latents)))
    return report, decoded


def panels(drawn: Tensor, eager: Tensor, compiled: Tensor) -> dict[str, Tensor]:
    """The pictures of one size, each [1, 3, H, W] from -1 to 1, by what to write under them."""
    difference = (compiled - eager).abs().amax(1, keepdim=True).expand_as(eager)
    largest = difference.max().item()
    return {
        f"drawn, {drawn.shape[2]} x {drawn.shape[3]}": drawn,
        "decoded by eager": eager,
        "decoded by compiled code": compiled,
        f"difference: white is {largest:.0e}": difference / max(largest, 1e-30) * 2 - 1,
    }


def save(decoded: list[tuple[Tensor, Tensor, Tensor]], path: Path) -> None:
    """Write a PNG with a row of four pictures for each size, enlarged without smoothing."""
    width, height, caption = 288, 192, 20
    sheet = Image.new("RGB", (4 * width, len(decoded) * (height + caption)), "white")
    pen = ImageDraw.Draw(sheet)
    for row, pictures in enumerate(decoded):
        for column, (text, picture) in enumerate(panels(*pictures).items()):
            pixels = ((picture[0].clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0)
            image = Image.fromarray(pixels.cpu().numpy()).resize((width, height), Image.Resampling.NEAREST)
            sheet.paste(image, (column * width, row * (height + caption)))
            pen.text((column * width + 4, row * (height + caption) + height + 4), text, fill="black")
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


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

    original, vae = build(sizes).to(device), build(sizes).to(device)
    with_our_operator(vae.decoder)
    with torch.no_grad():
        latents = vae.encode(draw(*sizes.training, device)).latent_dist.mean
        replaced = torch.allclose(vae.decoder(latents), original.decoder(latents), rtol=RTOL, atol=ATOL)
    say(f"our operator against GroupNorm and SiLU, eager: {'agree' if replaced else 'DIFFER'}")

    trained = train(vae, sizes, device)
    report, decoded = decode(vae, sizes, device)
    say(f"\n{report}")
    save(decoded, chosen.out / "vae_decode.png")
    (chosen.out / "vae_decode.html").write_text(report.to_html())
    (chosen.out / "vae_train.html").write_text(trained.to_html())
    say(f"{chosen.out}/vae_decode.png shows what was drawn and decoded")
    say(f"{chosen.out}/vae_decode.html and vae_train.html are the compiler's reports")
    agrees = replaced and report.agrees and trained.agrees
    said = "compiled and eager agree" if agrees else "compiled and eager DIFFER"
    say(f"{said}, in {time.perf_counter() - start:.0f} s")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
