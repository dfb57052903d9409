# SPDX-License-Identifier: Apache-2.0

"""Fragments of models of videos; the sizes are those of decodes at 480p to 720p."""

from __future__ import annotations

from typing import Any

from _fragment import HEIGHT_AND_WIDTH, Argument, Fragment


_AUTOENCODERS = "diffusers.models.autoencoders."
_WAN = _AUTOENCODERS + "autoencoder_kl_wan:"
_COGVIDEOX = _AUTOENCODERS + "autoencoder_kl_cogvideox:"
_HUNYUAN = _AUTOENCODERS + "autoencoder_kl_hunyuan_video:"
_LTX = _AUTOENCODERS + "autoencoder_kl_ltx:"
_RESNET = "diffusers.models.resnet:"

_VIDEO = Argument("1 C T H W")
_FRAMES = Argument("N C H W")
_CACHE = Argument("1 C 2 H W")
_WAN_WIDTH = {"in_dim": "C", "out_dim": "C"}
_TINY = {"C": 8, "T": 4, "H": 8, "W": 12}


def _wan(name: str, module: str, line: int, **rest: Any) -> Fragment:
    return Fragment(name, "AutoencoderKLWan", _WAN + module, line, **rest)


def _half_of_a_wan_block(name: str, channels: int, frames: int, height: int, width: int) -> Fragment:
    sizes = {"C": channels, "T": frames, "H": height, "W": width}
    tiny = _TINY | {"T": frames}
    arguments = (_VIDEO, _CACHE)
    block = {"options": _WAN_WIDTH, "arguments": arguments, "sizes": sizes, "tiny": tiny, "call": "wan_half"}
    return _wan(name, "WanResidualBlock", 319, **block)


VIDEO = (
    # Norm, SiLU, cat with the cache, pad, convolution, residual: half of each residual block of a WAN decoder.
    _half_of_a_wan_block("wan_half_96", 96, 4, 544, 960),
    _half_of_a_wan_block("wan_half_384", 384, 1, 136, 240),
    _half_of_a_wan_block("wan_half_192", 192, 2, 272, 480),
    _wan(
        "wan_block_widening",
        "WanResidualBlock",
        319,
        options={"in_dim": "C", "out_dim": "D"},
        arguments=(Argument("1 C T H W", "frames_first"), _CACHE, Argument("1 D 2 H W")),
        sizes={"C": 192, "D": 384, "T": 2, "H": 136, "W": 240},
        tiny={"C": 8, "D": 16, "T": 2, "H": 8, "W": 12},
        call="wan_caches",
    ),
    _wan(
        "wan_block_channels_last",
        "WanResidualBlock",
        319,
        options=_WAN_WIDTH,
        arguments=(Argument("1 C T H W", "channels_last"), _CACHE, _CACHE),
        sizes={"C": 96, "T": 4, "H": 544, "W": 960},
        tiny=_TINY,
        symbolic=HEIGHT_AND_WIDTH,
        call="wan_caches",
    ),
    _wan(
        "wan_mid_block",
        "WanMidBlock",
        438,
        options={"dim": "C"},
        arguments=(Argument("1 C 1 H W"), _CACHE, _CACHE, _CACHE, _CACHE),
        sizes={"C": 384, "H": 68, "W": 120},
        tiny={"C": 8, "H": 8, "W": 12},
        call="wan_caches",
    ),
    _wan(
        "wan_upsample",
        "WanResample",
        228,
        options={"dim": "C", "mode": "upsample2d"},
        arguments=(_VIDEO,),
        sizes={"C": 192, "T": 4, "H": 272, "W": 480},
        tiny=_TINY,
    ),
    _wan(
        "wan_upsample_in_time",
        "WanResample",
        228,
        options={"dim": "C", "mode": "upsample3d"},
        arguments=(_VIDEO, _CACHE),
        sizes={"C": 384, "T": 2, "H": 136, "W": 240},
        tiny=_TINY | {"T": 2},
        symbolic=HEIGHT_AND_WIDTH,
        call="wan_upsample_in_time",
    ),
    _wan(
        "wan_downsample",
        "WanResample",
        228,
        options={"dim": "C", "mode": "downsample2d"},
        arguments=(_VIDEO,),
        sizes={"C": 96, "T": 4, "H": 544, "W": 960},
        tiny=_TINY,
    ),
    _wan(
        "wan22_upsample_with_shortcut",
        "WanResidualUpBlock",
        635,
        options={"in_dim": "D", "out_dim": "C", "num_res_blocks": 0, "up_flag": True},
        arguments=(_VIDEO, Argument("1 D T H W")),
        sizes={"C": 512, "D": 1024, "T": 4, "H": 136, "W": 240},
        tiny=_TINY | {"D": 16},
        call="wan22_upsample_with_shortcut",
    ),
    Fragment(
        "qwen_block_of_an_image",
        "AutoencoderKLQwenImage",
        _AUTOENCODERS + "autoencoder_kl_qwenimage:QwenImageResidualBlock",
        220,
        options=_WAN_WIDTH,
        arguments=(Argument("1 C 1 H W"),),
        sizes={"C": 96, "H": 1328, "W": 1328},
        tiny={"C": 8, "H": 8, "W": 12},
        call="wan_caches",
        empty_caches=2,
    ),
    Fragment(
        "cogvideox_resnet",
        "AutoencoderKLCogVideoX",
        _COGVIDEOX + "CogVideoXResnetBlock3D",
        198,
        options={"in_channels": "C", "temb_channels": 0, "spatial_norm_dim": "Z"},
        arguments=(_VIDEO, Argument("1 Z 2 h w"), _CACHE, _CACHE),
        sizes={"C": 256, "Z": 16, "T": 8, "H": 240, "W": 360, "h": 60, "w": 90},
        tiny={"C": 32, "Z": 4, "T": 8, "H": 8, "W": 12, "h": 4, "w": 6},
        call="cogvideox_resnet",
    ),
    Fragment(
        "cogvideox_resnet_first_frames",
        "AutoencoderKLCogVideoX",
        _COGVIDEOX + "CogVideoXResnetBlock3D",
        198,
        options={"in_channels": "C", "temb_channels": 0, "spatial_norm_dim": "Z"},
        arguments=(Argument("1 C 3 H W"), Argument("1 Z 3 H W")),
        sizes={"C": 512, "Z": 16, "H": 60, "W": 90},
        tiny={"C": 32, "Z": 4, "H": 8, "W": 12},
        symbolic=HEIGHT_AND_WIDTH,
        call="cogvideox_resnet",
    ),
    Fragment(
        "cogvideox_upsample",
        "AutoencoderKLCogVideoX",
        "diffusers.models.upsampling:CogVideoXUpsample3D",
        357,
        options={"in_channels": "C", "out_channels": "C", "compress_time": True},
        arguments=(_VIDEO,),
        sizes={"C": 512, "T": 2, "H": 60, "W": 90},
        tiny=_TINY | {"T": 2},
    ),
    Fragment(
        "hunyuan_resnet",
        "AutoencoderKLHunyuanVideo",
        _HUNYUAN + "HunyuanVideoResnetBlockCausal3D",
        141,
        options={"in_channels": "C"},
        arguments=(_VIDEO,),
        sizes={"C": 512, "T": 9, "H": 136, "W": 240},
        tiny=_TINY | {"C": 32},
    ),
    Fragment(
        "hunyuan_upsample",
        "AutoencoderKLHunyuanVideo",
        _HUNYUAN + "HunyuanVideoUpsampleCausal3D",
        79,
        options={"in_channels": "C"},
        arguments=(_VIDEO,),
        sizes={"C": 512, "T": 5, "H": 68, "W": 120},
        tiny=_TINY | {"T": 5},
        symbolic=HEIGHT_AND_WIDTH,
    ),
    Fragment(
        "mochi_resnet",
        "AutoencoderKLMochi",
        _AUTOENCODERS + "autoencoder_kl_mochi:MochiResnetBlock3D",
        69,
        options={"in_channels": "C"},
        arguments=(_VIDEO,),
        sizes={"C": 512, "T": 9, "H": 120, "W": 212},
        tiny=_TINY | {"C": 32, "T": 9},
        symbolic=HEIGHT_AND_WIDTH,
        call="first_of_outputs",
    ),
    Fragment(
        "ltx_resnet",
        "AutoencoderKLLTXVideo",
        _LTX + "LTXVideoResnetBlock3d",
        81,
        options={"in_channels": "C", "is_causal": False},
        arguments=(_VIDEO,),
        sizes={"C": 256, "T": 25, "H": 88, "W": 160},
        tiny=_TINY,
    ),
    Fragment(
        "ltx_upsample",
        "AutoencoderKLLTXVideo",
        _LTX + "LTXVideoUpsampler3d",
        246,
        options={"in_channels": "C", "stride": (2, 2, 2), "is_causal": False},
        arguments=(_VIDEO,),
        sizes={"C": 512, "T": 7, "H": 22, "W": 40},
        tiny=_TINY,
    ),
    Fragment(
        "allegro_temporal_convolutions",
        "AutoencoderKLAllegro",
        _AUTOENCODERS + "autoencoder_kl_allegro:AllegroTemporalConvLayer",
        33,
        options={"in_dim": "C", "out_dim": "C", "dropout": 0.1},
        arguments=(Argument("T C H W"),),
        sizes={"C": 256, "T": 24, "H": 160, "W": 160},
        tiny=_TINY | {"C": 32},
        call="one_video",
    ),
    Fragment(
        "svd_unet_resnet",
        "UNetSpatioTemporalConditionModel",
        _RESNET + "SpatioTemporalResBlock",
        639,
        options={"in_channels": "C", "temb_channels": "E"},
        arguments=(_FRAMES, Argument("N E"), Argument("2 T", values="zeros")),
        sizes={"N": 28, "C": 320, "E": 1280, "T": 14, "H": 72, "W": 128},
        tiny={"N": 6, "C": 32, "E": 16, "T": 3, "H": 8, "W": 12},
        symbolic=HEIGHT_AND_WIDTH,
    ),
    Fragment(
        "svd_decoder_resnet",
        "AutoencoderKLTemporalDecoder",
        _RESNET + "SpatioTemporalResBlock",
        639,
        options={
            "in_channels": "C",
            "out_channels": "D",
            "temb_channels": None,
            "temporal_eps": 1e-5,
            "merge_factor": 0.0,
            "merge_strategy": "learned",
            "switch_spatial_to_temporal_mix": True,
        },
        arguments=(_FRAMES, Argument("1 N", values="zeros")),
        sizes={"N": 8, "C": 512, "D": 256, "H": 288, "W": 512},
        tiny={"N": 3, "C": 64, "D": 32, "H": 8, "W": 12},
        call="svd_decoder_resnet",
    ),
)
