# SPDX-License-Identifier: Apache-2.0
"""Classes of transformers: text, vision, speech, codecs of sound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from _real_classes import BF16, IMAGES, QUICK, TRAINS, RealClass, Settings, Shapes, Words, row


TOKENS: Words = {"small": ((13, 2), (21, 3)), "large": ((257, 2), (129, 3))}
"""Tokens, and sequences."""
SOUND: Words = {"small": ((401, 2), (533, 3)), "large": ((16001, 2), (12345, 3))}
STATES: Words = {"output": "last_hidden_state"}
LOGITS: Words = {"output": "logits"}
AUDIO: Words = {"output": "audio_values"}
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


def _kind(shapes: Shapes, *words: Words, **common: Any) -> Callable[..., RealClass]:
    """A function for rows of one kind, which have *words* and settings in common."""

    def one(model: str, /, *own: Words, **settings: Any) -> RealClass:
        return row("transformers", model, shapes, STATES, *words, *own, **{**common, **settings})

    return one


text = _kind(lambda h, w: {"input_ids": ("ids", w, h)}, TOKENS, **TEXT)
_two_texts = _kind(
    lambda h, w: {"input_ids": ("ids", w, h), "decoder_input_ids": ("ids", w, 5)},
    TOKENS,
    **TEXT,
    decoder_start_token_id=0,
)
_vision = _kind(lambda h, w: {"pixel_values": (2, 3, h, w)}, IMAGES)
_speech = _kind(
    lambda h, w: {"input_values": (w, h)},
    SOUND,
    **WIDTHS,
    vocab_size=32,
    conv_dim=(16, 16),
    conv_stride=(5, 2),
    conv_kernel=(10, 3),
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=2,
    num_feat_extract_layers=2,
    apply_spec_augment=False,
)
_codec = _kind(lambda h, w: {"input_values": (w, 1, h)}, SOUND, AUDIO)
CODERS: Settings = {
    "d_model": 32,
    **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")},
}
VIT: Settings = {**WIDTHS, "image_size": 64, "patch_size": 8}
STAGES: Settings = {"hidden_sizes": [8, 16, 16, 24], "depths": [1, 1, 1, 1]}

TRANSFORMERS = (
    text("LlamaForCausalLM", LOGITS, TRAINS, QUICK, num_key_value_heads=2),
    text("Qwen2Model", BF16, num_key_value_heads=2),
    text("Gemma2Model", num_key_value_heads=2, head_dim=8, sliding_window=8),
    text("GPT2Model", TRAINS, n_embd=32, n_layer=2, n_head=4),
    text("GPTNeoXModel", BF16),
    text("OPTModel", ffn_dim=64, word_embed_proj_dim=32),
    text("BloomModel", n_layer=2, n_head=4),
    text("PhiModel", BF16),
    text("BertModel", TRAINS),
    text("RobertaModel"),
    text("AlbertModel", embedding_size=16),
    text("DistilBertModel", BF16, dim=32, hidden_dim=64, n_layers=2, n_heads=4),
    text("ElectraModel", embedding_size=16),
    text("DebertaV2Model", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    text("ModernBertModel", local_attention=8, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2),
    text("MambaModel", state_size=4, num_hidden_layers=1),
    _two_texts("T5Model", TRAINS, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4),
    _two_texts("BartModel", BF16, **CODERS),
    _vision("ResNetModel", TRAINS, embedding_size=8, **STAGES),
    _vision("RegNetModel", BF16, embedding_size=8, groups_width=4, **STAGES),
    _vision("ConvNextModel", **STAGES),
    _vision("MobileNetV2Model", BF16, depth_multiplier=0.35),
    _vision("MobileNetV1Model", TRAINS, depth_multiplier=0.35),
    _vision("EfficientNetModel", width_coefficient=0.5, depth_coefficient=0.4, hidden_dim=640, image_size=64),
    _vision(
        "MobileViTModel", hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64], num_attention_heads=2
    ),
    _vision("PoolFormerModel", **STAGES),
    _vision(
        "SegformerForSemanticSegmentation",
        LOGITS,
        TRAINS,
        **STAGES,
        num_attention_heads=[1, 2, 2, 3],
        decoder_hidden_size=16,
    ),
    _vision("UperNetForSemanticSegmentation", LOGITS, {"keep": 9}, hidden_size=16, auxiliary_channels=16, num_labels=5),
    _vision("Dinov2Model", BF16, **VIT),
    _vision("YolosForObjectDetection", LOGITS, **{**VIT, "image_size": [64, 96]}, num_detection_tokens=5),
    _vision(
        "DetrForObjectDetection",
        LOGITS,
        use_timm_backbone=False,
        backbone_config={"model_type": "resnet", "embedding_size": 8, **STAGES, "out_features": ["stage4"]},
        **CODERS,
        num_queries=5,
    ),
    _vision("SwinModel", BF16, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4, image_size=64),
    _vision("Dinov2WithRegistersModel", **VIT),
    _speech("Wav2Vec2Model", TRAINS),
    _speech("HubertModel", BF16),
    _speech("WavLMModel"),
    _speech("Data2VecAudioModel"),
    _speech("SEWModel", squeeze_factor=2),
    _speech("UniSpeechModel", BF16),
    row(
        "transformers",
        "WhisperModel",
        lambda h, w: {"input_features": (w, 20, 64), "decoder_input_ids": ("ids", w, h)},
        {**TOKENS, "large": ((65, 2), (129, 3))},
        STATES,
        TRAINS,
        **TEXT,
        num_mel_bins=20,
        **CODERS,
        max_source_positions=32,
        max_target_positions=256,
        decoder_start_token_id=1,
    ),
    row(
        "transformers",
        "Speech2TextModel",
        lambda h, w: {"input_features": (w, h, 20), "decoder_input_ids": ("ids", w, 5)},
        {**TOKENS, "small": ((37, 2), (53, 3))},
        STATES,
        **TEXT,
        input_feat_per_channel=20,
        **CODERS,
        conv_channels=16,
        decoder_start_token_id=1,
    ),
    row(
        "transformers",
        "SpeechT5HifiGan",
        lambda h, w: {"spectrogram": (w, h, 20)},
        TOKENS,
        TRAINS,
        model_in_dim=20,
        upsample_initial_channel=32,
        upsample_rates=[4, 2],
        upsample_kernel_sizes=[8, 4],
        resblock_kernel_sizes=[3, 5],
        resblock_dilation_sizes=[[1, 3], [1, 3]],
    ),
    _codec(
        "EncodecModel",
        num_filters=4,
        hidden_size=16,
        codebook_size=16,
        codebook_dim=16,
        upsampling_ratios=[4, 2],
        num_lstm_layers=1,
        target_bandwidths=[24.0],
    ),
    _codec(
        "DacModel",
        BF16,
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4],
        decoder_hidden_size=32,
        upsampling_ratios=[4, 2],
        n_codebooks=2,
        codebook_size=16,
        codebook_dim=4,
    ),
    row(
        "transformers",
        "MimiModel",
        lambda h, w: {"input_values": (w, 1, 4 * h)},
        SOUND,
        AUDIO,
        **WIDTHS,
        num_filters=8,
        codebook_size=16,
        codebook_dim=16,
        upsampling_ratios=[4, 2],
        vector_quantization_hidden_dimension=16,
        num_key_value_heads=4,
        head_dim=8,
        num_quantizers=4,
        num_semantic_quantizers=1,
        upsample_groups=32,
        sliding_window=16,
    ),
)
