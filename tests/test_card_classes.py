# SPDX-License-Identifier: Apache-2.0
"""Real classes with symbolic sizes for a card that is not there: code is generated, and the passes change no result.

Plain nox runs those that are marked as quick in the table of classes; `nox -s card` runs all, and prints the counts.
"""

from __future__ import annotations

import contextlib
import copy
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from _card import CPU, moved_to_the_card, put_on
from _real_classes import CLASSES, RealClass, train
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import clone_preserve_strides
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only


OF_LARGEST = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Two orders of the same sums may differ by so much of the largest number."""


@dataclass
class Graphs:
    """What was compiled within `for_the_card`.

    Attributes:
        programs: How many were written.
        calls: How often a graph ran in the place of its program.
        differences: Where a graph that was compiled does not do what the captured one does.
    """

    programs: int = 0
    calls: int = 0
    differences: list[str] = field(default_factory=list)


@contextlib.contextmanager
def for_the_card() -> Iterator[Graphs]:
    """Within, what `torch.compile` makes of functions of CPU tensors is written for a card."""
    graphs, captured = Graphs(), list[GraphModule]()

    def load(graph: GraphLowering) -> Any:
        code: Any = graph.codegen()[0]
        assert "async_compile" in getattr(code, "value", code)
        graphs.programs += 1
        compiled: Any = graph.module
        pair = captured[-1], put_on(CPU, _copy(compiled))
        return types.SimpleNamespace(call=lambda arguments: _run(pair, arguments, graphs))

    with moved_to_the_card(load, lambda gm: captured.append(_copy(gm))), sdpa_kernel(SDPBackend.MATH):
        yield graphs


def _copy(gm: GraphModule) -> GraphModule:
    copied = GraphModule(gm, copy.deepcopy(gm.graph))
    copied.recompile()
    return copied


def _run(pair: tuple[GraphModule, GraphModule], arguments: list[Any], graphs: Graphs) -> Any:
    """What the graph returns that was compiled, after a comparison with the one that was captured."""
    captured, compiled = pair
    given = list(arguments)
    arguments.clear()  # as a program does
    copies = tree_map_only(Tensor, clone_preserve_strides, given)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = torch.fx.Interpreter(captured).run(*copies)
        torch.manual_seed(0)
        made = torch.fx.Interpreter(compiled).run(*given)
    graphs.calls += 1
    names = [f"output {place}" for place in range(len(made))] + [f"input {place}" for place in range(len(given))]
    for name, ours, theirs in zip(names, [*made, *given], [*expected, *copies], strict=True):
        if found := _difference(ours, theirs):
            graphs.differences.append(f"graph {graphs.programs}, {name}: {found}")
    return made


def _difference(ours: Any, theirs: Any) -> str:
    """In words; nothing if the two differ by rounding alone."""
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
        return "" if ours == theirs else f"{ours}, captured {theirs}"
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"{tuple(ours.shape)} of {ours.dtype}, captured {tuple(theirs.shape)} of {theirs.dtype}"
    if not ours.is_floating_point() or ours.numel() == 0:
        return "" if torch.equal(ours, theirs) else f"{int((ours != theirs).sum())} elements differ"
    if torch.equal(ours, theirs):
        return ""
    apart = float((ours.double() - theirs.double()).abs().nan_to_num(torch.inf).max())
    largest = float(theirs.double().abs().nan_to_num().max())
    return "" if apart <= OF_LARGEST[ours.dtype] * largest else f"wrong by {apart:.3g}, the largest is {largest:.3g}"


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
    kind, release = CLASSES[name], torch.__version__.rpartition(".")[0]
    if release in kind.stock_is_slow:
        pytest.skip("stock fails: before a backend is asked, Dynamo traces it for more than half an hour")
    try:
        graphs = graphs_of(kind, "magi")
    except Exception as error:  # noqa: BLE001 (whatever it is, it has to be stock's as well)
        message = f"{type(error).__name__}: {error}"[:2000]
        try:
            graphs_of(kind, "inductor")
        except Exception as of_stock:  # noqa: BLE001 (whatever it is, the table has to know it)
            stock = f"stock fails: {type(of_stock).__name__}: {of_stock}"[:500]
            if release in kind.stock_fails:
                pytest.skip(stock)
            pytest.fail(f"{stock}\nclasses.yaml does not say so. magi: {message}")
        pytest.fail(f"magi fails, and stock does not: {message}")
    assert graphs.programs >= (2 if kind.trains else 1)
    assert graphs.calls >= 2
    assert not graphs.differences, "differs: " + "; ".join(graphs.differences[:5])
