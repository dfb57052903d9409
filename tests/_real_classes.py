# SPDX-License-Identifier: Apache-2.0
"""Real classes of timm, transformers and diffusers as a table: what each is made and called with, and at which sizes.

The structure is that of the library. Repeated blocks are left out, widths are small where a setting makes them so, and
weights are random, so that nothing is downloaded.
"""

from __future__ import annotations

import importlib
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from _torchvision import torchvision_or_stand_in
from torch import Tensor, nn


Settings = Mapping[str, Any]
Size = tuple[int, int]
Sizes = tuple[Size, Size]
Shape = tuple[Any, ...]
Shapes = Callable[[int, int], Mapping[str, Shape]]
"""From a size to the inputs by name: the shape of normal numbers, or of "ids", "ones" or "step" in front of it."""

IMAGES: Mapping[str, Any] = {"small": ((65, 97), (81, 49)), "large": ((320, 288), (287, 353))}
VOCABULARY = 97

# What a word says of a row.
Words = Mapping[str, Any]
BF16: Words = {"dtype": torch.bfloat16}
TRAINS: Words = {"trains": True}
QUICK: Words = {"quick": True}


@dataclass(frozen=True)
class RealClass:
    """A class, and what it is made and called with.

    Attributes:
        library: timm, transformers or diffusers.
        model: The class; for timm the name of a published model.
        settings: What it is made with beside what the library takes by itself.
        shapes: What it is called with at a size.
        small: Two sizes at which a CPU runs it.
        large: Two sizes for a GPU.
        output: Which part of the output counts, where that is not a Tensor or begins with another.
        part: The submodule that is the model, a decoder for example.
        dtype: Of the weights and inputs.
        trains: Whether a training step is part of what is tested.
        keep: How many of equal blocks in a row stay.
        quick: Whether it belongs to the few that run each time.
    """

    library: str
    model: str
    settings: Settings
    shapes: Shapes
    small: Sizes
    large: Sizes
    output: str = ""
    part: str = ""
    dtype: torch.dtype = torch.float32
    trains: bool = False
    keep: int = 2
    quick: bool = False

    def build(self, *, whole: bool = False) -> nn.Module:
        """The model in evaluation, its weights drawn from the current seed; with all its blocks where *whole*."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: nn.Module = _MAKERS[self.library](self.model, self.settings)
        model = getattr(model, self.part) if self.part else model
        if not whole:
            shorten(model, self.keep)
        draw(model)
        return _FirstTensor(model.eval().requires_grad_(False), self.output).to(self.dtype)

    def inputs(self, size: Size, device: str = "cpu") -> dict[str, Tensor]:
        """The inputs at *size*, the same numbers each time."""
        generator = torch.Generator().manual_seed(size[0])
        return {name: self._input(shape, generator).to(device) for name, shape in self.shapes(*size).items()}

    def _input(self, shape: Shape, generator: torch.Generator) -> Tensor:
        match shape:
            case ("ids", *numbers):
                return torch.randint(3, VOCABULARY, numbers, generator=generator)
            case ("ones", *numbers):
                return torch.ones(numbers, dtype=torch.int64)
            case ("step", *numbers):
                return torch.full(numbers, 7)
        return torch.randn(shape, generator=generator).to(self.dtype)


def row(library: str, model: str, shapes: Shapes, /, *words: Words, **settings: Any) -> RealClass:
    """A class with its *settings*; of two words that say the same, the later one holds."""
    return RealClass(library, model, settings, shapes, **dict(ChainMap(*map(dict, words[::-1]))))


class _FirstTensor(nn.Module):
    """A model that returns one Tensor of what its class returns."""

    def __init__(self, model: nn.Module, output: str) -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, *positional: Tensor, **inputs: Tensor) -> Tensor:
        found: Any = self.model(*positional, **inputs)
        if self.output:
            found = getattr(found, self.output)
        while not isinstance(found, Tensor):
            found = found[0]
        return found


def train(model: nn.Module) -> nn.Module:
    """*model* for a training step without random numbers: norms of batches learn, nothing is dropped."""
    model.eval().requires_grad_(True)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    return model


def draw(model: nn.Module) -> None:
    """Weights and statistics that no layer turns into zero, or into what a comparison cannot see.

    Many classes begin with zeros, with branches that are off, and with weights for a trained scale.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=(weight.numel() / weight.shape[0]) ** -0.5)
            elif name.endswith("bias"):
                weight.normal_(std=0.1)
            elif weight.dim() == 1:
                weight.uniform_(0.5, 1.5)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.5, 1.5)


def shorten(model: nn.Module, keep: int) -> None:
    """Leave the first *keep* of equal blocks in a row, in whatever runs one block after the other."""
    for parent in list(model.modules()):
        if isinstance(parent, nn.Sequential | nn.ModuleList):
            for name in list(_repeated(parent, keep)):
                del parent._modules[name]
            if isinstance(parent, nn.ModuleList):
                parent._modules = {str(place): child for place, child in enumerate(parent._modules.values())}


def _repeated(parent: nn.Module, keep: int) -> Iterator[str]:
    last, run = "", 0
    for name, child in parent.named_children():
        looks = repr(child) + str([tuple(each.shape) for each in child.parameters()])
        run = run + 1 if looks == last else 1
        last = looks
        if run > keep and list(child.children()):
            yield name


def _of_timm(name: str, settings: Settings) -> nn.Module:
    with torchvision_or_stand_in():
        model: nn.Module = importlib.import_module("timm").create_model(name, pretrained=False, **settings)
    return model


def _of_transformers(name: str, settings: Settings) -> nn.Module:
    made: Any = getattr(importlib.import_module("transformers"), name)
    model: nn.Module = made(made.config_class(**settings))
    return model


def _of_diffusers(name: str, settings: Settings) -> nn.Module:
    model: nn.Module = getattr(importlib.import_module("diffusers"), name)(**settings)
    return model


_MAKERS: Mapping[str, Callable[[str, Settings], nn.Module]] = {
    "timm": _of_timm,
    "transformers": _of_transformers,
    "diffusers": _of_diffusers,
}
