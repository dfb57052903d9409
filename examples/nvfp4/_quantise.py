# SPDX-License-Identifier: Apache-2.0
"""The linears of a model turned into NVFP4 in place, and how far each weight moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ._format import BLOCK
from ._modules import NVFP4Linear


Filter = Callable[[str, nn.Linear], bool]


@dataclass(frozen=True)
class QuantisedLayer:
    """One linear that was turned into NVFP4.

    Attributes:
        name: its dotted name below the model.
        shape: out_features, in_features.
        error: the norm of the weight's difference over the norm of the weight.
        largest: the largest difference of an element over the largest element.
        bytes_before: of the weight as it was.
        bytes_after: of codes and scales, in whole patches.
    """

    name: str
    shape: tuple[int, int]
    error: float
    largest: float
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class QuantiseReport:
    """What `quantise_` did.

    Attributes:
        layers: the linears that were turned, in the order of the model.
        left: for each linear that stayed its name, and why.
    """

    layers: tuple[QuantisedLayer, ...]
    left: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """A line for each linear."""
        wide = max((len(name) for name in (*(each.name for each in self.layers), *dict(self.left))), default=0)
        lines = [
            f"{each.name:<{wide}}  {each.shape[0]:>6} x {each.shape[1]:<6}  error {each.error:.4f}, largest "
            f"{each.largest:.4f}, {each.bytes_before / each.bytes_after:.2f} times smaller"
            for each in self.layers
        ]
        return "\n".join([*lines, *(f"{name:<{wide}}  left: {reason}" for name, reason in self.left)])


def quantise_(model: nn.Module, filter: Filter | None = None) -> QuantiseReport:  # noqa: A002 - what torchao calls it
    """Put an `NVFP4Linear` in the place of each `nn.Linear` below *model*.

    A linear that stands in several places is turned once and stands in all of them. Subclasses of nn.Linear stay: what
    they add to a forward is not known here.

    Args:
        model: changed in place, on any device.
        filter: called with the dotted name of a linear and the linear; where it is false the linear stays. None turns
            all.

    Returns:
        The error of each layer, and the linears that stayed.

    Raises:
        ValueError: *model* is an nn.Linear itself, which cannot be replaced in place, or no linear was turned.

    Example:
        >>> report = quantise_(model, lambda name, linear: name != "lm_head")  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP
    """
    if isinstance(model, nn.Linear):
        raise ValueError(  # noqa: TRY004 - a module as asked, of a kind that has no place to change
            "quantise_() was given an nn.Linear; it replaces those below a module. Use NVFP4Linear.from_float(linear)."
        )
    layers, left = [], []
    turned: dict[nn.Linear, NVFP4Linear] = {}
    for name, linear in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(linear, nn.Linear):
            continue
        reason = _reason_to_stay(name, linear, filter)
        if reason:
            left.append((name, reason))
            continue
        if linear not in turned:
            turned[linear] = NVFP4Linear.from_float(linear).train(linear.training)
            layers.append(_compared(name, linear.weight, turned[linear]))
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, turned[linear])
    if not layers:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left) or "there is no nn.Linear below it"
        raise ValueError(f"quantise_() turned no linear of {type(model).__name__} ({reasons}). Check the filter.")
    return QuantiseReport(tuple(layers), tuple(left))


def _reason_to_stay(name: str, linear: nn.Linear, filter: Filter | None) -> str:  # noqa: A002
    if type(linear) is not nn.Linear:
        return f"a subclass of nn.Linear, {type(linear).__name__}"
    if linear.in_features % BLOCK:
        return f"in_features {linear.in_features} is not a multiple of {BLOCK}"
    return "" if filter is None or filter(name, linear) else "the filter"


def _compared(name: str, weight: Tensor, quantised: NVFP4Linear) -> QuantisedLayer:
    held = quantised.runner.weight
    with torch.no_grad():
        before = weight.float()
        off = held.decoded() - before
        error, largest = off.norm() / before.norm(), off.abs().amax() / before.abs().amax()
    shape = (weight.shape[0], weight.shape[1])
    return QuantisedLayer(name, shape, float(error), float(largest), weight.nbytes, held.nbytes)
