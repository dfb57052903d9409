# SPDX-License-Identifier: Apache-2.0
"""A training step with dynamic sizes is right at each size: no stride of a saved tensor is a number of one size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from magi_backend._records.collect import Collector, collecting
from torch import Tensor, nn


if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.kernels

SIZES = (5, 5, 5, 6, 6, 6, 5)


def image(size: int) -> Tensor:
    return torch.randn(2, 3, size, size + 1)


def gradients(model: Callable[..., Tensor], layers: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().mean(), list(layers.parameters())))


def agree(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(actual, expected, strict=True))


def test_stock_asserts_the_strides_of_another_size() -> None:
    layers = nn.Conv2d(3, 8, 3, padding=1)
    stock = torch.compile(layers, dynamic=True)
    for size in SIZES[:-1]:
        gradients(stock, layers, image(size))

    with pytest.raises(AssertionError, match="stride 90==126"):
        gradients(stock, layers, image(SIZES[-1]))


def test_each_size_is_right() -> None:
    layers = nn.Conv2d(3, 8, 3, padding=1)
    collector = Collector(fresh=False)
    with collecting(collector):
        ours = torch.compile(layers, backend="magi", dynamic=True)
        for size in SIZES:
            x = image(size)
            assert agree(gradients(ours, layers, x), gradients(layers, layers, x)), size

    named = {repair.name for each in collector.compilations() for graph in each.graphs for repair in graph.repairs}
    assert "keep_saved_strides_symbolic" in named


KIN: dict[str, tuple[nn.Module, Callable[[int], Any]]] = {
    "one dimension": (nn.Conv1d(3, 4, 3, padding=1), lambda size: torch.randn(2, 3, size)),
    "three dimensions": (nn.Conv3d(3, 4, 3, padding=1), lambda size: torch.randn(2, 3, 3, size, size + 1)),
    "transposed": (nn.ConvTranspose2d(3, 4, 3, stride=2), image),
    "channels last": (
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3)),
        lambda size: image(size).to(memory_format=torch.channels_last),
    ),
    "norm": (nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.SiLU()), image),
    "linear": (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), lambda size: torch.randn(2, size, 6)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KIN)
def test_each_size_of_its_kin_is_right(kind: str) -> None:
    layers, given = KIN[kind]
    ours = torch.compile(layers, backend="magi", dynamic=True)

    for size in SIZES:
        x = given(size)
        assert agree(gradients(ours, layers, x), gradients(layers, layers, x)), size
