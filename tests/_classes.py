# SPDX-License-Identifier: Apache-2.0
"""Tiny models of real classes of transformers, diffusers and timm, with random weights, and inputs of two sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _models import Field
from _torchvision import torchvision_or_stand_in
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A class, and what it is called with.

    Attributes:
        build: Makes the model.
        inputs: The arguments at one size.
        sizes: Two sizes; a training step takes the first.
        training: Whether a training step is compared, or the forward.
        dynamic: Whether sizes are symbols.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    sizes: tuple[int, int]
    training: bool = False
    dynamic: bool = True


class Stepped(nn.Module):
    """A denoiser at one time step, or with one label, which returns a tensor."""

    def __init__(self, model: nn.Module, **conditions: Tensor) -> None:
        super().__init__()
        self.model = model
        self.conditions = conditions

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model(x, **self.conditions, return_dict=False)[0]
        return result


def image(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(2, 3, size, size),)


def latent(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(1, 4, size, size),)


def tokens(length: int) -> tuple[Tensor, ...]:
    return (torch.randint(3, 97, (2, length)),)


Settings = dict[str, Any]


def _of_transformers(config: str, model: str, field: str, *positional: Any, **settings: Any) -> nn.Module:
    import transformers

    return Field(getattr(transformers, model)(getattr(transformers, config)(**settings), *positional), field)


def qwen() -> nn.Module:
    widths: Settings = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return _of_transformers(
        "Qwen2Config", "Qwen2ForCausalLM", "logits", vocab_size=97, num_hidden_layers=2, use_cache=False, **widths
    )


def bert() -> nn.Module:
    widths: Settings = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    chances: Settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _of_transformers(
        "BertConfig",
        "BertModel",
        "last_hidden_state",
        vocab_size=97,
        max_position_embeddings=64,
        num_hidden_layers=2,
        **widths,
        **chances,
    )


def longformer() -> nn.Module:
    widths: Settings = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    return _of_transformers(
        *("LongformerConfig", "LongformerModel", "last_hidden_state"),
        vocab_size=97,
        max_position_embeddings=130,
        num_hidden_layers=1,
        attention_window=8,
        **widths,
    )


def mamba() -> nn.Module:
    return _of_transformers(
        *("MambaConfig", "MambaModel", "last_hidden_state"),
        vocab_size=97,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=1,
        use_cache=False,
    )


def wav2vec() -> nn.Module:
    convolutions: Settings = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    return _of_transformers(
        *("Wav2Vec2Config", "Wav2Vec2Model", "last_hidden_state"),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2,
        **convolutions,
    )


def vit() -> nn.Module:
    widths = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    return _of_transformers(
        "ViTConfig", "ViTModel", "last_hidden_state", image_size=32, patch_size=8, num_hidden_layers=2, **widths
    )


def convnext() -> nn.Module:
    return _of_transformers(
        "ConvNextConfig", "ConvNextModel", "last_hidden_state", hidden_sizes=[8, 16, 16, 24], depths=[1, 1, 1, 1]
    )


def segformer() -> nn.Module:
    return _of_transformers(
        *("SegformerConfig", "SegformerModel", "last_hidden_state"),
        num_encoder_blocks=2,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_attention_heads=[1, 2],
        sr_ratios=[4, 2],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
    )


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    model: Any = UNet2DModel(
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return Stepped(model, timestep=torch.tensor(7))


def vae() -> nn.Module:
    from diffusers import AutoencoderKL

    model: Any = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        block_out_channels=[16, 16],
        layers_per_block=1,
        norm_num_groups=4,
    )
    decoder: nn.Module = model.decoder
    return decoder


def dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    model: Any = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        norm_num_groups=4,
        sample_size=8,
        num_embeds_ada_norm=10,
    )
    return Stepped(model, timestep=torch.tensor([7]), class_labels=torch.tensor([1]))


def _of_timm(module: str, name: str, **settings: Any) -> nn.Module:
    with torchvision_or_stand_in():
        models = importlib.import_module(f"timm.models.{module}")
        model: nn.Module = getattr(models, name)(num_classes=5, **settings)
    return model


def mambaout() -> nn.Module:
    return _of_timm("mambaout", "MambaOut", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32))


def resnet() -> nn.Module:
    return _of_timm("resnet", "resnet10t", channels=(8, 8, 16, 16))


CASES: dict[str, Case] = {
    "qwen": Case(qwen, tokens, (12, 20)),
    "qwen training": Case(qwen, tokens, (12, 20), training=True),
    "bert training": Case(bert, tokens, (12, 20), training=True),
    "longformer": Case(longformer, tokens, (32, 48)),
    "mamba": Case(mamba, tokens, (6, 9)),
    "wav2vec": Case(wav2vec, lambda size: (torch.randn(2, size),), (400, 520)),
    "vit training": Case(vit, lambda batch: (torch.randn(batch, 3, 32, 32),), (2, 5), training=True),
    "convnext": Case(convnext, image, (64, 96)),
    "segformer": Case(segformer, image, (64, 96)),
    "unet": Case(unet, latent, (8, 12)),
    "unet training": Case(unet, latent, (8, 12), training=True),
    "vae training": Case(vae, latent, (8, 12), training=True, dynamic=False),
    "dit": Case(dit, latent, (8, 8), dynamic=False),
    "mambaout": Case(mambaout, image, (64, 96)),
    "resnet training": Case(resnet, image, (64, 96), training=True),
}
