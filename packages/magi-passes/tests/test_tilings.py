# SPDX-License-Identifier: Apache-2.0
"""Tilings fit the grid, and the question that makes ND tiling slow to compile is asked once."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import sympy
import torch
from magi_passes import MagiInductorPass, PassPipeline, _torch_compat
from torch._dynamo.source import ConstantSource
from torch._inductor.codegen.block_analysis import BlockPatternMatcher
from torch._inductor.codegen.simd import CantSplit, SIMDScheduling
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.functions import FloorDiv


if TYPE_CHECKING:
    from torch.fx import Graph

Z, Y, X, R = sympy.symbols("z y x r", integer=True, positive=True)
THREE = {"z": Z, "y": Y, "x": X, "r0_": sympy.S.One}
INDEX, SIZE = sympy.symbols("index size", integer=True, nonnegative=True)


@pytest.mark.parametrize(
    ("within", "reduction", "folded"),
    [({Z, Y}, False, False), ({Z}, False, True), ({Y}, False, True), (set(), False, True), ({Z, Y}, True, True)],
)
def test_three_dimensions_only_where_they_fit_and_nothing_is_reduced(
    monkeypatch: pytest.MonkeyPatch, within: set[Any], reduction: bool, folded: bool
) -> None:
    monkeypatch.setattr(_torch_compat.kernels, "_within_grid", lambda size: size in within)
    tiling = _torch_compat.kernels.launchable_tiling(THREE, is_reduction=reduction)
    assert tiling == ({"y": Z * Y, "x": X, "r0_": sympy.S.One} if folded else THREE)


def test_two_dimensions_have_an_overflow_path_and_stay() -> None:
    two = {"y": Y, "x": X}
    assert _torch_compat.kernels.launchable_tiling(two, is_reduction=False) is two


def test_a_quotient_of_sizes_is_cancelled() -> None:
    """The mean over images, which torch 2.11 could not write: "exponent must be non-negative, got -1"."""
    height, width = FloorDiv(Y - 1, 32), FloorDiv(X - 1, 32)
    total = (2048 * Z * (height + 1) * (width + 1)).expand()
    tiling = {"x": total / (height * width + height + width + 1), "r0_": height + 1, "r1_": width + 1}
    exact = _torch_compat.kernels.exact_tiling(tiling, untiled=R)
    assert exact == {"x": 2048 * Z, "r0_": height + 1, "r1_": width + 1}


def test_a_size_that_does_not_divide_is_that_of_the_untiled_side() -> None:
    tiling = {"x": X * Y / FloorDiv(Y + 1, 2), "r0_": FloorDiv(Y + 1, 2)}
    assert _torch_compat.kernels.exact_tiling(tiling, untiled=X) == {"x": X, "r0_": FloorDiv(Y + 1, 2)}


@dataclass(frozen=True)
class Tiles(MagiInductorPass):
    """Asks for the untiled side of a mean inside of a compilation, and notes the answer."""

    found: ClassVar[list[Any]] = []

    def __call__(self, graph: Graph) -> None:
        self.found.append(SIMDScheduling.complete_partial_tiling({"r0_": Y * (X + 1)}, Z, Y * X + Y)["x"])


def test_inductor_completes_tilings_exactly(inductor: Any) -> None:
    torch.compile(lambda x: x @ x, options=PassPipeline([Tiles()]).inductor_options())(torch.ones(3, 3))
    assert Tiles.found == [Z]
    stock = SIMDScheduling.complete_partial_tiling({"r0_": Y * (X + 1)}, Z, Y * X + Y)["x"]
    assert stock != Z, "outside of a compilation it is torch's own"


def test_a_kernel_that_does_not_divide_is_not_a_type_error(inductor: Any) -> None:
    """torch 2.11 raises this class without the arguments that it takes."""
    torch.compile(lambda x: x @ x, options=PassPipeline([Tiles()]).inductor_options())(torch.ones(3, 3))
    with pytest.raises(CantSplit):
        raise CantSplit  # type: ignore[call-arg]


@dataclass(frozen=True)
class Matches(MagiInductorPass):
    """Asks the matcher inside of a compilation, where its answers are remembered."""

    def __call__(self, graph: Graph) -> None:
        no_block = FloorDiv(INDEX, 4) * FloorDiv(INDEX, 2)
        for index in (no_block, no_block, 3 * INDEX):
            assert BlockPatternMatcher.match_mod_div_block_expr(index, INDEX, sympy.Integer(16), 2) is None


def test_the_matcher_searches_once_and_not_at_all_without_division(
    inductor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    original = BlockPatternMatcher._preprocess

    def counting(index: Any) -> Any:
        asked.append(index)
        return original(index)

    monkeypatch.setattr(BlockPatternMatcher, "_preprocess", staticmethod(counting))
    torch.compile(lambda x: x @ x, options=PassPipeline([Matches()]).inductor_options())(torch.ones(3, 3))
    assert asked == [FloorDiv(INDEX, 4) * FloorDiv(INDEX, 2)]
    BlockPatternMatcher.match_mod_div_block_expr(3 * INDEX, INDEX, sympy.Integer(16), 2)
    assert asked[1:] == [3 * INDEX], "outside of a compilation the matcher is torch's own"


@pytest.mark.parametrize(("size", "fits"), [(100, True), (70_000, False)])
def test_a_size_within_the_grid_now_is_guarded(size: int, fits: bool) -> None:
    shape_env = ShapeEnv()
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    mode, source = FakeTensorMode(shape_env=shape_env), ConstantSource("x")
    x: Any = mode.from_tensor(torch.empty(size), symbolic_context=context, source=source)
    graph: Any = SimpleNamespace(sizevars=SizeVarAllocator(shape_env))

    with V.set_graph_handler(graph):
        assert _torch_compat.kernels._within_grid(x.shape[0].node.expr) is fits

    assert bool(shape_env.guards) is fits
