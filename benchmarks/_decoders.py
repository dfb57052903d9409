# SPDX-License-Identifier: Apache-2.0

"""The models of dynamic_decode: three decoders of images or video, and a transformer without a convolution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional


if TYPE_CHECKING:
    from collections.abc import Sequence


MODELS = ("wan", "groupnorm", "kl", "plain")
# Latent height and width: an eighth of the image.
SIZES = {"480p": (60, 104), "540p": (68, 120), "720p": (90, 160), "1080p": (136, 240)}
SMOKE_SIZE = (6, 8)


class RMSNorm(nn.Module):
    """RMS norm over channels, as in WAN's decoder."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = functional.normalize(x, dim=1) * x.shape[1] ** 0.5 * self.gamma
        return out


class CausalConv3d(nn.Conv3d):
    """Sees two frames back and one pixel around."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__(channels, out, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.pad(x, (1, 1, 1, 1, 2, 0)))


class WanBlock(nn.Module):
    """RMS norm, SiLU, convolution, twice, and a shortcut."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *(RMSNorm(channels), nn.SiLU(), CausalConv3d(channels, out)),
            *(RMSNorm(out), nn.SiLU(), CausalConv3d(out, out)),
        )
        self.shortcut = nn.Conv3d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shortcut(x) + self.residual(x)
        return out


class WanUpsample(nn.Module):
    """Each frame twice as large, with half the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels // 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, frames, height, width = x.shape
        images = x.permute(0, 2, 1, 3, 4).reshape(batch * frames, channels, height, width)
        images = functional.interpolate(images.float(), scale_factor=2.0, mode="nearest-exact").type_as(images)
        images = self.conv(images)
        video: Tensor = images.reshape(batch, frames, channels // 2, 2 * height, 2 * width).permute(0, 2, 1, 3, 4)
        return video


class Wan(nn.Module):
    """A causal video decoder in the style of WAN 2.1: [1, 16, 3, H, W] to [1, 3, 3, 8 H, 8 W]."""

    def __init__(self, widths: Sequence[int] = (384, 384, 192, 96), latent: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = [CausalConv3d(latent, widths[0])]
        channels = widths[0]
        for level, width in enumerate(widths):
            if level:
                layers.append(WanUpsample(channels))
                channels //= 2
            for _ in range(3):
                layers.append(WanBlock(channels, width))
                channels = width
        self.layers = nn.Sequential(*layers, RMSNorm(channels), nn.SiLU(), CausalConv3d(channels, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class GroupNormBlock(nn.Module):
    """GroupNorm, SiLU, convolution, twice, and a shortcut."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        parts = ((nn.GroupNorm(groups, channels), nn.SiLU(), nn.Conv3d(channels, channels, 3, padding=1)) for _ in "12")
        self.residual = nn.Sequential(*(module for part in parts for module in part))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.residual(x)
        return out


class GroupNorm(nn.Module):
    """A small video decoder with group norms: [1, 48, 7, H, W] to [1, 3, 7, 2 H, 2 W]."""

    def __init__(self, channels: int = 128, latent: int = 48, groups: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(latent, channels, 3, padding=1),
            *(GroupNormBlock(channels, groups) for _ in range(2)),
            nn.Upsample(scale_factor=(1, 2, 2), mode="nearest"),
            nn.Conv3d(channels, channels, 3, padding=1),
            *(GroupNormBlock(channels, groups) for _ in range(2)),
            *(nn.GroupNorm(groups, channels), nn.SiLU(), nn.Conv3d(channels, 3, 3, padding=1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class PlainBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.out(mixed)
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class Plain(nn.Module):
    """No convolution at all: 12 transformer blocks over [1, 1024, H, W]."""

    def __init__(self, width: int = 1024, heads: int = 16, depth: int = 12) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(PlainBlock(width, heads) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.blocks(x.flatten(2).transpose(1, 2))
        return tokens.transpose(1, 2).reshape(x.shape)


def build(model: str, *, smoke: bool = False) -> nn.Module:
    """One of `MODELS` with random weights; a tiny one for *smoke*."""
    if model == "wan":
        return Wan((16, 16, 8), latent=4) if smoke else Wan()
    if model == "groupnorm":
        return GroupNorm(8, latent=4, groups=4) if smoke else GroupNorm()
    if model == "plain":
        return Plain(64, heads=2, depth=1) if smoke else Plain()
    from diffusers import AutoencoderKL

    vae_class: Any = AutoencoderKL
    widths = [32, 32] if smoke else [128, 256, 512, 512]
    vae = vae_class(
        down_block_types=["DownEncoderBlock2D"] * len(widths),
        up_block_types=["UpDecoderBlock2D"] * len(widths),
        block_out_channels=widths,
        layers_per_block=1 if smoke else 2,
        latent_channels=16,
        norm_num_groups=8 if smoke else 32,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    decoder: nn.Module = vae.decoder
    return decoder


def input_shape(model: str, size: str, *, smoke: bool = False) -> tuple[int, ...]:
    """The shape of the model's input for an image *size*."""
    height, width = SMOKE_SIZE if smoke else SIZES[size]
    return {
        "wan": (1, 4 if smoke else 16, 3, height, width),
        "groupnorm": (1, 4 if smoke else 48, 3 if smoke else 7, height // 2, width // 2),
        "kl": (1, 16, height, width),
        "plain": (1, 64 if smoke else 1024, height // 2, width // 2),
    }[model]
