# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-any-return"

"""Fragments as modules, each called with Tensors alone as its model calls it, and arguments for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn


if TYPE_CHECKING:
    from _fragment import Argument, Fragment


Outputs = Tensor | tuple[Tensor, ...]


class Called(nn.Module):
    """A module of a model, with how it is called."""

    def __init__(self, module: nn.Module, call: Callable[..., Outputs]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *tensors: Tensor) -> Outputs:
        return self.call(self.module, *tensors)


def plain(module: Any, *tensors: Tensor) -> Tensor:
    """The module takes Tensors and returns one."""
    return module(*tensors)


def without_embedding(module: Any, x: Tensor) -> Tensor:
    """A residual block of a VAE has no embedding of a time step."""
    return module(x, None)


def first_of_outputs(module: Any, x: Tensor) -> Tensor:
    """The block returns empty caches beside its output."""
    return module(x)[0]


def one_video(module: Any, frames: Tensor) -> Tensor:
    """The frames belong to one video."""
    return module(frames, batch_size=1)


def wan_half(module: Any, x: Tensor, cache: Tensor) -> Outputs:
    """The first half of WanResidualBlock.forward, with its residual: the block of one convolution."""
    h = module.nonlinearity(module.norm1(x))
    kept = h[:, :, -2:].clone()
    if kept.shape[2] < 2:
        kept = torch.cat([cache[:, :, -1].unsqueeze(2), kept], dim=2)
    return module.conv1(h, cache) + x, kept


def wan_caches(module: Any, x: Tensor, *caches: Tensor | None) -> Outputs:
    """A block takes the caches of its convolutions from a list, and puts the new ones into it."""
    kept: list[Any] = list(caches)
    out = module(x, feat_cache=kept, feat_idx=[0])
    return out, *kept


def wan_upsample_in_time(module: Any, x: Tensor, cache: Tensor) -> Outputs:
    """WanResample.forward where a cache exists, but for the comparison with "Rep", at which torch <= 2.12 breaks."""
    batch, channels, frames, height, width = x.shape
    kept = x[:, :, -2:].clone()
    if kept.shape[2] < 2:
        kept = torch.cat([cache[:, :, -1].unsqueeze(2), kept], dim=2)
    x = module.time_conv(x, cache).reshape(batch, 2, channels, frames, height, width)
    x = torch.stack((x[:, 0], x[:, 1]), 3).reshape(batch, channels, frames * 2, height, width)
    images = module.resample(x.permute(0, 2, 1, 3, 4).reshape(batch * frames * 2, channels, height, width))
    return images.view(batch, frames * 2, *images.shape[1:]).permute(0, 2, 1, 3, 4), kept


def wan22_upsample_with_shortcut(module: Any, x: Tensor, first: Tensor) -> Tensor:
    """The end of WanResidualUpBlock.forward: *first* is what came in, *x* what its residual blocks made of it."""
    return module.upsampler(x) + module.avg_shortcut(first, first_chunk=False)


def cogvideox_resnet(module: Any, x: Tensor, latent: Tensor, *caches: Tensor) -> Outputs:
    """The block takes the caches of its two convolutions by name, and returns those of its norms too."""
    given = dict(zip(("conv1", "conv2"), caches, strict=False)) if caches else None
    out, kept = module(x, None, latent, conv_cache=given)
    return out, *kept["norm1"].values(), kept["conv1"], *kept["norm2"].values(), kept["conv2"]


def unet_up_block(module: Any, x: Tensor, *skipped_and_embedding: Tensor) -> Tensor:
    """The block concatenates what the way down has kept."""
    *skipped, embedding = skipped_and_embedding
    return module(x, tuple(skipped), embedding)


def unet_down_block(module: Any, x: Tensor, embedding: Tensor, text: Tensor) -> Outputs:
    """The block returns what it keeps for the way up, too."""
    out, kept = module(x, embedding, text)
    return out, *kept


def svd_decoder_resnet(module: Any, frames: Tensor, image_only: Tensor) -> Tensor:
    """A block of the decoder has no embedding of a time step."""
    return module(frames, image_only_indicator=image_only)


CALLS: Mapping[str, Callable[..., Outputs]] = {
    call.__name__: call
    for call in (
        *(plain, without_embedding, first_of_outputs, one_video, wan_half, wan_caches, wan_upsample_in_time),
        *(wan22_upsample_with_shortcut, cogvideox_resnet, unet_up_block, unet_down_block, svd_decoder_resnet),
    )
}


def class_of(fragment: Fragment) -> Any:
    """The class that *fragment* is cut from a model."""
    path, _, name = fragment.module.partition(":")
    return getattr(importlib.import_module(path), name)


def build(fragment: Fragment, *, tiny: bool) -> nn.Module:
    """The fragment with random weights; for *tiny*, of few channels."""
    sizes = fragment.tiny if tiny else fragment.sizes
    options = {
        name: sizes.get(value, value) if isinstance(value, str) else value for name, value in fragment.options.items()
    }
    call = CALLS[fragment.call]
    if fragment.empty_caches:
        nothing = (None,) * fragment.empty_caches
        return Called(class_of(fragment)(**options), lambda module, *tensors: call(module, *tensors, *nothing))
    return Called(class_of(fragment)(**options), call)


def arguments(fragment: Fragment, *, tiny: bool, second: bool, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Arguments for *fragment*, the same ones for the same seed; the *second* size is three quarters high and wide."""
    sizes = dict(fragment.tiny if tiny else fragment.sizes)
    if second:
        sizes |= {name: size // 4 * 3 for name, size in sizes.items() if name in set("HWhw")}
    return [_value(argument, sizes, device).to(dtype) for argument in fragment.arguments]


def _value(argument: Argument, sizes: Mapping[str, int], device: str) -> Tensor:
    shape = [sizes[dim] if dim in sizes else int(dim) for dim in argument.dims.split()]
    make = torch.zeros if argument.values == "zeros" else torch.randn
    if argument.layout == "frames_first":
        shape[1], shape[2] = shape[2], shape[1]
        return make(shape, device=device).transpose(1, 2)
    value = make(shape, device=device)
    if argument.layout == "channels_last":
        return value.contiguous(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    return value


def symbolic_dims(argument: Argument) -> list[int]:
    """The dimensions of *argument* that are symbols where only height and width are."""
    return [place for place, dim in enumerate(argument.dims.split()) if dim in set("HWhw")]
