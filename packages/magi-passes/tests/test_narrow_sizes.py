# SPDX-License-Identifier: Apache-2.0
"""Which sizes fit into 32 bits, and by which guard; the code that comes of it is in tests/test_gpu_code.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from magi_passes import NarrowSizesPass, PassContext
from magi_passes._torch_compat.kernels import MAX_INT32, bounds_of_sizes, guarded_within
from torch._dynamo.source import ConstantSource
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import FloorDiv, ModularIndexing


S0, S1, PS0 = sympy.symbols("s0 s1 ps0", integer=True, positive=True)
X0, X1 = sympy.symbols("x0 x1", integer=True, nonnegative=True)


@pytest.mark.parametrize(
    ("index", "bounds"),
    [
        (X0 + 3 * X1, set()),
        (X0 + 4 * S0 * S1 * X1 - S1, {4 * S0 * S1, S1}),
        (S0 * S1 - 2 * S0, {S0 * S1 + 2 * S0}),
        (FloorDiv(X0, S0 * S1) + ModularIndexing(X0, PS0, S1), {S0 * S1, PS0, S1}),
        (FloorDiv(S0 * S1, 7) * X0, {FloorDiv(S0 * S1, 7), S0 * S1}),
        ((S0 + 1) * (S1 + 2) * X0, {(S0 + 1) * (S1 + 2)}),
    ],
)
def test_the_parts_of_an_index_that_are_made_of_sizes(index: Any, bounds: set[Any]) -> None:
    assert {sympy.expand(bound) for bound in bounds_of_sizes(index)} == {sympy.expand(bound) for bound in bounds}


@pytest.fixture
def shape_env() -> ShapeEnv:
    return ShapeEnv()


def _size(shape_env: ShapeEnv, hint: int) -> sympy.Symbol:
    source = ConstantSource(f"size{hint}")
    symbol: Any = shape_env.create_symbol(hint, source, DimDynamic.DYNAMIC)
    shape_env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(symbol, sympy.Symbol)
    return symbol


def _is_within(shape_env: ShapeEnv, size: Any) -> bool:
    graph: Any = SimpleNamespace(sizevars=SizeVarAllocator(shape_env))
    with V.set_graph_handler(graph):
        return guarded_within(size, MAX_INT32)


def test_what_fits_is_guarded_once(shape_env: ShapeEnv) -> None:
    area = _size(shape_env, 1024) * _size(shape_env, 768)
    assert _is_within(shape_env, area)
    assert _is_within(shape_env, area)
    assert [str(guard.expr) for guard in shape_env.guards] == [f"{area} <= {MAX_INT32}"]


def test_what_does_not_fit_is_not(shape_env: ShapeEnv) -> None:
    assert not _is_within(shape_env, _size(shape_env, 70_000) * _size(shape_env, 80_000))
    assert not shape_env.guards


def test_a_backward_that_may_not_guard_takes_what_is_known(shape_env: ShapeEnv) -> None:
    area = _size(shape_env, 1024) * _size(shape_env, 768)
    shape_env.freeze()
    assert not _is_within(shape_env, area)
    assert not shape_env.guards


def test_a_package_ahead_of_time_has_no_guards(shape_env: ShapeEnv) -> None:
    area = _size(shape_env, 1024) * _size(shape_env, 768)
    with V.set_aot_compilation(True):
        assert not _is_within(shape_env, area)
    assert not shape_env.guards


def test_sizes_that_depend_on_data_are_not_guessed(shape_env: ShapeEnv) -> None:
    unbacked = shape_env.create_unbacked_symint()
    assert not _is_within(shape_env, unbacked.node.expr)


@pytest.mark.parametrize(
    ("dims", "on_gpu", "text"),
    [
        ((), True, "no tensor of symbolic size on CUDA"),
        ((0,), False, "no tensor of symbolic size on CUDA"),
        ((0,), True, "called outside of a compilation"),
    ],
)
def test_where_it_does_nothing(dims: Any, on_gpu: bool, text: str, trace: Any, pretend_cuda: Any) -> None:
    gm = trace(torch.relu, (torch.ones(4, 8),), dims)
    graph = (pretend_cuda(gm) if on_gpu else gm).graph
    reason = NarrowSizesPass().is_applicable(graph, PassContext())
    assert not reason
    assert reason.text == text
