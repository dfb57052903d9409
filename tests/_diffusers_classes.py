# SPDX-License-Identifier: Apache-2.0
"""Classes of diffusers: UNets, decoders of images, video and sound, transformers."""

from __future__ import annotations

from typing import Any

from _real_classes import BF16, QUICK, TRAINS, RealClass, Shapes, Words, row


EVEN: Words = {"small": ((8, 12), (12, 20)), "large": ((40, 36), (36, 44))}
AT_LATENT: Words = {"small": ((9, 13), (11, 7))}
PART: Words = {"part": "decoder"}
DECODER = {**PART, **AT_LATENT}


def _diffusers(model: str, shapes: Shapes, /, *words: Words, **settings: Any) -> RealClass:
    return row("diffusers", model, shapes, EVEN, *words, **settings)


def _picture(h: int, w: int) -> dict[str, Any]:
    return {"sample": (1, 3, 8 * h, 8 * w)}


def _latent(channels: int) -> Shapes:
    return lambda h, w: {"sample": (1, channels, h, w)}


def _video(channels: int, frames: int, name: str = "hidden_states") -> Shapes:
    return lambda h, w: {name: (1, channels, frames, h, w)}


def _stepped(
    channels: int, width: int = 32, *lead: int, name: str = "sample", text: str = "encoder_hidden_states"
) -> Shapes:
    """A latent with a step in time and a text."""
    return lambda h, w: {name: (2, *lead, channels, h, w), "timestep": ("step", 2), text: (2, 7, width)}


BLOCKS = {"layers_per_block": 1, "norm_num_groups": 8}
VAE_2D = {
    **BLOCKS,
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "block_out_channels": [16, 32],
}
UNET_WIDTHS = {**BLOCKS, "block_out_channels": (16, 32), "cross_attention_dim": 32}
CROSS_2D = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
WAN: dict[str, Any] = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
FOUR = {"in_channels": 4, "out_channels": 4}
TRANSFORMER = {**HEADS, **FOUR, "num_layers": 1}

DIFFUSERS = (
    _diffusers(
        "UNet2DModel",
        lambda h, w: {"sample": (2, 4, h, w), "timestep": ("step", 2)},
        TRAINS,
        **FOUR,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    _diffusers("UNet2DConditionModel", _stepped(4), AT_LATENT, BF16, **UNET_WIDTHS, **CROSS_2D, attention_head_dim=8),
    _diffusers(
        "UNet3DConditionModel",
        lambda h, w: {"sample": (1, 4, 3, h, w), "timestep": ("step", 1), "encoder_hidden_states": (1, 7, 32)},
        **UNET_WIDTHS,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        attention_head_dim=8,
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    ),
    _diffusers(
        "UNetSpatioTemporalConditionModel",
        lambda h, w: {
            "sample": (1, 3, 8, h, w),
            "timestep": ("step", 1),
            "encoder_hidden_states": (1, 1, 32),
            "added_time_ids": (1, 3),
        },
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        num_attention_heads=(2, 4),
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
    ),
    _diffusers(
        "ControlNetModel",
        lambda h, w: {**_stepped(4)(h, w), "controlnet_cond": (2, 3, 8 * h, 8 * w)},
        **UNET_WIDTHS,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        attention_head_dim=8,
        conditioning_embedding_out_channels=(8, 8, 16, 16),
    ),
    _diffusers("T2IAdapter", lambda h, w: {"x": (1, 3, 32 * h, 32 * w)}, BF16, channels=[16, 32], num_res_blocks=1),
    _diffusers("AutoencoderKL", _latent(4), DECODER, TRAINS, **VAE_2D),
    _diffusers(
        "AutoencoderTiny", _picture, TRAINS, encoder_block_out_channels=(16,) * 4, decoder_block_out_channels=(16,) * 4
    ),
    _diffusers(
        "AsymmetricAutoencoderKL",
        _picture,
        down_block_out_channels=(16,),
        up_block_out_channels=(16,),
        norm_num_groups=8,
    ),
    _diffusers("VQModel", _picture, **VAE_2D, num_vq_embeddings=16),
    _diffusers(
        "AutoencoderDC",
        lambda h, w: {"sample": (1, 3, 8 * h, 8 * w)},
        BF16,
        latent_channels=8,
        attention_head_dim=8,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(16, 32),
        decoder_block_out_channels=(16, 32),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    ),
    _diffusers(
        "AutoencoderOobleck",
        lambda h, w: {"sample": (1, 2, 64 * h)},
        TRAINS,
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4],
        channel_multiples=[1, 2],
        decoder_channels=8,
        decoder_input_channels=4,
        audio_channels=2,
    ),
    _diffusers(
        "AutoencoderKLTemporalDecoder",
        lambda h, w: {"sample": (3, 4, h, w), "image_only_indicator": (1, 3)},
        DECODER,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
    ),
    _diffusers(
        "AutoencoderKLMochi",
        _video(12, 2),
        DECODER,
        encoder_block_out_channels=(32, 32, 64, 64),
        decoder_block_out_channels=(32, 32, 64, 64),
        layers_per_block=(1, 1, 1, 1, 1),
    ),
    _diffusers(
        "AutoencoderKLHunyuanVideo",
        _video(4, 2),
        DECODER,
        BF16,
        latent_channels=4,
        block_out_channels=(16, 16, 32, 32),
        **BLOCKS,
    ),
    _diffusers(
        "AutoencoderKLLTXVideo",
        _video(8, 2),
        DECODER,
        latent_channels=8,
        block_out_channels=(8, 16, 16, 16),
        decoder_block_out_channels=(8, 16, 16, 16),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
    ),
    _diffusers(
        "AutoencoderKLAllegro",
        _video(4, 2, "sample"),
        DECODER,
        block_out_channels=(16, 16, 16, 16),
        **BLOCKS,
    ),
    _diffusers(
        "AutoencoderKLCosmos",
        _video(4, 2),
        PART,
        latent_channels=4,
        encoder_block_out_channels=(16, 16, 16),
        decode_block_out_channels=(16, 16, 16),
        num_layers=1,
        attention_resolutions=(32,),
        resolution=64,
    ),
    _diffusers("AutoencoderKLQwenImage", _video(4, 1, "x"), DECODER, **WAN, temperal_downsample=[False]),
    _diffusers("AutoencoderKLWan", _video(4, 1, "x"), DECODER, BF16, **WAN, temperal_downsample=[True]),
    _diffusers(
        "AutoencoderKLCogVideoX",
        _video(4, 1, "sample"),
        DECODER,
        latent_channels=4,
        block_out_channels=(16, 16),
        **BLOCKS,
        down_block_types=("CogVideoXDownBlock3D",) * 2,
        up_block_types=("CogVideoXUpBlock3D",) * 2,
    ),
    _diffusers("AutoencoderKLFlux2", _latent(8), DECODER, BF16, QUICK, **VAE_2D, latent_channels=8),
    _diffusers(
        "DiTTransformer2DModel",
        lambda h, w: {"hidden_states": (h, 4, 16, 16), "timestep": ("step", h), "class_labels": ("ones", h)},
        TRAINS,
        **TRANSFORMER,
        sample_size=16,
        norm_num_groups=4,
        num_embeds_ada_norm=10,
    ),
    _diffusers(
        "PixArtTransformer2DModel",
        _stepped(4, name="hidden_states"),
        **HEADS,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        sample_size=8,
        cross_attention_dim=32,
        norm_num_groups=4,
        caption_channels=32,
        use_additional_conditions=False,
    ),
    _diffusers(
        "SD3Transformer2DModel",
        lambda h, w: {**_stepped(4, name="hidden_states")(h, w), "pooled_projections": (2, 32)},
        BF16,
        **HEADS,
        **FOUR,
        num_layers=2,
        sample_size=32,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=32,
    ),
    _diffusers(
        "FluxTransformer2DModel",
        lambda h, w: {
            "hidden_states": (1, h * w, 16),
            "encoder_hidden_states": (1, 7, 32),
            "pooled_projections": (1, 32),
            "timestep": ("step", 1),
            "img_ids": (h * w, 3),
            "txt_ids": (7, 3),
        },
        **HEADS,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
    ),
    _diffusers(
        "SanaTransformer2DModel",
        _stepped(4, name="hidden_states"),
        TRAINS,
        **TRANSFORMER,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=32,
        sample_size=8,
    ),
    _diffusers(
        "StableCascadeUNet",
        lambda h, w: {"sample": (1, 4, h, w), "timestep_ratio": (1,), "clip_text_pooled": (1, 1, 32)},
        **FOUR,
        conditioning_dim=32,
        block_out_channels=(32, 32),
        num_attention_heads=(2, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        clip_text_pooled_in_channels=32,
        timestep_ratio_embedding_dim=32,
    ),
    _diffusers(
        "AuraFlowTransformer2DModel",
        _stepped(4, name="hidden_states"),
        BF16,
        sample_size=32,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pos_embed_max_size=256,
    ),
    _diffusers(
        "CogVideoXTransformer3DModel",
        _stepped(4, 32, 3, name="hidden_states"),
        **TRANSFORMER,
        time_embed_dim=8,
        text_embed_dim=32,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        max_text_seq_length=7,
        use_rotary_positional_embeddings=True,
    ),
    _diffusers(
        "WanTransformer3DModel",
        lambda h, w: {"hidden_states": (1, 4, 3, h, w), "timestep": ("step", 1), "encoder_hidden_states": (1, 7, 32)},
        **TRANSFORMER,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        rope_max_seq_len=64,
    ),
    _diffusers(
        "StableAudioDiTModel",
        lambda h, w: {
            "hidden_states": (1, 8, 5 * h),
            "timestep": ("step", 1),
            "encoder_hidden_states": (1, 7, 32),
            "global_hidden_states": (1, 1, 32),
        },
        in_channels=8,
        out_channels=8,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_attention_heads=2,
        cross_attention_dim=32,
        time_proj_dim=32,
        global_states_input_dim=32,
        cross_attention_input_dim=32,
    ),
)
