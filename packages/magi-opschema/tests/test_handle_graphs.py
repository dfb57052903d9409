# SPDX-License-Identifier: Apache-2.0
"""Object handles in compiled code: one graph for many objects, and what asks for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _handled import Job, Op, Runner, count_graphs, make_op, stale_handle
from magi_opschema import errors, op_def, register_object, release_object
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv


class Layer(nn.Module):
    def __init__(self, run: Op, scale: float, place: str) -> None:
        super().__init__()
        self.run, self.place, self.width = run, place, 3
        self.runner = Runner(scale)
        handle = register_object(self.runner, weak=True)
        self.passed: Any = {"object": self.runner, "handle": handle, "field": None}[place]
        self.job = Job(self.runner)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.job.runner if self.place == "field" else self.passed) + 1


@pytest.mark.parametrize("place", ["object", "handle", "field"])
@pytest.mark.parametrize("dynamic", [None, False, True])
def test_32_layers_share_one_graph(ns: str, x: Tensor, place: str, dynamic: bool | None) -> None:
    run = make_op(ns)
    layers = [Layer(run, float(i), place) for i in range(32)]
    compiled, graphs = count_graphs(lambda layer, x: layer(x), dynamic=dynamic)
    for i, layer in enumerate(layers):
        torch.testing.assert_close(compiled(layer, x), x * i + 1)
    assert len(graphs) == 1


def test_handle_and_object_in_one_place(ns: str, x: Tensor) -> None:
    compiled, graphs = count_graphs(make_op(ns))
    first, second = Runner(2.0), Runner(3.0)
    handles = [register_object(first), register_object(second)]
    for passed, scale in ((handles[0], 2), (first, 2), (handles[1], 3), (second, 3), (int(handles[0]), 2)):
        torch.testing.assert_close(compiled(x, passed), x * scale)
    assert len(graphs) == 3
    for handle in handles:
        release_object(handle)


def test_32_layers_in_one_model(ns: str, x: Tensor) -> None:
    run = make_op(ns)
    stack = nn.Sequential(*(Layer(run, 1.0 + i / 100, "object") for i in range(32)))
    compiled, graphs = count_graphs(stack)
    torch.testing.assert_close(compiled(x), stack(x))
    assert len(graphs) == 1


def test_inductor(ns: str, x: Tensor) -> None:
    run = make_op(ns)
    layers = [Layer(run, float(i), "object") for i in range(10)]
    compiled = torch.compile(lambda layer, x: layer(x), fullgraph=True)
    with torch.compiler.set_stance("default"):
        torch.testing.assert_close(compiled(layers[0], x), layers[0](x))
    with torch.compiler.set_stance("fail_on_recompile"):
        for layer in layers:
            torch.testing.assert_close(compiled(layer, x), layer(x))


def test_an_object_registered_while_traced_needs_its_own_graph(ns: str, x: Tensor) -> None:
    compiled, graphs = count_graphs(make_op(ns))
    for scale in (2.0, 3.0):
        runner = Runner(scale)
        torch.testing.assert_close(compiled(x, runner), x * scale)
        torch.testing.assert_close(compiled(x, runner), x * scale)
    assert len(graphs) == 2


def test_an_object_made_in_compiled_code(ns: str, x: Tensor) -> None:
    run = make_op(ns)
    with pytest.raises(Exception, match="made inside a compiled function has no handle"):
        torch.compile(lambda x: run(x, Runner(2.0)), backend="eager", fullgraph=True)(x)


def test_a_body_that_is_traced_says_so(ns: str, x: Tensor) -> None:
    symbol = ShapeEnv().create_unbacked_symint()
    with pytest.raises(errors.HandleError, match="stands for any Runner while the op is traced"):
        op_def(make_op(ns)).lowered_fn(x, symbol)


def test_stale_in_a_compiled_graph(ns: str, x: Tensor) -> None:
    compiled, _ = count_graphs(make_op(ns))
    with pytest.raises(errors.HandleError, match=f"{ns}::run: 'runner' names no Runner: .* is a stale handle"):
        compiled(x, stale_handle())
