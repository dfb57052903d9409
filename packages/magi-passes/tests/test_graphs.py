# SPDX-License-Identifier: Apache-2.0
"""What a graph is made of: is it dynamic, does it convolve, and how much of its work is in convolutions.

Masks that are known from positions leave attention; the others stay, and every number that is known is right.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from magi_passes import (
    AttentionMaskPass,
    PassPipeline,
    _torch_compat,
    collect_records,
    conv_share,
    is_conv_heavy,
    is_convolution,
    is_dynamic,
)
from magi_passes._graph.nodes import ConvShare, hinted
from magi_passes._graph.positions import Affine, Formula, Formulas
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils.flop_counter import FlopCounterMode


IMAGE, WEIGHT = torch.ones(2, 8, 10, 12), torch.ones(8, 8, 3, 3)
LINE, VOLUME = torch.ones(2, 8, 12), torch.ones(1, 8, 3, 6, 6)
SQUARE = torch.ones(32, 32)
TAIL = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
aten = torch.ops.aten


def _backward(mask: list[bool]) -> Any:
    return lambda x, w: aten.convolution_backward.default(x, x, w, [8], *TAIL, mask)


# Each function of an image and a weight is convolutions and nothing else.
CONVOLUTIONS: dict[str, Any] = {
    "conv1d": (torch.conv1d, LINE, torch.ones(8, 8, 3)),
    "conv2d": (torch.conv2d, IMAGE, WEIGHT),
    "conv3d": (torch.conv3d, VOLUME, torch.ones(4, 8, 3, 3, 3)),
    "grouped": (lambda x, w: torch.conv2d(x, w, groups=2), IMAGE, torch.ones(8, 4, 3, 3)),
    "depthwise": (lambda x, w: torch.conv2d(x, w, groups=8), IMAGE, torch.ones(8, 1, 3, 3)),
    "transposed 1d": (torch.conv_transpose1d, LINE, torch.ones(8, 8, 3)),
    "transposed 2d": (torch.conv_transpose2d, IMAGE, WEIGHT),
    "transposed 3d": (torch.conv_transpose3d, VOLUME, torch.ones(8, 4, 3, 3, 3)),
    "same padding": (lambda x, w: torch.conv2d(x, w, padding="same"), IMAGE, WEIGHT),
    "not decomposed": (
        lambda x, w: aten._convolution.default(x, w, None, *TAIL, False, False, True, True),
        IMAGE,
        WEIGHT,
    ),
    "backward": (_backward([True, True, True]), IMAGE, WEIGHT),
    "gradient of the weight only": (_backward([False, True, False]), IMAGE, WEIGHT),
    "gradient of the image only": (_backward([True, False, False]), IMAGE, WEIGHT),
}


@pytest.mark.parametrize("form", CONVOLUTIONS)
def test_a_graph_of_convolutions_is_all_convolutions(form: str) -> None:
    convolve, x, weight = CONVOLUTIONS[form]
    with FlopCounterMode(display=False) as counter:
        convolve(x, weight)
    counted = counter.get_total_flops()
    alone = make_fx(convolve, tracing_mode="fake")(x, weight).graph
    assert sum(map(is_convolution, alone.nodes)) == 1
    assert is_conv_heavy(alone)
    assert conv_share(alone).flops == 1
    assert conv_share(alone).bytes > 0.5
    # torch's own count of the convolution, and a product of two matrices.
    both = make_fx(lambda x, w, a: (convolve(x, w), a @ a), tracing_mode="fake")(x, weight, SQUARE).graph
    assert conv_share(both).flops == pytest.approx(counted / (counted + 2 * 32**3))


@pytest.mark.parametrize(
    "name",
    [
        *("aten::convolution_backward", "aten::conv_tbc", "aten::cudnn_convolution", "aten::cudnn_convolution_relu"),
        *("aten::miopen_convolution", "aten::mkldnn_convolution", "aten::slow_conv3d", "aten::thnn_conv2d"),
        *("aten::_conv_depthwise2d", "aten::conv_depthwise3d", "aten::slow_conv_dilated2d"),
        *("mkldnn::_convolution_pointwise", "mkldnn::_convolution_pointwise_", "onednn::qconv2d_pointwise"),
        *("mkldnn::_convolution_transpose_pointwise", "quantized::conv2d", "quantized::conv3d_relu"),
    ],
)
def test_every_library_s_convolution_counts(name: str) -> None:
    namespace, _, op = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    if packet is None:
        pytest.skip(f"this build of torch has no {name}")
    graph = torch.fx.Graph()
    for overload in packet.overloads():
        assert is_convolution(graph.call_function(getattr(packet, overload)))


@pytest.mark.parametrize(
    "target",
    [torch.ops.prims.convert_element_type.default, aten.add.Tensor, aten.mm.default, aten._to_copy.default, len],
    ids=str,
)
def test_other_ops_do_not_count_as_convolutions(target: Any) -> None:
    assert not is_convolution(torch.fx.Graph().call_function(target))


def test_no_convolution_is_never_heavy_and_no_share() -> None:
    assert conv_share(make_fx(lambda x: x.relu())(IMAGE).graph) == ConvShare(0.0, 0.0)
    assert not is_conv_heavy(make_fx(lambda x: x.relu())(IMAGE).graph)
    assert not is_conv_heavy(torch.fx.Graph())


@pytest.mark.parametrize(("nodes", "heavy"), [(299, True), (300, False), (301, False)])
def test_the_threshold_is_inductors(nodes: int, heavy: bool) -> None:
    graph = torch.fx.Graph()
    x = graph.call_function(aten.convolution.default)
    for _ in range(nodes - 1):
        x = graph.call_function(aten.relu.default, (x,))
    assert is_conv_heavy(graph) is heavy


def test_a_symbol_anywhere_in_a_placeholder_is_dynamic() -> None:
    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        return x.expand(n, -1)

    traced = make_fx(f, tracing_mode="symbolic")(torch.ones(1, 4), 5)
    assert is_dynamic(traced.graph)
    for node in traced.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["val"], torch.Tensor):
            node.meta["val"] = torch.ones(1, 4)
    assert is_dynamic(traced.graph)
    for node in traced.graph.find_nodes(op="placeholder"):
        node.meta.pop("val")
    assert not is_dynamic(traced.graph)
    assert not is_dynamic(make_fx(lambda x: x + 1, tracing_mode="fake")(IMAGE).graph)


def _attention(q: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, q, q)


PRODUCTS: dict[str, tuple[Any, torch.Tensor]] = {
    "mm": (lambda a: a @ a, SQUARE),
    "addmm": (lambda a: torch.addmm(a, a, a), SQUARE),
    "bmm": (lambda a: a @ a, torch.ones(3, 8, 8)),
    "baddbmm": (lambda a: torch.baddbmm(a, a, a), torch.ones(3, 8, 8)),
    "matrix and vector": (lambda a: a @ a[0], SQUARE),
    "dot": (lambda a: torch.dot(a[0], a[1]), SQUARE),
    "integers": (lambda a: torch._int_mm(a, a), torch.ones(32, 32, dtype=torch.int8)),
    "linear": (lambda a: aten.linear.default(a, a), SQUARE),
    "mkldnn": (lambda a: torch.ops.mkldnn._linear_pointwise.default(a, a, None, "none", [], ""), SQUARE),
    "attention": (_attention, torch.ones(1, 2, 16, 8)),
    "attention with grouped heads": (
        lambda q: aten._scaled_dot_product_flash_attention_for_cpu.default(q, q[:, :1], q[:, :1])[0],
        torch.ones(1, 2, 16, 8),
    ),
}


@pytest.mark.parametrize("form", PRODUCTS)
def test_other_arithmetic_is_weighed_against_it(form: str) -> None:
    product, operand = PRODUCTS[form]
    if form == "mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no mkldnn")

    def model(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor) -> Any:
        return torch.conv2d(x, w), product(a)

    assert 0 < conv_share(make_fx(model, tracing_mode="fake")(IMAGE, WEIGHT, operand).graph).flops < 1
    assert conv_share(make_fx(product, tracing_mode="fake")(operand).graph).flops == 0


def test_the_convolutions_of_mkldnn_count() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no mkldnn")
    convolve = torch.ops.mkldnn._convolution_pointwise.default
    graph = make_fx(lambda x, w: convolve(x, w, None, [1, 1], [1, 1], [1, 1], 1, "none", [], ""), tracing_mode="fake")
    assert conv_share(graph(IMAGE, WEIGHT).graph) == conv_share(
        make_fx(lambda x, w: torch.conv2d(x, w, padding=1), tracing_mode="fake")(IMAGE, WEIGHT).graph
    )


@pytest.mark.parametrize(("depth", "fewer_than_all"), [(1, 14), (2, 24)])
def test_the_bodies_of_higher_order_ops_count(depth: int, fewer_than_all: int) -> None:
    def model(x: torch.Tensor, w: torch.Tensor) -> Any:
        convolve = lambda x, w: torch.conv2d(x, w, padding=1)  # noqa: E731
        leave = lambda x, w: x.clone()  # noqa: E731
        inside = convolve if depth == 1 else lambda x, w: torch.cond(x.max() > 0, convolve, leave, (x, w))
        return torch.cond(x.sum() > 0, inside, leave, (x, w))

    graph = make_fx(model, tracing_mode="fake")(IMAGE, WEIGHT).graph
    assert conv_share(graph).flops == 1
    assert conv_share(graph).bytes > 0.2
    assert not is_conv_heavy(graph, nodes_per_conv=fewer_than_all)
    assert is_conv_heavy(graph, nodes_per_conv=2 * fewer_than_all)


def test_sizes_that_depend_on_data_do_not_stop_it() -> None:
    def model(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor) -> Any:
        rows = a[a[:, 0] > 0]
        return torch.conv2d(x, w), rows @ a, rows @ rows.T

    graph = make_fx(model, tracing_mode="symbolic")(IMAGE, WEIGHT, SQUARE).graph
    assert 0 < conv_share(graph).flops < 1


X = torch.randn(2, 3, 5, 8)
NEVER = float("-inf")


def _of_packed_sequences(x: Tensor) -> Tensor:
    """As transformers makes the mask of a decoder without a padding mask."""
    positions = torch.arange(x.shape[-2])[None].expand(x.shape[0], -1)
    sequence = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch, query = torch.arange(x.shape[0])[:, None, None, None], torch.arange(x.shape[-2])[None, None, :, None]
    key = torch.arange(x.shape[-2])[None, None, None, :]
    mask = query.new_ones((), dtype=torch.bool) & (sequence[batch, query] == sequence[batch, key])
    return (mask & (positions[batch, key] <= positions[batch, query])).expand(x.shape[0], -1, -1, -1)


def _of_an_image(x: Tensor) -> Tensor:
    """As transformers makes the mask of an image that fills its batch."""
    pixels = torch.ones(1, x.shape[0], 4 * x.shape[-2], 4)
    small = torch.nn.functional.interpolate(pixels, size=(x.shape[-2], 1)).to(torch.bool)[0].flatten(1)
    return small[:, None, None, :].expand(x.shape[0], 1, x.shape[-2], x.shape[-2])


def _mask(text: str) -> Callable[[Tensor], Tensor]:
    """The function of `x` that makes `mask` by *text*, of its *n* positions: `places`, `query` and `key`."""
    scope: dict[str, Any] = {"torch": torch, "NEVER": NEVER}
    start = "n = x.shape[-2]; places = torch.arange(n); query, key = places[:, None], places[None, :]"
    exec(f"def make(x):\n    {start}\n    {text}\n    return mask\n", scope)
    found: Callable[[Tensor], Tensor] = scope["make"]
    return found


# How many hide nothing, and how many what comes later.
MASKS: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "expanded along keys": (_mask("mask = (places + 0 >= 0)[None, None, :, None].expand(x.shape[0], -1, -1, n)"), 1, 0),
    "of an image": (_of_an_image, 1, 0),
    "last of a cache": (_mask("mask = places[None, :] <= torch.arange(1)[:, None] + n - 1"), 1, 0),
    "causal": (_mask("mask = key <= query"), 0, 1),
    "of packed sequences": (_of_packed_sequences, 0, 1),
    "additive": (_mask("mask = torch.full((n, n), NEVER).triu(1)"), 0, 1),
    "filled": (_mask("mask = torch.zeros(n, n).masked_fill(key > query, NEVER)[None, None]"), 0, 1),
    "like data": (_mask("mask = torch.ones_like(x[0, 0] @ x[0, 0].mT, dtype=torch.bool).tril()"), 0, 1),
    "filled like data": (_mask("mask = x.new_full((n, n), NEVER).triu(1)[None]"), 0, 1),
    "filled by data": (_mask("mask = x.new_full((n, n), 0.0) + x.new_zeros(n, n).fill_(x.sum())"), 0, 0),
    "made by vmap": (
        _mask("mask = torch.vmap(lambda place: torch.ones_like(place) * (places <= place))(places) > 0"),
        0,
        0,
    ),
    "window": (_mask("mask = (key <= query) & (key > query - 3)"), 0, 0),
    "strictly earlier": (_mask("mask = torch.ones(n, n, dtype=torch.bool).tril(1)"), 0, 0),
    "written": (_mask("mask = torch.ones(n, n, dtype=torch.bool); mask[:, 1] = False"), 0, 0),
    "written in a view": (_mask("places[:].sub_(2); mask = (places >= 0).expand(n, n)"), 0, 0),
    "of data": (_mask("mask = (key <= query) & (x[0, 0, :, 0] < 10)"), 0, 0),
    # Its size depends on data for torch, even if the data are known.
    "of indices": (_mask("mask = (torch.ones(n, n, dtype=torch.bool).nonzero().sum() >= 0).expand(n, n)"), 0, 0),
    "finite": (_mask("mask = torch.full((n, n), -3.0).triu(1)"), 0, 0),
}


def _attend(mask: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def attend(x: Tensor) -> Tensor:
        made = mask(x)
        return attention(x[:, :, -made.shape[-2] :], x, x, made, 0.0)

    return attend


def _reason(mask: Callable[[Tensor], Tensor], *, dynamic: bool) -> str:
    torch._dynamo.reset()
    with collect_records() as records, torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(
            _attend(mask),
            dynamic=dynamic,
            fullgraph=True,
            options=PassPipeline([AttentionMaskPass()]).inductor_options(),
        )
        torch.testing.assert_close(compiled(X), _attend(mask)(X))
    return records[0].reason


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks_that_are_known_leave(name: str, *, dynamic: bool) -> None:
    mask, nothing, later = MASKS[name]
    expected = f"of 1 masks of attention, {nothing} hide nothing and {later} what comes later"
    assert _reason(mask, dynamic=dynamic) == expected


def test_it_does_not_apply_where_no_attention_has_a_mask() -> None:
    torch._dynamo.reset()
    with collect_records() as records:
        options = PassPipeline([AttentionMaskPass()]).inductor_options()
        torch.compile(lambda x: attention(x, x, x, is_causal=True), options=options)(X)
    assert [record.reason for record in records] == ["no mask of attention"]


def test_a_mask_of_more_sequences_than_the_queries_stays() -> None:
    torch._dynamo.reset()

    def attend(x: Tensor, sequences: int) -> Tensor:
        return attention(x, x, x, torch.ones(sequences, 1, x.shape[-2], x.shape[-2], dtype=torch.bool))

    options = PassPipeline([AttentionMaskPass()]).inductor_options()
    out = torch.compile(attend, dynamic=True, fullgraph=True, options=options)(X[:1], 3)
    torch.testing.assert_close(out, attention(X[:1], X[:1], X[:1]).expand(3, -1, -1, -1))


_N = 4
_NUMBERS = st.integers(-2, 5)
_POINTWISE = ("add", "sub", "rsub", "mul", "ge", "gt", "le", "lt", "eq", "ne")
_OF_BOOLS = ("logical_and", "logical_or", "bitwise_and", "bitwise_or")
_MOVES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "slice": lambda x, i: x[i % 2 :],
    "step": lambda x, i: x[..., :: 1 + i % 2],
    "select": lambda x, i: x.select(0, i % 2)[None],
    "last": lambda x, i: x[..., -1 - i % 2, None],
    "transpose": lambda x, _: x.transpose(0, 1),
    "flip": lambda x, _: x.flip(0),
    "triu": lambda x, i: x.triu(i),
    "tril": lambda x, i: x.tril(i),
    "cumsum": lambda x, _: x.cumsum(0),
    "float": lambda x, _: x.float(),
    "bool": lambda x, _: x.bool(),
    "long": lambda x, _: x.long(),
    "not": lambda x, _: x.logical_not(),
    "fill": lambda x, i: x.masked_fill(x.bool(), i % 2),
    "half": lambda x, i: x.masked_fill(x.bool(), i / 2),
    "bytes": lambda x, _: x.view(torch.float64),
    "index": lambda x, i: x[torch.arange(2)[:, None] + i, torch.arange(3)],
    "cat": lambda x, i: torch.cat([x[:1] - i, x]),
    "view": lambda x, _: x[None].view(x.shape[0], 1, -1).squeeze(1),
}


Step: TypeAlias = tuple[str, int, int]


@st.composite
def _recipes(draw: st.DrawFn) -> list[Step]:
    steps = st.tuples(st.sampled_from((*_POINTWISE, *_OF_BOOLS, "where", *_MOVES)), _NUMBERS, st.integers(0, 9))
    return draw(st.lists(steps, min_size=1, max_size=7))


def _made(recipe: list[Step], n: Any) -> Iterator[tuple[Step | None, Tensor]]:
    """The tensors that *recipe* makes for *n* positions, without the steps that eager mode refuses."""
    made = [torch.arange(n)[:, None], torch.arange(n)[None, :], torch.ones(n, n, dtype=torch.bool)]
    yield from ((None, x) for x in made)
    for name, number, place in recipe:
        x, other = made[-1], made[place % len(made)]
        try:
            if name in _MOVES:
                made.append(_MOVES[name](x, abs(number)))
            elif name == "where":
                made.append(torch.where(other.bool(), x, number))
            elif name in _OF_BOOLS:
                bools = number % 2  # else bits, where they are integers
                made.append(getattr(torch, name)(*((each.bool() if bools else each) for each in (x, other))))
            else:
                made.append(getattr(torch, name)(x, other if place % 2 else number))
        except (RuntimeError, IndexError):
            continue
        yield (name, number, place), made[-1]


def _value(formula: Formula, index: tuple[int, ...]) -> Any:
    if isinstance(formula, Affine):
        constant = hinted(formula.constant) if isinstance(formula.constant, torch.SymInt) else formula.constant
        return constant + sum(step * index[dim] for dim, step in formula.steps.items())
    holds = all(_value(condition, index) >= 0 for condition in formula.conditions)
    return formula.inside if holds else formula.outside


@settings(max_examples=300, deadline=None)
@given(recipe=_recipes(), symbolic=st.booleans())
def test_each_number_that_is_known_is_right(recipe: list[Step], symbolic: bool) -> None:
    mode, formulas = FakeTensorMode(shape_env=ShapeEnv()), Formulas()
    how: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC if symbolic else DimDynamic.STATIC])
    fake = mode.from_tensor(torch.empty(_N), symbolic_context=how)
    real = list(_made(recipe, _N))
    with _torch_compat.compiling.seeing_operators(fake, formulas.note):
        faked = list(_made([step for step, _ in real if step is not None], fake.shape[0]))
    for (_, x), (_, known) in zip(real, faked, strict=True):
        formula = formulas.of(known)
        if formula is not None:
            for index in itertools.product(*map(range, x.shape)):
                number, expected = _value(formula, index), x[index].item()
                assert number == expected or math.isnan(expected)
    assert formulas.of(faked[0][1]) is not None
