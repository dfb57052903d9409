# SPDX-License-Identifier: Apache-2.0
"""Real classes of timm, transformers and diffusers: classes.yaml says what each is made and called with.

The structure is that of the library. Repeated blocks are left out, widths are small where a setting makes them so, and
weights are random, so that nothing is downloaded.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from torch import Tensor, nn


Settings = Mapping[str, Any]
Size = tuple[int, int]
VOCABULARY = 97


@dataclass(frozen=True)
class RealClass:
    """A class, and what it is made and called with.

    Attributes:
        library: timm, transformers or diffusers.
        model: The class; for timm the name of a published model.
        settings: What it is made with beside what the library takes by itself.
        shapes: The inputs by name: the shape of normal numbers, or of "ids", "ones" or "step" in front of it; `h` and
            `w` are the two numbers of a size.
        small: Two sizes at which a CPU runs it.
        large: Two sizes for a GPU.
        output: Which part of the output counts, where that is not a Tensor or begins with another.
        part: The submodule that is the model, a decoder for example.
        dtype: Of the weights and inputs.
        trains: Whether a training step is part of what is tested.
        keep: How many of equal blocks in a row stay.
        quick: Whether it belongs to the few that run each time.
        stock_fails: The releases of torch whose own Inductor does not compile it, "2.11" for example.
        stock_is_slow: The releases of torch that trace it for longer than a test may take.
    """

    library: str
    model: str
    settings: Settings
    shapes: Mapping[str, Sequence[Any]]
    small: tuple[Size, Size]
    large: tuple[Size, Size]
    output: str = ""
    part: str = ""
    dtype: torch.dtype = torch.float32
    trains: bool = False
    keep: int = 2
    quick: bool = False
    stock_fails: Sequence[str] = ()
    stock_is_slow: Sequence[str] = ()

    def build(self, *, whole: bool = False) -> nn.Module:
        """The model in evaluation, its weights drawn from the current seed; with all its blocks where *whole*."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: nn.Module = _MAKERS[self.library](self.model, self.settings)
        model = getattr(model, self.part) if self.part else model
        if not whole:
            shorten(model, self.keep)
        draw(model)
        return FirstTensor(model.eval().requires_grad_(False), self.output).to(self.dtype)

    def inputs(self, size: Size, device: str = "cpu") -> dict[str, Tensor]:
        """The inputs at *size*, the same numbers each time."""
        generator = torch.Generator().manual_seed(size[0])
        known: dict[str, Any] = {"h": size[0], "w": size[1], "ids": "ids", "ones": "ones", "step": "step"}
        made = {}
        for name, texts in self.shapes.items():
            kind, *numbers = shape = [eval(str(text), known) for text in texts]
            match kind:
                case "ids":
                    made[name] = torch.randint(3, VOCABULARY, numbers, generator=generator)
                case "ones":
                    made[name] = torch.ones(numbers, dtype=torch.int64)
                case "step":
                    made[name] = torch.full(numbers, 7)
                case _:
                    made[name] = torch.randn(shape, generator=generator).to(self.dtype)
        return {name: each.to(device) for name, each in made.items()}


class FirstTensor(nn.Module):
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


# What timm imports of it: its models use no more than names.
_TORCHVISION = (
    *("torchvision", "torchvision.datasets", "torchvision.models", "torchvision.models.feature_extraction"),
    *("torchvision.ops", "torchvision.ops.misc", "torchvision.transforms", "torchvision.transforms.functional"),
    "torchvision.utils",
)


def _of_timm(name: str, settings: Settings) -> nn.Module:
    stand_ins = dict.fromkeys(_TORCHVISION, mock.MagicMock())
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):  # the wheel on PyPI is built against CUDA, and refuses to load without it
        sys.modules.update(stand_ins)
    try:
        model: nn.Module = importlib.import_module("timm").create_model(name, pretrained=False, **settings)
    finally:
        for part, stand_in in stand_ins.items():
            if sys.modules.get(part) is stand_in:
                del sys.modules[part]
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


def classes_in(table: Path) -> dict[str, RealClass]:
    """The classes of the YAML file *table* by name, which is that of the class unless `model` says another."""
    found: dict[str, RealClass] = {}
    for group in yaml.safe_load(table.read_text()):
        classes = group.pop("classes")
        for name, own in classes.items():
            how = {**group, **own, "settings": {**group.get("settings", {}), **own.get("settings", {})}}
            how |= {which: tuple(map(tuple, how[which])) for which in ("small", "large")}
            dtype = torch.bfloat16 if how.pop("bf16", False) else torch.float32
            found[name] = RealClass(dtype=dtype, **{"model": name, **how})
    return found


CLASSES = classes_in(Path(__file__).with_name("classes.yaml"))
