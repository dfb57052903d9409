# SPDX-License-Identifier: Apache-2.0
"""Classes of transformers: text, vision, speech, codecs of sound."""

from __future__ import annotations

from typing import Any

from _real_classes import BF16, LARGE, QUICK, SMALL, TRAINS, RealClass, Settings, Shapes, Sizes


LENGTHS: Sizes = ((13, 2), (21, 3))
"""Tokens, and sequences."""
LONG: Sizes = ((257, 2), (129, 3))
SOUND: Sizes = ((401, 2), (533, 3))
LONG_SOUND: Sizes = ((16001, 2), (12345, 3))
WIDTHS: Settings = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "use_cache": False,
}
TEXT: Settings = {
    **WIDTHS,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _transformers(model: str, shapes: Shapes, small: Sizes, large: Sizes, **rest: Any) -> RealClass:
    return RealClass("transformers", model, rest.pop("settings", {}), shapes, small, large, **rest)


def _text(model: str, output: str = "last_hidden_state", **rest: Any) -> RealClass:
    settings = {**TEXT, **rest.pop("settings", {})}
    return _transformers(
        model, lambda h, w: {"input_ids": ("ids", w, h)}, LENGTHS, LONG, output=output, settings=settings, **rest
    )


def _two_texts(model: str, **rest: Any) -> RealClass:
    settings = {**TEXT, "decoder_start_token_id": 0, **rest.pop("settings", {})}
    return _transformers(
        model,
        lambda h, w: {"input_ids": ("ids", w, h), "decoder_input_ids": ("ids", w, 5)},
        LENGTHS,
        LONG,
        output="last_hidden_state",
        settings=settings,
        **rest,
    )


def _vision(
    model: str, output: str = "last_hidden_state", small: Sizes = SMALL, large: Sizes = LARGE, **rest: Any
) -> RealClass:
    return _transformers(model, lambda h, w: {"pixel_values": (2, 3, h, w)}, small, large, output=output, **rest)


def _speech(model: str, **rest: Any) -> RealClass:
    settings = {
        **WIDTHS,
        "vocab_size": 32,
        "conv_dim": (16, 16),
        "conv_stride": (5, 2),
        "conv_kernel": (10, 3),
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
        "num_feat_extract_layers": 2,
        "apply_spec_augment": False,
        **rest.pop("settings", {}),
    }
    return _transformers(
        model,
        lambda h, w: {"input_values": (w, h)},
        SOUND,
        LONG_SOUND,
        output="last_hidden_state",
        settings=settings,
        **rest,
    )


def _codec(model: str, output: str, factor: int = 1, **rest: Any) -> RealClass:
    return _transformers(
        model, lambda h, w: {"input_values": (w, 1, factor * h)}, SOUND, LONG_SOUND, output=output, **rest
    )


VIT: Settings = {**WIDTHS, "image_size": 64, "patch_size": 8}
STAGES: Settings = {"hidden_sizes": [8, 16, 16, 24], "depths": [1, 1, 1, 1]}

TRANSFORMERS = (
    _text("LlamaForCausalLM", "logits", settings={"num_key_value_heads": 2}, **TRAINS, **QUICK),
    _text("Qwen2Model", settings={"num_key_value_heads": 2}, **BF16),
    _text("Gemma2Model", settings={"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}),
    _text("GPT2Model", settings={"n_embd": 32, "n_layer": 2, "n_head": 4}, **TRAINS),
    _text("GPTNeoXModel", **BF16),
    _text("OPTModel", settings={"ffn_dim": 64, "word_embed_proj_dim": 32}),
    _text("BloomModel", settings={"n_layer": 2, "n_head": 4}),
    _text("PhiModel", **BF16),
    _text("BertModel", **TRAINS),
    _text("RobertaModel"),
    _text("AlbertModel", settings={"embedding_size": 16}),
    _text("DistilBertModel", settings={"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}, **BF16),
    _text("ElectraModel", settings={"embedding_size": 16}),
    _text(
        "DebertaV2Model", settings={"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    ),
    _text(
        "ModernBertModel",
        settings={"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    _text("MambaModel", settings={"state_size": 4, "num_hidden_layers": 1}),
    _two_texts("T5Model", settings={"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}, **TRAINS),
    _two_texts(
        "BartModel",
        settings={
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
        },
        **BF16,
    ),
    _vision("ResNetModel", settings={"embedding_size": 8, **STAGES}, **TRAINS),
    _vision("RegNetModel", settings={"embedding_size": 8, "groups_width": 4, **STAGES}, **BF16),
    _vision("ConvNextModel", settings=STAGES),
    _vision("MobileNetV2Model", settings={"depth_multiplier": 0.35}, **BF16),
    _vision("MobileNetV1Model", settings={"depth_multiplier": 0.35}, **TRAINS),
    _vision(
        "EfficientNetModel",
        settings={"width_coefficient": 0.5, "depth_coefficient": 0.4, "hidden_dim": 640, "image_size": 64},
    ),
    _vision(
        "MobileViTModel",
        settings={
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64],
            "num_attention_heads": 2,
        },
    ),
    _vision("PoolFormerModel", settings={"hidden_sizes": [8, 16, 16, 24], "depths": [1, 1, 1, 1]}),
    _vision(
        "SegformerForSemanticSegmentation",
        "logits",
        settings={
            "hidden_sizes": [8, 16, 16, 24],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 3],
            "decoder_hidden_size": 16,
        },
        **TRAINS,
        **QUICK,
    ),
    _vision(
        "UperNetForSemanticSegmentation",
        "logits",
        settings={"hidden_size": 16, "auxiliary_channels": 16, "num_labels": 5},
        keep=9,
    ),
    _vision("Dinov2Model", settings={**VIT}, **BF16),
    _vision("YolosForObjectDetection", "logits", settings={**VIT, "image_size": [64, 96], "num_detection_tokens": 5}),
    _vision(
        "DetrForObjectDetection",
        "logits",
        settings={
            "use_timm_backbone": False,
            "backbone_config": {"model_type": "resnet", "embedding_size": 8, **STAGES, "out_features": ["stage4"]},
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_queries": 5,
        },
    ),
    _vision(
        "SwinModel",
        settings={"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4, "image_size": 64},
        **BF16,
    ),
    _vision("Dinov2WithRegistersModel", settings={**VIT}),
    _speech("Wav2Vec2Model", **TRAINS, **QUICK),
    _speech("HubertModel", **BF16),
    _speech("WavLMModel"),
    _speech("Data2VecAudioModel"),
    _speech("SEWModel", settings={"squeeze_factor": 2}),
    _speech("UniSpeechModel", **BF16),
    _transformers(
        "WhisperModel",
        lambda h, w: {"input_features": (w, 20, 64), "decoder_input_ids": ("ids", w, h)},
        LENGTHS,
        ((65, 2), (129, 3)),
        output="last_hidden_state",
        settings={
            **TEXT,
            "d_model": 32,
            "num_mel_bins": 20,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_source_positions": 32,
            "max_target_positions": 256,
            "decoder_start_token_id": 1,
        },
        **TRAINS,
    ),
    _transformers(
        "Speech2TextModel",
        lambda h, w: {"input_features": (w, h, 20), "decoder_input_ids": ("ids", w, 5)},
        ((37, 2), (53, 3)),
        ((257, 2), (129, 3)),
        output="last_hidden_state",
        settings={
            **TEXT,
            "d_model": 32,
            "input_feat_per_channel": 20,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "conv_channels": 16,
            "decoder_start_token_id": 1,
        },
    ),
    _transformers(
        "SpeechT5HifiGan",
        lambda h, w: {"spectrogram": (w, h, 20)},
        LENGTHS,
        LONG,
        settings={
            "model_in_dim": 20,
            "upsample_initial_channel": 32,
            "upsample_rates": [4, 2],
            "upsample_kernel_sizes": [8, 4],
            "resblock_kernel_sizes": [3, 5],
            "resblock_dilation_sizes": [[1, 3], [1, 3]],
        },
        **TRAINS,
    ),
    _codec(
        "EncodecModel",
        "audio_values",
        settings={
            "num_filters": 4,
            "hidden_size": 16,
            "codebook_size": 16,
            "codebook_dim": 16,
            "upsampling_ratios": [4, 2],
            "num_lstm_layers": 1,
            "target_bandwidths": [24.0],
        },
    ),
    _codec(
        "DacModel",
        "audio_values",
        settings={
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 4],
            "decoder_hidden_size": 32,
            "upsampling_ratios": [4, 2],
            "n_codebooks": 2,
            "codebook_size": 16,
            "codebook_dim": 4,
        },
        **BF16,
    ),
    _codec(
        "MimiModel",
        "audio_values",
        4,
        settings={
            **WIDTHS,
            "num_filters": 8,
            "codebook_size": 16,
            "codebook_dim": 16,
            "upsampling_ratios": [4, 2],
            "vector_quantization_hidden_dimension": 16,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "num_quantizers": 4,
            "num_semantic_quantizers": 1,
            "upsample_groups": 32,
            "sliding_window": 16,
        },
    ),
)
