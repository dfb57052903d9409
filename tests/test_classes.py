# SPDX-License-Identifier: Apache-2.0
"""Real classes by stock Inductor and by magi: magi is right, and names a repair of results only where stock is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from _classes import CASES, Case
from magi_backend import explain
from torch import Tensor, nn


if TYPE_CHECKING:
    from collections.abc import Callable


OF_SPEED = {"keep_floats_of_modules"}
"""Repairs of what is slow in stock, and not wrong."""


def results(case: Case, model: nn.Module, fn: Callable[..., Tensor]) -> list[Tensor]:
    """The gradients at the first size, or the outputs at both."""
    if case.training:
        outputs = fn(*arguments(case, case.sizes[0]))
        wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found: tuple[Tensor | None, ...] = torch.autograd.grad(outputs.square().mean(), wanted, allow_unused=True)
        return [gradient for gradient in found if isinstance(gradient, Tensor)]
    with torch.no_grad():
        return [fn(*arguments(case, size)) for size in case.sizes]


def arguments(case: Case, size: int) -> tuple[Tensor, ...]:
    torch.manual_seed(size)
    return case.inputs(size)


def agree(actual: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether each is right within what reordered sums cost, relative to the largest value of all."""
    scale = max(float(tensor.abs().max()) for tensor in expected)
    return len(actual) == len(expected) and all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-4 * scale) for a, b in zip(actual, expected, strict=True)
    )


def stock_is_right(case: Case, model: nn.Module, expected: list[Tensor]) -> bool:
    try:
        found = results(case, model, torch.compile(model, dynamic=case.dynamic))
    except torch._dynamo.exc.TorchDynamoException:
        return False
    return agree(found, expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)
# transformers looks up the release of torch, and whether FSDP is used, in functions that cache the result.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_repair_is_named_only_where_stock_is_not_right(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build().eval()
    expected = results(case, model, model)
    is_right = stock_is_right(case, model, expected)
    torch.compiler.reset()

    explained = explain(model, dynamic=case.dynamic)
    with torch.set_grad_enabled(case.training):
        for size in case.sizes[: 1 if case.training else 2]:
            report = explained(*arguments(case, size))

    assert report.agrees
    named = [repair.name for each in report.compilations for graph in each.graphs for repair in graph.repairs]
    repairs = [name for name in named if name not in OF_SPEED]
    assert bool(repairs) is not is_right, (
        f"stock is {'right' if is_right else 'not right'}, and the repairs are {named}"
    )
