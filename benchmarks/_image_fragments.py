# SPDX-License-Identifier: Apache-2.0

"""Fragments of models of images; the sizes are those of images of about 1024 x 1024."""

from __future__ import annotations

from _fragment import HEIGHT_AND_WIDTH, Argument, Fragment


_RESNET = "diffusers.models.resnet:"
_BLOCKS = "diffusers.models.unets.unet_2d_blocks:"

_IMAGE = Argument("N C H W")
_TINY = {"N": 1, "C": 32, "D": 32, "H": 8, "W": 12}


IMAGE = (
    Fragment(
        "kl_resnet_narrowing",
        "AutoencoderKL",
        _RESNET + "ResnetBlock2D",
        188,
        options={"in_channels": "C", "out_channels": "D", "temb_channels": None},
        arguments=(_IMAGE,),
        sizes={"N": 1, "C": 512, "D": 256, "H": 512, "W": 512},
        tiny=_TINY | {"C": 64},
        symbolic=HEIGHT_AND_WIDTH,
        call="without_embedding",
    ),
    Fragment(
        "kl_resnet_channels_last",
        "AutoencoderKL",
        _RESNET + "ResnetBlock2D",
        188,
        options={"in_channels": "C", "temb_channels": None},
        arguments=(Argument("N C H W", "channels_last"),),
        sizes={"N": 1, "C": 128, "H": 1024, "W": 1024},
        tiny=_TINY,
        call="without_embedding",
    ),
    Fragment(
        "kl_upsample",
        "AutoencoderKL",
        "diffusers.models.upsampling:Upsample2D",
        74,
        options={"channels": "C", "use_conv": True},
        arguments=(_IMAGE,),
        sizes={"N": 1, "C": 512, "H": 256, "W": 256},
        tiny=_TINY,
    ),
    Fragment(
        "kl_downsample",
        "AutoencoderKL",
        "diffusers.models.downsampling:Downsample2D",
        67,
        options={"channels": "C", "use_conv": True, "padding": 0, "name": "op"},
        arguments=(_IMAGE,),
        sizes={"N": 1, "C": 128, "H": 1024, "W": 1024},
        tiny=_TINY,
    ),
    Fragment(
        "kl_mid_block",
        "AutoencoderKL",
        _BLOCKS + "UNetMidBlock2D",
        589,
        options={"in_channels": "C", "temb_channels": None, "attention_head_dim": "C"},
        arguments=(_IMAGE,),
        sizes={"N": 1, "C": 512, "H": 128, "W": 128},
        tiny=_TINY,
        symbolic=HEIGHT_AND_WIDTH,
    ),
    Fragment(
        "unet_up_block",
        "UNet2DConditionModel",
        _BLOCKS + "UpBlock2D",
        2474,
        options={
            "in_channels": "C",
            "prev_output_channel": "D",
            "out_channels": "C",
            "temb_channels": "E",
            "num_layers": 3,
            "add_upsample": False,
        },
        arguments=(Argument("N D H W"), _IMAGE, _IMAGE, _IMAGE, Argument("N E")),
        sizes={"N": 2, "C": 320, "D": 640, "E": 1280, "H": 128, "W": 128},
        tiny=_TINY | {"N": 2, "D": 64, "E": 16},
        call="unet_up_block",
    ),
    Fragment(
        "unet_down_block_with_attention",
        "UNet2DConditionModel",
        _BLOCKS + "CrossAttnDownBlock2D",
        1147,
        options={
            "in_channels": "C",
            "out_channels": "D",
            "temb_channels": "E",
            "num_layers": 2,
            "transformer_layers_per_block": 2,
            "num_attention_heads": "heads",
            "cross_attention_dim": "F",
            "use_linear_projection": True,
        },
        arguments=(_IMAGE, Argument("N E"), Argument("N 77 F")),
        sizes={"N": 2, "C": 320, "D": 640, "E": 1280, "F": 2048, "heads": 10, "H": 64, "W": 64},
        tiny=_TINY | {"N": 2, "D": 64, "E": 16, "F": 16, "heads": 2},
        symbolic=HEIGHT_AND_WIDTH,
        call="unet_down_block",
    ),
    Fragment(
        "unet_resnet_channels_last",
        "UNet2DConditionModel",
        _RESNET + "ResnetBlock2D",
        188,
        options={"in_channels": "C", "temb_channels": "E"},
        arguments=(Argument("N C H W", "channels_last"), Argument("N E")),
        sizes={"N": 2, "C": 1280, "E": 1280, "H": 32, "W": 32},
        tiny=_TINY | {"N": 2, "E": 16},
    ),
    Fragment(
        "vq_up_block_with_attention",
        "VQModel",
        _BLOCKS + "AttnUpDecoderBlock2D",
        2648,
        options={
            "in_channels": "C",
            "out_channels": "C",
            "attention_head_dim": "C",
            "temb_channels": "Z",
            "resnet_time_scale_shift": "spatial",
        },
        arguments=(_IMAGE, Argument("N Z H W")),
        sizes={"N": 1, "C": 512, "Z": 4, "H": 96, "W": 96},
        tiny=_TINY | {"Z": 4},
    ),
)
