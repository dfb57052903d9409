# SPDX-License-Identifier: Apache-2.0
"""Real classes with symbolic sizes for a card that is not there: code is generated, and the passes change no result.

Plain nox runs those that are marked as quick in the table of classes; `nox -s card` runs all, and prints the counts.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from _card_graphs import Graphs, for_the_card
from _real_classes import CLASSES, RealClass, train


def graphs_of(kind: RealClass, backend: str) -> Graphs:
    """The graphs of a class, compiled by *backend* and called at its two sizes; with a training step if it has one."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = kind.build()
    with warnings.catch_warnings(), for_the_card() as graphs, torch.set_grad_enabled(kind.trains):
        # transformers, diffusers and timm do what Dynamo warns of.
        warnings.simplefilter("ignore")
        compiled = torch.compile(train(model) if kind.trains else model, backend=backend, dynamic=True)
        for size in kind.small:
            out = compiled(**kind.inputs(size))
            if kind.trains:
                out.square().mean().backward()
    return graphs


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("unmeasured_guards")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if kind.quick else [pytest.mark.slow]) for name, kind in CLASSES.items()]
)
def test_code_is_generated_where_stock_generates_it_and_the_passes_change_no_result(name: str) -> None:
    kind = CLASSES[name]
    try:
        graphs = graphs_of(kind, "magi")
    except Exception as error:  # noqa: BLE001 (whatever it is, it has to be stock's as well)
        message = f"{type(error).__name__}: {error}"[:2000]
        try:
            graphs_of(kind, "inductor")
        except Exception as of_stock:  # noqa: BLE001 (the class is not for this release of torch)
            pytest.skip(f"stock fails: {type(of_stock).__name__}: {of_stock}"[:500])
        pytest.fail(f"magi fails, and stock does not: {message}")
    assert graphs.programs >= (2 if kind.trains else 1)
    assert graphs.calls >= 2
    assert not graphs.differences, "differs: " + "; ".join(graphs.differences[:5])
