# SPDX-License-Identifier: Apache-2.0
"""Small models of real classes with random weights, their normalisations replaced by one registered operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from _real_classes import FirstTensor
from magi_backend import magi_register_custom_op
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Precision:
    eps: float = 1e-6


@dataclass(frozen=True)
class NormSettings:
    precision: Precision = field(default_factory=Precision)
    kind: Literal["rms", "layer"] = "rms"


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, settings = inputs
    ctx.save_for_backward(x, weight)
    ctx.settings = settings
    ctx.has_bias = bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    centred = x - x.mean(-1, keepdim=True) if ctx.settings.kind == "layer" else x
    scale = (centred.square().mean(-1, keepdim=True) + ctx.settings.precision.eps).rsqrt()
    normal = centred * scale
    inner = grad * weight
    grad_x = scale * (inner - normal * (inner * normal).mean(-1, keepdim=True))
    if ctx.settings.kind == "layer":
        grad_x = grad_x - (scale * inner.mean(-1, keepdim=True))
    rows = tuple(range(x.ndim - 1))
    return grad_x, (grad * normal).sum(rows), grad.sum(rows) if ctx.has_bias else None, None


@magi_register_custom_op("magi_models::norm", infer_output_meta_fn=["x"], setup_context_fn=_save, backward_fn=_backward)
def norm(x: Tensor, weight: Tensor, bias: Tensor | None, settings: NormSettings) -> Tensor:
    """Normalise the last dimension of x."""
    eps = settings.precision.eps
    if settings.kind == "layer":
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


class Norm(nn.Module):
    """A normalisation of the original model as the operator."""

    def __init__(self, original: Any, kind: Literal["rms", "layer"]) -> None:
        super().__init__()
        self.weight = original.weight
        self.bias = getattr(original, "bias", None)
        eps = original.variance_epsilon if kind == "rms" else original.eps
        self.settings = NormSettings(Precision(eps), kind)

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.bias, self.settings)


def replaced(model: Any, kind: Literal["rms", "layer"], original: type[nn.Module]) -> Any:
    """*model* with every module of type *original*, of which there must be one, as the operator."""
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, original):
                setattr(module, name, Norm(child, kind))
                count += 1
    assert count > 0
    return model


class VideoBlock(nn.Module):
    """Norm, SiLU, a causal convolution over frames, twice, and a shortcut; of videos [n, channels, t, h, w]."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(2, channels) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv3d(channels, channels, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            out = convolution(functional.pad(functional.silu(norm(out)), (1, 1, 1, 1, 2, 0)))
        return x + out


def llama(layers: int = 2) -> nn.Module:
    """*layers* of a Llama, width 64; from token ids [batch, length] to logits [batch, length, 97]."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        use_cache=False,
    )
    return FirstTensor(replaced(LlamaForCausalLM(config), "rms", LlamaRMSNorm), "logits")


def vit(layers: int = 2) -> nn.Module:
    """*layers* of a ViT, width 48; from images [batch, 3, 32, 32] to states [batch, 17, 48]."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=32,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return FirstTensor(replaced(ViTModel(config, add_pooling_layer=False), "layer", nn.LayerNorm), "last_hidden_state")


def vae() -> nn.Module:
    """The decoder of an AutoencoderKL with two blocks of width 32; latents [n, 4, h, w] to [n, 3, 2h, 2w]."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    model: Any = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        block_out_channels=[32, 32],
        layers_per_block=1,
        norm_num_groups=8,
    )
    decoder: nn.Module = model.decoder
    return decoder
