# SPDX-License-Identifier: Apache-2.0
"""The models of real_decoders: classes of diffusers with configurations that people use, and random weights."""

from __future__ import annotations

import copy
import inspect
import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from torch import Tensor, nn


Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class RealModel:
    """A class of diffusers, its configuration, and the shapes of what it is called with.

    `sizes` are the shapes at the size that is timed and at a second one, square where the first is, since equal sizes
    are one symbol; `others` are those of what does not change. `tiny_config` and the tiny shapes replace them where a
    run has only to show that it works.
    """

    name: str
    model: str
    config: Mapping[str, Any]
    sizes: tuple[Shapes, Shapes]
    tiny_config: Mapping[str, Any]
    tiny_sizes: tuple[Shapes, Shapes]
    others: Shapes = field(default_factory=dict)
    tiny_others: Shapes = field(default_factory=dict)

    def build(self, *, tiny: bool) -> Any:
        """The model, its weights drawn from the current seed."""
        options = dict(self.config) | (dict(self.tiny_config) if tiny else {})
        return getattr(diffusers, self.model)(**options).eval().requires_grad_(False)

    def arguments(self, device: str, dtype: torch.dtype, *, tiny: bool, second: bool) -> dict[str, Tensor]:
        """Normal numbers, the same ones each time."""
        torch.manual_seed(1)
        others, sizes = (self.tiny_others, self.tiny_sizes) if tiny else (self.others, self.sizes)
        shapes = {**others, **sizes[second]}
        return {name: torch.randn(tuple(shape), device=device).to(dtype) for name, shape in shapes.items()}


def decode(model: Any, latent: Tensor) -> Tensor:
    """What a pipeline does with the latent: a decode of a VAE."""
    decoded: Tensor = model.decode(latent, return_dict=False)[0]
    return decoded


def denoise(model: Any, latent: Tensor, step: Tensor, text: Tensor, text_embeds: Tensor, time_ids: Tensor) -> Tensor:
    """One step of a UNet of Stable Diffusion XL."""
    conditions = {"text_embeds": text_embeds, "time_ids": time_ids}
    predicted: Tensor = model(latent, step, text, added_cond_kwargs=conditions, return_dict=False)[0]
    return predicted


def compiled_part(model: nn.Module) -> Any:
    """The module whose forward people compile: a VAE's decoder, else the model."""
    return getattr(model, "decoder", model)


def sharing_weights(model: nn.Module) -> Any:
    """A copy of *model* with the same Tensors."""
    return copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})


def without_the_break(model: Any) -> None:
    """Have upsamplings of WAN ask for the type of an entry where they compare it with "Rep".

    Dynamo of torch <= 2.12 breaks the graph at a comparison of a Tensor with a str.
    """
    from diffusers.models.autoencoders import autoencoder_kl_wan as wan

    old = inspect.getsource(wan.WanResample.forward)
    new = inspect.cleandoc("\n" + old).replace('feat_cache[idx] != "Rep"', "not isinstance(feat_cache[idx], str)")
    new = new.replace('feat_cache[idx] == "Rep"', "isinstance(feat_cache[idx], str)")
    assert new.count("isinstance(feat_cache[idx], str)") == 3, "the source that this was written for has three"
    file = "<WanResample.forward without comparisons of a Tensor with a str>"
    linecache.cache[file] = (len(new), None, new.splitlines(keepends=True), file)
    changed: dict[str, Any] = {}
    exec(compile(new, file, "exec"), vars(wan), changed)  # noqa: S102 (the library's own source)
    upsamplings: list[Any] = [part for part in model.modules() if isinstance(part, wan.WanResample)]
    for part in upsamplings:
        part.forward = changed["forward"].__get__(part)


_SDXL_VAE = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 4,
}
_SDXL_UNET = {
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [320, 640, 1280],
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": [5, 10, 20],
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
_WAN22 = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}
_TINY_VAE = {
    "block_out_channels": [32],
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "latent_channels": 4,
    "down_block_types": ["DownEncoderBlock2D"],
    "up_block_types": ["UpDecoderBlock2D"],
    "mid_block_add_attention": False,
}
_TINY_UNET = {
    "block_out_channels": [32, 32, 64],
    "transformer_layers_per_block": [1, 1, 1],
    "layers_per_block": 1,
    "attention_head_dim": [2, 2, 2],
    "cross_attention_dim": 16,
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 64,
}


def _latents(first: Sequence[int], second: Sequence[int]) -> tuple[Shapes, Shapes]:
    return {"latent": first}, {"latent": second}


MODELS = {
    model.name: model
    for model in (
        RealModel(
            "wan21",
            "AutoencoderKLWan",
            {},
            _latents((1, 16, 5, 68, 120), (1, 16, 5, 60, 104)),
            {"base_dim": 8, "z_dim": 4, "num_res_blocks": 1, "dim_mult": [1, 2], "temperal_downsample": [True]},
            _latents((1, 4, 3, 6, 8), (1, 4, 3, 4, 6)),
        ),
        RealModel(
            "wan22",
            "AutoencoderKLWan",
            _WAN22,
            _latents((1, 48, 5, 34, 60), (1, 48, 5, 30, 52)),
            {
                "base_dim": 8,
                "decoder_base_dim": 8,
                "z_dim": 4,
                "num_res_blocks": 1,
                "dim_mult": [1, 2, 2],
                "temperal_downsample": [False, True],
            },
            _latents((1, 4, 3, 6, 8), (1, 4, 3, 4, 6)),
        ),
        RealModel(
            "kl",
            "AutoencoderKL",
            _SDXL_VAE,
            _latents((1, 4, 128, 128), (1, 4, 96, 96)),
            _TINY_VAE,
            _latents((1, 4, 8, 8), (1, 4, 6, 6)),
        ),
        RealModel(
            "cogvideox",
            "AutoencoderKLCogVideoX",
            {},
            _latents((1, 16, 2, 60, 90), (1, 16, 2, 48, 80)),
            {
                "block_out_channels": [32, 32],
                "layers_per_block": 1,
                "norm_num_groups": 8,
                "latent_channels": 4,
                "down_block_types": ["CogVideoXDownBlock3D"] * 2,
                "up_block_types": ["CogVideoXUpBlock3D"] * 2,
            },
            _latents((1, 4, 2, 6, 8), (1, 4, 2, 4, 6)),
        ),
        RealModel(
            "unet",
            "UNet2DConditionModel",
            _SDXL_UNET,
            _latents((2, 4, 128, 128), (2, 4, 96, 96)),
            _TINY_UNET,
            _latents((2, 4, 16, 16), (2, 4, 8, 8)),
            {"step": (), "text": (2, 77, 2048), "text_embeds": (2, 1280), "time_ids": (2, 6)},
            {"step": (), "text": (2, 7, 16), "text_embeds": (2, 16), "time_ids": (2, 6)},
        ),
    )
}
