# SPDX-License-Identifier: Apache-2.0
"""A quotient of two sizes inside a kernel is rounded once, as Python's is: on a GPU that is not there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _pretended_gpu import generated
from magi_backend._records.collect import Collector, collecting
from torch import Tensor


pytestmark = pytest.mark.kernels


def upsampled(x: Tensor, y: Tensor) -> Tensor:
    return F.interpolate(x, size=y.shape[-2:])


def scaled(x: Tensor, y: Tensor) -> Tensor:
    return x * (y.shape[-1] / x.shape[-1])


def lowered(x: Tensor, y: Tensor) -> Tensor:
    return F.avg_pool2d(x, 2) + y.mean()


SMALL, LARGE = torch.empty(1, 8, 45, 66), torch.empty(1, 8, 90, 132)
INEXACT = r"\bks\d+ / ks\d+"


def by_magi(fn: Callable[..., Any], **how: Any) -> tuple[str, list[tuple[str, str]]]:
    """The code that the backend has Inductor write, and the repairs that it reports."""
    with collecting(Collector()) as collector:
        code = generated(fn, SMALL, LARGE, backend="magi", **how)
    (compilation,) = collector.compilations()
    return code, [(repair.name, repair.severity) for graph in compilation.graphs for repair in graph.repairs]


def test_sizes_are_divided_in_float64() -> None:
    stock = generated(upsampled, SMALL, LARGE, dynamic=True)
    assert re.search(INEXACT, stock), "torch has mended this: give the defect its end"
    torch.compiler.reset()

    code, repairs = by_magi(upsampled, dynamic=True)

    assert not re.search(INEXACT, code)
    assert re.search(r"tl\.cast\(ks\d+, tl\.float64\) / tl\.cast\(ks\d+, tl\.float64\)", code)
    assert set(repairs) == {("divide_sizes_exactly", "wrong code")}


@pytest.mark.parametrize(("fn", "dynamic"), [(upsampled, False), (scaled, False), (lowered, True)])
def test_a_graph_without_a_quotient_of_symbols_has_no_repair(fn: Callable[..., Tensor], dynamic: bool) -> None:
    code, repairs = by_magi(fn, dynamic=dynamic)

    assert "tl.cast(ks" not in code
    assert repairs == []


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["inductor", "magi"])
def test_upsampling_to_a_size_on_a_gpu(backend: str) -> None:
    compiled = torch.compile(upsampled, backend=backend, dynamic=True)
    wrong = []
    for height in range(40, 72):
        x = torch.arange(height * 66.0, device="cuda").view(1, 1, height, 66)
        y = torch.empty(1, 1, height, 132, device="cuda") if height > 40 else torch.empty(1, 1, 80, 132, device="cuda")
        if not torch.equal(compiled(x, y), upsampled(x, y)):
            wrong.append(height)
    assert bool(wrong) is (backend == "inductor"), wrong
