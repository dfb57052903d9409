# SPDX-License-Identifier: Apache-2.0
"""The passes that change code generation: when they apply, what they set, and what comes of it."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_passes import HOOK, Foreign, Spy, pretend_cuda, product, trace
from magi_passes import (
    ConvLayoutPass,
    NarrowSizesPass,
    NDTilingWorkaroundPass,
    PassContext,
    PassPipeline,
    _torch_compat,
    collect_records,
)
from magi_passes._torch_compat.narrow import MAX_INT32, bounds_of_sizes, guarded_to_fit, largest_of_index
from torch._dynamo.source import ConstantSource
from torch._inductor.codegen.block_analysis import BlockPatternMatcher
from torch._inductor.codegen.simd import CantSplit, SIMDScheduling
from torch._inductor.sizevars import SizeVarAllocator, join_dimensions
from torch._inductor.virtualized import V
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import (
    FloatTrueDiv,
    FloorDiv,
    FloorToInt,
    Identity,
    Max,
    Min,
    ModularIndexing,
    ToFloat,
    TruncToInt,
    Where,
)


@pytest.mark.parametrize(
    ("conv", "context", "applies", "reason"),
    [
        ({}, {}, True, "expected to take 0.82 of the time"),
        ({"channels": 256, "out": 64}, {}, True, "0.7"),
        ({"channels": 32, "out": 32}, {}, True, "0.78"),
        ({"groups": 2}, {}, False, "expected to take 1.36 of the time"),
        ({"groups": 4, "channels": 96, "out": 96}, {}, False, "expected to take 3.30 of the time"),
        ({"groups": 128}, {}, True, "0.8"),
        ({}, {"is_inference": False}, True, "training"),
        ({"groups": 2}, {"is_inference": False}, False, "training with grouped"),
        ({"channels": 32, "out": 32}, {"is_inference": False}, False, "training with small"),
        ({}, {"user_keys": frozenset({"force_layout_optimization"})}, False, "you set force_layout_optimization"),
        ({}, {"config": {"layout_optimization": False}}, False, "layout_optimization is off"),
        ({"dims": ()}, {}, False, "static: Inductor decides itself"),
        ({"on_cuda": False}, {}, False, "no forward convolution on CUDA"),
    ],
)
def test_the_layout_of_a_convolution(conv: dict[str, Any], context: dict[str, Any], applies: bool, reason: str) -> None:
    graph = _convolution(**conv).graph
    verdict = ConvLayoutPass().is_applicable(graph, PassContext(**context))
    assert verdict.applies is applies
    assert reason in verdict.text


def _convolution(
    channels: int = 128, out: int = 128, groups: int = 1, dims: tuple[int, ...] = (2, 3), on_cuda: bool = True
) -> torch.fx.GraphModule:
    tensors = torch.ones(1, channels, 16, 18), torch.ones(out, channels // groups, 3, 3)
    gm = trace(lambda x, w: torch.conv2d(x, w, groups=groups), tensors, dims)
    return pretend_cuda(gm) if on_cuda else gm


def _graph(*, dynamic: bool = True, conv: bool = True) -> Graph:
    def decode(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.conv2d(x, w).relu() if conv else (x + w.sum()).relu()

    mode: Any = "symbolic" if dynamic else "fake"
    return make_fx(decode, tracing_mode=mode)(torch.ones(1, 3, 8, 9), torch.ones(4, 3, 3, 3)).graph


@pytest.mark.parametrize(
    ("graph", "graph_pass", "context", "reason"),
    [
        ({}, {}, {}, "dynamic, 1 convolutions in"),
        ({"dynamic": False}, {}, {}, "static: no placeholder carries a free symbol"),
        ({"conv": False}, {}, {}, "not convolution-heavy: 0 convolutions in"),
        ({}, {"nodes_per_conv": 2}, {}, "not convolution-heavy: 1 convolutions in"),
        ({}, {}, {"user_keys": frozenset({"triton.prefer_nd_tiling"})}, "you set triton.prefer_nd_tiling=False"),
        ({}, {}, {"torch_version": "2.11.0a0+git1234"}, "torch 2.11.0a0+git1234 is not older than 2.11"),
        ({}, {"max_torch": None}, {"torch_version": "2.13.0"}, "dynamic, 1 convolutions in"),
    ],
)
def test_it_fires_on_dynamic_convolutional_graphs_on_older_torch_only(
    graph: dict[str, bool], graph_pass: dict[str, Any], context: dict[str, Any], reason: str
) -> None:
    told = PassContext(**{"torch_version": "2.10.1+cu128", **context})
    verdict = NDTilingWorkaroundPass(**graph_pass).is_applicable(_graph(**graph), told)
    assert verdict.applies is reason.startswith("dynamic")
    assert reason in verdict.text


def test_end_to_end(inductor: Any) -> None:
    options = PassPipeline([NDTilingWorkaroundPass(max_torch=None)]).inductor_options()
    weight = torch.ones(4, 3, 3, 3)
    with collect_records() as records:
        torch.compile(lambda x: torch.conv2d(x, weight), dynamic=True, options=options)(torch.ones(1, 3, 8, 9))
    (record,) = records
    assert record.config_changes == {
        "triton.prefer_nd_tiling": (False, True),
        "triton.max_tiles": (None, 3),
    }


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


def _size(shape_env: ShapeEnv, hint: int) -> sympy.Symbol:
    source = ConstantSource(f"size{hint}")
    symbol: Any = shape_env.create_symbol(hint, source, DimDynamic.DYNAMIC)
    shape_env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(symbol, sympy.Symbol)
    return symbol


def _sizes_of_a_graph(shape_env: ShapeEnv | None = None) -> AbstractContextManager[None]:
    graph: Any = SimpleNamespace(sizevars=SizeVarAllocator(shape_env or ShapeEnv()))
    handler: AbstractContextManager[None] = V.set_graph_handler(graph)
    return handler


def _fits(shape_env: ShapeEnv, size: Any) -> bool:
    with _sizes_of_a_graph(shape_env):
        return guarded_to_fit(size)


@pytest.mark.parametrize(
    ("sizes", "compilation", "fits"),
    [
        ((1024, 768), "at once", True),
        ((70_000, 80_000), "at once", False),
        ((1024, 768), "a backward that may not guard", False),
        ((1024, 768), "ahead of time", False),
    ],
)
def test_what_fits_is_guarded_once(sizes: tuple[int, int], compilation: str, fits: bool) -> None:
    shape_env = ShapeEnv()
    area = _size(shape_env, sizes[0]) * _size(shape_env, sizes[1])
    if compilation == "a backward that may not guard":
        shape_env.freeze()
    with V.set_aot_compilation(compilation == "ahead of time"):
        assert [_fits(shape_env, area) for _ in range(2)] == [fits, fits]
    assert [str(guard.expr) for guard in shape_env.guards] == [f"{area} <= {MAX_INT32}"] * fits


@given(st.tuples(*[st.integers(1, 300)] * 2), st.integers(-3, 3), st.integers(-9, 9), st.data())
def test_no_place_is_larger_than_its_bound(sizes: tuple[int, int], factor: int, shift: int, data: Any) -> None:
    """A place in an image with *sizes* of its own and of what is enlarged from it."""
    quotient = data.draw(
        st.sampled_from(
            [
                *(FloatTrueDiv(S1, S0), TruncToInt(1.7 * ToFloat(S1)), FloorDiv(S1, 3), S1 - S0),
                *(FloorDiv(X0 - S1, 3), FloorDiv(FloorDiv(X0 - S1, 2) - S1, 3), ModularIndexing(X0, 2, S1)),
                *(Max(X0 - S1, 2), Min(S1, 2 * X0), FloorDiv(X0, S1) - ModularIndexing(X0, 1, S1)),
                *(sympy.Abs(S1 - X0), Where(X0 < S1, X0 - S1, S1), sympy.Abs(S1 - sympy.Abs(X0 - 1))),
            ]
        )
    )
    index = factor * X0 * quotient + shift
    bound = largest_of_index(index, {X0: S0})
    assert not bound.has(sympy.Float)
    at = dict(zip((S0, S1), sizes, strict=True))
    place = data.draw(st.integers(0, sizes[0] - 1))
    assert abs(index.subs({**at, X0: place})) <= bound.subs(at)


def test_a_number_fits() -> None:
    assert _fits(ShapeEnv(), 25)
    # What is left of the index of a size that broadcasts; sympy must leave it alone.
    assert _fits(ShapeEnv(), 25 * Identity(sympy.Integer(2)))


def test_what_no_guard_can_be_written_for_is_not_guessed() -> None:
    """What is computed with floats, and sizes that depend on data."""
    shape_env = ShapeEnv()
    assert not _fits(shape_env, FloorToInt(ToFloat(_size(shape_env, 10)) * 1.5))
    assert not _fits(shape_env, shape_env.create_unbacked_symint().node.expr)
    assert not shape_env.guards


@pytest.mark.parametrize(
    ("dims", "on_gpu", "text"),
    [
        ((0,), False, "no tensor on CUDA"),
        ((), True, "called outside of a compilation"),
        ((0,), True, "called outside of a compilation"),
    ],
)
def test_where_it_does_nothing(dims: Any, on_gpu: bool, text: str) -> None:
    gm = trace(torch.relu, (torch.ones(4, 8),), dims)
    graph = (pretend_cuda(gm) if on_gpu else gm).graph
    reason = NarrowSizesPass().is_applicable(graph, PassContext())
    assert not reason
    assert reason.text == text


Z, Y, X, R = sympy.symbols("z y x r", integer=True, positive=True)
THREE = {"z": Z, "y": Y, "x": X, "r0_": sympy.S.One}
INDEX = sympy.Symbol("index", integer=True, nonnegative=True)


def test_three_dimensions_only_where_nothing_is_reduced() -> None:
    launchable = _torch_compat.grids.launchable_tiling
    assert launchable(THREE, is_reduction=False) is THREE
    assert launchable(THREE, is_reduction=True) == {"y": Z * Y, "x": X, "r0_": sympy.S.One}
    two = {"y": Y, "x": X}
    assert launchable(two, is_reduction=True) is two
    colours = {"z": Z, "y": sympy.Integer(3), "x": X, "r0_": sympy.S.One}
    assert launchable(colours, is_reduction=False) == {"y": 3 * Z, "x": X, "r0_": sympy.S.One}
    channels = {"z": Z, "y": sympy.Integer(64), "x": X, "r0_": sympy.S.One}
    assert launchable(channels, is_reduction=False) is channels
    heads = channels | {"z": sympy.Integer(32)}
    assert launchable(heads, is_reduction=False) == {"y": sympy.Integer(2048), "x": X, "r0_": sympy.S.One}


@pytest.mark.parametrize(
    ("size", "multiple"),
    [
        (40 * X * (1 + FloorDiv(Y - 1, 2)), 8),
        (4 * X + 6 * Y, 2),
        (X * Y, 1),
        (X + 1, 1),
        (48 * X, 16),
        (1024 * X, 16),
        (8 * X / 3, 1),
        (8 * X * Y**-1, 1),
    ],
    ids=str,
)
def test_the_multiple_that_is_known_of_a_size(size: sympy.Expr, multiple: int) -> None:
    assert _torch_compat.grids.known_multiple(size) == multiple


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"x"}, {"x"}], [(64, 8, 8), (1024, 1, 1)]),
        ([{"y"}], [(8, 64, 8), (1, 1024, 1)]),
        ([{"x"}, {"y"}], [(16, 16, 16), (64, 8, 8), (8, 64, 8)]),
        ([{"x"}, set(), {"x"}], [(16, 16, 16), (64, 8, 8), (1024, 1, 1)]),
        # The taps of a convolution, whose weight is transposed, are within each block.
        ([{"z"}, {"y"}], [(16, 16, 16), (8, 64, 8)]),
    ],
)
def test_the_blocks_that_suit_a_kernel(rows: list[set[str]], expected: list[tuple[int, int, int]]) -> None:
    suitable = _torch_compat.grids.suitable_blocks
    sizes = {"z": 16, "y": 512, "x": 512}
    assert suitable(sizes, rows) == expected
    every = suitable(sizes, [*rows, {"x"}, {"z"}, set()])
    assert len(every) == 7
    assert set(every) > set(expected)
    assert suitable(sizes, [set()]) == every
    assert suitable({"z": 2, "y": 4, "x": 512}, [{"x"}])[1] == (256, 1, 1)


def test_the_blocks_that_suit_a_kernel_of_two_dimensions() -> None:
    suitable = functools.partial(_torch_compat.grids.suitable_blocks, {"y": 512, "x": 512})
    assert suitable([{"x"}, {"x"}]) == [(64, 64), (256, 16), (1024, 1)]
    assert suitable([{"y"}]) == [(64, 64), (16, 256), (1, 1024)]
    for length in (64, 1024):
        assert _torch_compat.grids.suitable_blocks({"y": length, "x": 8192}, [{"y"}]) == [(64, 64), (1, 1024)]
    for rows in ([{"x"}, {"y"}], [{"x"}, set()], []):
        assert suitable(rows) == []  # those of torch


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


def _while_compiling(act: Callable[[], object]) -> Any:
    """What *act* returns while a graph is compiled with passes."""
    found: list[object] = []
    options = PassPipeline([Spy()]).inductor_options({HOOK: Foreign(act=lambda: found.append(act()))})
    torch.compile(product, options=options)(torch.ones(3, 3))
    return found[0]


def test_inductor_completes_tilings_exactly(inductor: Any) -> None:
    def complete() -> Any:
        return SIMDScheduling.complete_partial_tiling({"r0_": Y * (X + 1)}, Z, Y * X + Y)["x"]

    assert _while_compiling(complete) == Z
    assert complete() != Z, "outside of a compilation it is torch's own"


def test_a_kernel_that_does_not_divide_is_not_a_type_error(inductor: Any) -> None:
    """torch 2.11 raises this class without the arguments that it takes."""
    _while_compiling(lambda: None)
    with pytest.raises(CantSplit):
        raise CantSplit  # type: ignore[call-arg]


def test_the_matcher_searches_once_and_not_at_all_without_division(
    inductor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    original = BlockPatternMatcher._preprocess

    def counting(index: Any) -> Any:
        asked.append(index)
        return original(index)

    def match(*indices: Any) -> None:
        for index in indices:
            assert BlockPatternMatcher.match_mod_div_block_expr(index, INDEX, sympy.Integer(16), 2) is None

    monkeypatch.setattr(BlockPatternMatcher, "_preprocess", staticmethod(counting))
    no_block = FloorDiv(INDEX, 4) * FloorDiv(INDEX, 2)
    _while_compiling(lambda: match(no_block, no_block, 3 * INDEX))
    assert asked == [no_block]
    BlockPatternMatcher.match_mod_div_block_expr(3 * INDEX, INDEX, sympy.Integer(16), 2)
    assert asked[1:] == [3 * INDEX], "outside of a compilation the matcher is torch's own"


def _index_of(sizes: list[Any], strides: list[Any]) -> Any:
    """The index of an element in a block of *sizes* with *strides*."""
    leading, *others = BlockPatternMatcher.get_slice_numels(sizes)
    positions = [ModularIndexing(INDEX, within, size) for within, size in zip(others, sizes[1:], strict=True)]
    # torch's sympy_dot expands what it adds.
    return sum(map(operator.mul, strides, [FloorDiv(INDEX, leading), *positions]), sympy.S.Zero)


HALF = FloorDiv(Y - 1, 2) + 1
MULTIPLIES_OUT = BlockPatternMatcher._preprocess(X * (Y + 1)) != X * (Y + 1)


@pytest.mark.parametrize(
    "index",
    [
        _index_of([Z, sympy.Integer(4)], [8, 2]),
        _index_of([X, HALF], [Z * Y, -1]),
        _index_of([X, X, 2 * Z], [X * (Y + 1), 7, 1]),
        _index_of([Z, HALF, X + 1], [1, 0, Y]),
        _index_of([Z, HALF, X + 1], [0, 7, 1]),
        FloorDiv(INDEX, X),
        sympy.S.Zero,
        3 * INDEX,
        FloorDiv(INDEX, 4) * FloorDiv(INDEX, 2),
        FloorDiv(INDEX, 4) + ModularIndexing(INDEX, 3, 2),
        FloorDiv(INDEX, 4) + 5,
        FloorDiv(INDEX, Y),
        FloorDiv(INDEX, INDEX + 1),
        ModularIndexing(INDEX + 1, 1, 4),
    ],
    ids=str,
)
def test_blocks_are_those_that_torch_finds(index: Any) -> None:
    """The product of all sizes is a multiple of each of these."""
    numel = 8 * Z * X**2 * HALF * (X + 1)
    with _sizes_of_a_graph():
        theirs = BlockPatternMatcher.match_mod_div_block_expr(index, INDEX, numel, 3)
        ours = _torch_compat.kernels.matched_blocks(index, INDEX, numel, 3)
    if MULTIPLIES_OUT and theirs is None and ours is not None:
        pytest.skip("torch 2.10 multiplies strides out first, and finds no stride that is a sum")
    assert ours == theirs


@pytest.mark.parametrize(
    "sizes", [[X, Y + 1], [X, HALF + 1, Y], [Z, Y * X + 3], [X, (Y + 1) * (HALF + 1), Z + 1], [Y, 5, X + 1]]
)
@pytest.mark.parametrize("scale", [1, 768, Z + 1])
def test_dimensions_whose_sizes_are_sums_are_joined(sizes: list[Any], scale: Any) -> None:
    strides = [scale * sympy.prod(sizes[at + 1 :]) for at in range(len(sizes))]
    index = sympy.Add(*(term.expand() for term in sympy.Add.make_args(_index_of(sizes, strides))))
    assert _torch_compat.kernels.joined_sums(index + 7) == (scale * INDEX).expand() + 7 or scale == Z + 1
    assert (_torch_compat.kernels.joined_sums(index) - scale * INDEX).expand() == 0


@settings(deadline=None)
@given(st.lists(st.sampled_from([X, Y, Z, sympy.Integer(3), sympy.Integer(8)]), min_size=2, max_size=4), st.data())
def test_what_torch_joins_is_joined(sizes: list[Any], data: Any) -> None:
    strides = [
        data.draw(st.sampled_from([sympy.prod(sizes[at + 1 :]), 5 * sympy.prod(sizes[at + 1 :]), X, sympy.S.One]))
        for at in range(len(sizes))
    ]
    index = _index_of(sizes, strides) + data.draw(st.sampled_from([0, 7, Y, ModularIndexing(INDEX, 3, 2)]))
    assert _torch_compat.kernels.joined_sums(index) == join_dimensions(index)


@settings(deadline=None)
@given(st.lists(st.sampled_from([X, Y + 1, HALF + 1, sympy.Integer(3), X * Y + 2]), min_size=2, max_size=3), st.data())
def test_what_is_joined_is_the_same_number(sizes: list[Any], data: Any) -> None:
    strides = [
        data.draw(st.sampled_from([sympy.prod(sizes[at + 1 :]), sizes[-1], X + 1, sympy.S.One]))
        for at in range(len(sizes))
    ]
    index = _index_of(sizes, strides).expand()
    joined = _torch_compat.kernels.joined_sums(index)
    for at in range(0, 90, 7):
        numbers = {INDEX: at, X: 2 + at % 5, Y: 3 + at % 4, Z: 4}
        assert joined.subs(numbers) == index.subs(numbers)


@pytest.mark.parametrize(
    ("rows", "length"),
    [
        (S0 + S1, sympy.Integer(3072)),
        (24 * S0 + 24 * S1, sympy.Integer(128)),
        (sympy.Integer(3), 8 * S0 + 8),
        (4 * S0 + 4, S0 + 1),
        (S0 * S1 + S0, sympy.Integer(768)),
        (S0 * S1 + S0, 2 * S1 + 2),
    ],
)
def test_rows_times_their_length_are_written_as_the_number_of_elements(rows: Any, length: Any) -> None:
    of_rows, of_length = _torch_compat.kernels.as_products([rows, length])
    (whole, one) = _torch_compat.kernels.as_products([(rows * length).expand(), sympy.S.One])
    assert (of_rows * of_length, one) == (whole, 1)


@given(
    terms=st.lists(st.tuples(st.integers(-1, 9), st.integers(1, 4)), min_size=1, max_size=3),
    rows=st.sampled_from([0, 2, 4, 8, 24]),
    number=st.integers(0, 3),
    divisor=st.sampled_from([2, 3, 4, 8, 16]),
)
def test_remainders_are_left_out_where_they_do_not_matter(
    terms: list[tuple[int, int]], rows: int, number: int, divisor: int
) -> None:
    places = sympy.symbols(f"p:{len(terms)}", integer=True, nonnegative=True)
    remainders = [ModularIndexing(place, 1, modulus) for place, (_, modulus) in zip(places, terms, strict=True)]
    base = sympy.Add(rows * X, number, *(factor * each for (factor, _), each in zip(terms, remainders, strict=True)))
    without = _torch_compat.kernels.without_remainders(base, sympy.Integer(divisor))
    for values in itertools.product(range(3), *(range(modulus) for _, modulus in terms)):
        at = dict(zip((X, *places), values, strict=True))
        assert without.subs(at) // divisor == base.subs(at) // divisor


def test_which_remainders_are_left_out() -> None:
    without = _torch_compat.kernels.without_remainders
    h, w = (ModularIndexing(place, 1, 2) for place in (X, Y))
    assert without(2 * h + w, sympy.Integer(8)) == 0
    assert without(8 * Z + 2 * h + w, sympy.Integer(8)) == 8 * Z
    assert without(4 * Z + 2 * h + w, sympy.Integer(8)) == 4 * Z
    for base in (2 * Z + 2 * h + w, 8 * Z + 4 * h + 4 * w, 8 * Z - h, ModularIndexing(X, 1, Y), Z + h):
        assert without(base, sympy.Integer(8)) == base


def test_the_leading_size_of_a_block_is_no_quotient() -> None:
    """torch writes it as one, and a tiling by it fails: "Invalid ranges [0:-1]"."""
    sizes = [Z, HALF + 1, X + 1]
    with _sizes_of_a_graph():
        numel = sympy.prod(sizes).expand()
        found = _torch_compat.kernels.matched_blocks(_index_of(sizes, [1, 0, Y]), INDEX, numel, 3)
    assert found is not None
    assert found[0] == sizes


def test_many_dimensions_are_matched_at_once(inductor: Any) -> None:
    """torch searches for minutes."""
    sizes = [*sympy.symbols("a b c d e", integer=True, positive=True), Z, Y, X]
    strides = [Y * (X + 1), Z * (Y + 1), X * (Z + 1), X, Y, Z, 2, 1]
    if MULTIPLIES_OUT:
        strides[:3] = [Y * X, Z * Y, X * Z]

    def match() -> Any:
        with _sizes_of_a_graph():
            index, numel = _index_of(sizes, strides), sympy.prod(sizes)
            return BlockPatternMatcher.match_mod_div_block_expr(index, INDEX, numel, 8)

    assert _while_compiling(match)[:2] == (sizes, strides)


def test_sympy_remembers_more_while_a_graph_is_compiled(inductor: Any) -> None:
    def made_anew() -> int:
        """How many of 2,000 sums are made a second time."""
        sums = [[INDEX + number for number in range(10_000, 12_000)] for _ in range(2)]
        return sum(first is not second for first, second in zip(*sums, strict=True))

    assert made_anew() > 0
    assert _while_compiling(made_anew) == 0
    assert made_anew() > 0


def test_a_size_is_written_as_text_once(inductor: Any) -> None:
    shape_env = ShapeEnv()
    size = 2 * _size(shape_env, 4) + _size(shape_env, 7)

    def texts() -> tuple[str, str]:
        first, second = (SymNode(size, shape_env, int, None) for _ in range(2))
        return str(first), str(second)

    first, second = _while_compiling(texts)
    assert first is second
    first, second = texts()
    assert first is not second
