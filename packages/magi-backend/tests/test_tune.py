# SPDX-License-Identifier: Apache-2.0
"""``magi.tune`` measures what a convolutional graph could be compiled as, remembers it, and obeys the switches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from magi_backend import explain
from magi_backend._records.collect import Collector, collecting
from magi_backend.records import Compilation
from torch import nn


if TYPE_CHECKING:
    from pathlib import Path


def tuned(**options: Any) -> str:
    """Why the chooser did what it did, for a small convolution that gave the right result."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv3d(4, 4, 3), nn.SiLU()).eval(), torch.randn(1, 4, 6, 9, 9)
    torch.compiler.reset()
    # A graph that Inductor's own cache has is not looked at by any pass.
    options = {"magi.tune": True, "fx_graph_cache": False, **options}
    with torch.no_grad(), collecting(Collector()) as collector:
        actual = torch.compile(model, backend="magi", dynamic=True, options=options)(x)
        torch.testing.assert_close(actual, model(x))
    (reason,) = reasons(collector.compilations())
    return reason


def reasons(compilations: tuple[Compilation, ...]) -> list[str]:
    passes = [p for c in compilations for graph in c.graphs for p in graph.passes if p.name == "ConvChooser"]
    return [outcome.reason for outcome in passes]


@pytest.mark.slow
def test_candidates_are_measured_once_and_a_pass_that_is_off_is_none_of_them(fresh_caches: Path) -> None:
    first, second = tuned(), tuned()
    without = tuned(**{"magi.pass_config.enable_conv_layout": False})

    assert first.startswith("tuned: ")
    assert "stock" in first
    assert "ForceChannelsLast" in first
    assert second == first, "the times would differ if they were measured again"
    assert "stock" in without
    assert "ForceChannelsLast" not in without


def test_without_convolutions_nothing_is_measured() -> None:
    report = explain(lambda x: x.sin(), {"magi.tune": True}, dynamic=True)(torch.ones(3))

    (reason,) = reasons(report.compilations)
    assert reason == "0% of the arithmetic is in convolutions"


@pytest.mark.parametrize("tune", [False, True])
def test_the_workaround_is_used_only_without_tuning(tune: bool) -> None:
    report = explain(lambda x: x.cos(), {"magi.tune": tune}, dynamic=True)(torch.ones(3))

    names = {p.name for c in report.compilations for graph in c.graphs for p in graph.passes}
    assert ("NDTilingWorkaroundPass" in names) is not tune
