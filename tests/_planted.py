# SPDX-License-Identifier: Apache-2.0
"""Models of real classes with one operator more, at a place of their own, that a planted compiler gets wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from _real_classes import CLASSES
from _wrong import Becomes
from magi_backend import MismatchError
from torch import Tensor, nn


MODELS = {
    "Qwen2": "Qwen2Model",
    "BERT": "BertModel",
    "ViT": "vit_tiny_patch16_224",
    "UNet2D": "UNet2DModel",
    "VAE decoder": "AutoencoderKL",
    "ResNet": "ResNetModel",
}
PLACES = ("first", "middle", "last")
DIRECTIONS = ("forward", "backward")
WRONG = {"forward": torch.ops.aten.sinh.default, "backward": torch.ops.aten.cosh.default}
"""What is got wrong: ``sinh`` is called nowhere else, and ``cosh`` is its derivative."""


def planted(case: str, place: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model of *case* with the operator behind its first, middle or last layer, and its inputs."""
    torch.manual_seed(0)
    kind = replace(CLASSES[case], dtype=torch.float32)
    model, inputs = kind.build().requires_grad_(True), tuple(kind.inputs(kind.small[0]).values())
    layers = _layers(model, inputs)
    index = {"first": 0, "middle": len(layers) // 2, "last": -1}[place]
    layers[index].register_forward_hook(_one_more)
    return model, inputs


def _one_more(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + torch.sinh(output * 0.1)


def _layers(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[nn.Module]:
    """The modules without children that the output depends on, in the order in which they are first called."""
    called: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            called.setdefault(module, output)

    leaves = [module for module in model.modules() if not list(module.children())]
    hooks = [leaf.register_forward_hook(note) for leaf in leaves]
    total = model(*inputs).sum()
    for hook in hooks:
        hook.remove()
    reached: tuple[Tensor | None, ...] = torch.autograd.grad(total, list(called.values()), allow_unused=True)
    return [module for module, gradient in zip(called, reached, strict=True) if gradient is not None]


def blamed(model: nn.Module, inputs: tuple[Tensor, ...], direction: str) -> str:
    """What `magi.check` says of *model* when the planted operator is wrong in *direction*."""
    options: dict[str, Any] = {"magi.check": True, "post_grad_custom_pre_pass": Becomes(WRONG[direction])}
    try:
        torch.compile(model, backend="magi", dynamic=False, options=options)(*inputs)
    except MismatchError as error:
        return str(error)
    return "nothing"


def names_it(text: str) -> bool:
    """Whether *text*, what `magi.check` said, names the planted operator, and the line that calls it."""
    return "is sinh (node sinh" in text and text.endswith("return output + torch.sinh(output * 0.1).")
