# SPDX-License-Identifier: Apache-2.0
"""The table of real classes by name, with those of timm: a model of each family."""

from __future__ import annotations

from typing import Any

from _diffusers_classes import DIFFUSERS
from _real_classes import BF16, IMAGES, QUICK, TRAINS, RealClass, Words, row
from _transformers_classes import TRANSFORMERS


BY_32: Words = {"small": ((64, 96), (96, 160)), "large": ((320, 288), (288, 352))}
"""For those that take multiples of 32 alone."""


def _timm(model: str, /, *words: Words, **settings: Any) -> RealClass:
    shapes = lambda h, w: {"x": (2, 3, h, w)}  # noqa: E731
    return row("timm", model, shapes, IMAGES, {"keep": 1}, *words, num_classes=10, **settings)


TIMM = (
    _timm("resnet50", TRAINS),
    _timm("efficientnet_b3"),
    _timm("regnety_032", QUICK),
    _timm("mobilenetv3_large_100"),
    _timm("resnet26t", TRAINS),
    _timm("resnetblur18", QUICK),
    _timm("resnext50_32x4d", BF16),
    _timm("seresnext26t_32x4d", TRAINS),
    _timm("ecaresnext26t_32x4d", BF16),
    _timm("skresnet18"),
    _timm("resnest14d"),
    _timm("res2net50_14w_8s", BF16),
    _timm("resnetv2_50x1_bit", TRAINS),
    _timm("legacy_seresnet18"),
    _timm("vgg11_bn", TRAINS),
    _timm("densenet121", BF16),
    _timm("dla34", BY_32),
    _timm("dpn48b"),
    _timm("cspresnet50", BF16),
    _timm("cs3darknet_s", TRAINS),
    _timm("darknet53"),
    _timm("ese_vovnet19b_dw", {"keep": 9}),
    _timm("gernet_s", BF16),
    _timm("repvgg_a0", TRAINS),
    _timm("mobileone_s0"),
    _timm("hrnet_w18_small", BY_32, {"keep": 2}),
    _timm("selecsls42"),
    _timm("inception_v3", {"small": ((97, 113), (145, 99))}, BF16),
    _timm("xception41"),
    _timm("nf_regnet_b0", TRAINS),
    _timm("nfnet_l0", BF16),
    _timm("mobilenetv2_050", TRAINS),
    _timm("mobilenetv4_conv_small", BF16),
    _timm("mnasnet_small"),
    _timm("mixnet_s"),
    _timm("fbnetc_100"),
    _timm("tf_efficientnetv2_b0", BF16),
    _timm("lcnet_050"),
    _timm("ghostnet_050", TRAINS),
    _timm("rexnet_100"),
    _timm("hgnetv2_b0", {"keep": 9}, BF16),
    _timm("tresnet_m", BY_32),
    _timm("convnext_atto", TRAINS),
    _timm("convnextv2_atto", BF16),
    _timm("inception_next_atto"),
    _timm("convmixer_768_32", BF16),
    _timm("poolformer_s12", TRAINS),
    _timm("caformer_s18"),
    _timm("mambaout_femto", TRAINS),
    _timm("starnet_s1"),
    _timm("fasternet_t0", BF16, QUICK),
    _timm("repvit_m0_9", TRAINS),
    _timm("swiftformer_xs"),
    _timm("efficientvit_b0", BF16),
    _timm("edgenext_xx_small"),
    _timm("mobilevit_xxs", TRAINS),
    _timm("mobilevitv2_050", BF16),
    _timm("pvt_v2_b0", TRAINS),
    _timm("rdnet_tiny"),
    _timm("focalnet_tiny_srf"),
    _timm("davit_tiny", BF16),
    _timm("twins_svt_small"),
    _timm("nextvit_small"),
    _timm("fastvit_t8"),
    _timm("vit_tiny_patch16_224", TRAINS, dynamic_img_size=True, dynamic_img_pad=True),
    _timm("swin_tiny_patch4_window7_224", BY_32, {"keep": 2}, strict_img_size=False),
    _timm("xcit_nano_12_p16_224", BY_32, BF16),
)

CLASSES: dict[str, RealClass] = {each.model: each for each in (*TIMM, *DIFFUSERS, *TRANSFORMERS)}
