# SPDX-License-Identifier: Apache-2.0
"""Each known defect of torch: shown on stock ``torch.compile``, absent under ``magi``, named in the report."""

from __future__ import annotations

import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from magi_backend import Report, explain
from magi_backend._records.log import Collector, collecting
from magi_backend._repairs._defect import active_defects, known_defects, repaired
from magi_backend._repairs.sizes import cancelled, computed_once, value_of_quotient
from magi_backend._torch_compat.compiling import owner_of, torch_release
from torch import Tensor, nn
from torch._dynamo import guards as guards_of_dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import ir
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.functions import FloatTrueDiv, IntTrueDiv, Mod, ToFloat


if TYPE_CHECKING:
    from collections.abc import Callable

    from magi_backend._repairs._defect import Defect


pytestmark = pytest.mark.kernels


def known(name: str) -> Defect:
    return next(defect for defect in known_defects() if defect.name == name)


def repairs(of: Report | Collector) -> list[str]:
    """The names of all repairs of its compilations."""
    compilations = of.compilations if isinstance(of, Report) else of.compilations()
    return [repair.name for each in compilations for graph in each.graphs for repair in graph.repairs]


def concerned(name: str) -> pytest.MarkDecorator:
    defect = known(name)
    return pytest.mark.skipif(
        not defect.concerns(torch_release()), reason=f"torch {torch.__version__} does not have the defect {name}"
    )


class Upsampling(nn.Module):
    """A residual block and a nearest upsampling, whose backward is a scatter-add into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, 8) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for norm, conv in zip(self.norms, self.convs, strict=False):
            h = conv(F.silu(norm(h)))
        h = (x + h) / 1.0
        return self.convs[2](F.interpolate(h, scale_factor=2.0, mode="nearest"))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention over the pixels of an image, as in the middle of a VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 8)
        self.qkv = nn.Linear(8, 24)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        rows = self.norm(x.view(batch, channels, height * width)).transpose(1, 2)
        q, k, v = (part.view(batch, -1, 1, channels).transpose(1, 2) for part in self.qkv(rows).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, -1, channels)
        return x + self.conv(out.transpose(-1, -2).reshape(batch, channels, height, width))  # type: ignore[no-any-return]


def gradients(model: nn.Module, fn: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(fn(x).square().mean(), list(model.parameters())))


def agree(actual: list[Tensor], expected: list[Tensor], atol: float = 1e-6) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=atol) for a, b in zip(actual, expected, strict=True))


@concerned("keep_mutation_order")
@pytest.mark.skipif(torch_release() < (2, 13), reason="torch waits for the scatter")
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_through_upsampling(dynamic: bool, fresh_caches: Path) -> None:
    for defect in known_defects():
        defect.patch()
        defect.patch()  # a second time wraps nothing
    torch.manual_seed(0)
    model, x = Upsampling(), torch.randn(1, 8, 16, 16)
    expected = gradients(model, model, x)
    stock = gradients(model, torch.compile(model, dynamic=dynamic), x)
    with collecting(Collector()) as collector:
        # The wrong code of the stock compilation is in the cache now, and must not be found there.
        ours = gradients(model, torch.compile(model, backend="magi", dynamic=dynamic), x)

    assert not agree(stock, expected), "torch has mended this: give the defect its last release"
    assert agree(ours, expected)
    (compilation,) = collector.compilations()
    backward = next(graph for graph in compilation.graphs if graph.kind == "backward")
    # With symbolic sizes, torch has a kernel for this gradient, without a scatter-add.
    expected_names = [] if dynamic else ["keep_mutation_order"]
    assert [each.name for each in backward.repairs if each.severity == "wrong code"] == expected_names
    report = Report("Upsampling", torch.__version__, (), (compilation,))
    assert ("silently zero" in " ".join(report.to_text().split())) is not dynamic


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_what_was_read_before_a_write_into_a_slice(dynamic: bool) -> None:
    def read_and_write(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        read = x * 2
        x[1:3] = y[:2]
        return read, read * 3

    def results(fn: Callable[..., Any]) -> list[Any]:
        x, y = torch.arange(16.0).view(4, 4), -torch.arange(16.0).view(4, 4)
        return [tensor.tolist() for tensor in (*fn(x, y), x)]

    expected = results(read_and_write)
    stock = results(torch.compile(read_and_write, dynamic=dynamic))
    with collecting(Collector(fresh=True)) as collector:
        ours = results(torch.compile(read_and_write, backend="magi", dynamic=dynamic))

    assert ours == expected
    assert (stock != expected) is (torch_release() < (2, 12))
    assert ("keep_mutation_order" in repairs(collector)) is (stock != expected)


def sizes_of_an_image() -> tuple[Any, Any]:
    """Two symbolic sizes, as a graph has them in the shapes of its tensors."""
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.STATIC, DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.DYNAMIC]
    )
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return mode.from_tensor(torch.empty(1, 8, 4, 6), symbolic_context=context).shape[2:]  # type: ignore[return-value]


@concerned("order_symbolic_strides")
def test_symbolic_strides_are_put_in_order() -> None:
    sizes = sizes_of_an_image()
    height, width = (size.node.expr for size in sizes)
    channels_last = [8 * height * width, 1, 8 * width, 8]
    graph: Any = types.SimpleNamespace(sizevars=types.SimpleNamespace(shape_env=sizes[0].node.shape_env))
    reported: list[str] = []
    stock = getattr(ir.get_stride_order, "__wrapped__", ir.get_stride_order)

    with pytest.raises(TypeError, match="cannot determine truth value of Relational"):
        stock(channels_last)
    with repaired([known("order_symbolic_strides")], reported.append), V.set_graph_handler(graph):
        ours = ir.get_stride_order(channels_last)

    assert list(ours) == list(stock([8 * 4 * 6, 1, 8 * 6, 8]))
    assert reported == ["order_symbolic_strides"]


@torch.library.custom_op("magi_backend_defects::fill", mutates_args=("out",))
def fill(x: Tensor, out: Tensor, factor: int) -> None:
    out.copy_(x * factor)


def test_what_was_read_before_a_write_keeps_its_value() -> None:
    def chain(x: Tensor, buffer: Tensor) -> Tensor:
        fill(x, buffer, 2)
        before = buffer + 1
        fill(before, buffer, 3)
        return buffer * before

    expected = chain(torch.ones(3), torch.zeros(3))
    stock = torch.compile(chain)(torch.ones(3), torch.zeros(3))
    report = explain(chain)(torch.ones(3), torch.zeros(3))

    broken = any(defect.name == "realize_readers_first" for defect in active_defects())
    if torch_release() < (2, 14):  # whether later releases have it is not known
        assert not torch.equal(stock, expected)
    assert report.agrees
    assert ("realize_readers_first" in repairs(report)) is broken


def test_a_value_that_is_used_before_the_write_only_needs_no_repair() -> None:
    def chain(x: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        fill(x, buffer, 2)
        total = (buffer + 1).sum(0)  # the sum is computed before the next write, with the addition in it
        fill(total.expand(3), buffer, 3)
        return total, buffer

    inputs = torch.ones(3), torch.zeros(3)
    stock = torch.compile(chain)(inputs[0].clone(), inputs[1].clone())
    report = explain(chain)(*inputs)

    assert all(map(torch.equal, stock, chain(inputs[0].clone(), inputs[1].clone())))
    assert report.agrees
    assert repairs(report) == []


class Downsampled(nn.Module):
    """Tokens of a square image, and a convolution of each channel over the image that they are put back into."""

    def __init__(self, stride: int, *, norm: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 3, stride=stride, padding=1)
        self.mix = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) if norm else nn.Linear(16, 16)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)

    def forward(self, x: Tensor) -> Tensor:
        image = self.patches(x)
        tokens = self.mix(image.flatten(2).transpose(1, 2))
        return self.depthwise(tokens.transpose(1, 2).view(image.shape))  # type: ignore[no-any-return]


@concerned("divide_strides_exactly")
@pytest.mark.parametrize(
    ("build", "grad"),
    [
        pytest.param(lambda: Downsampled(4), False, id="stride 4"),
        pytest.param(lambda: Downsampled(8), False, id="stride 8", marks=pytest.mark.slow),
        pytest.param(lambda: Downsampled(2, norm=True), False, id="stride 2 and a norm", marks=pytest.mark.slow),
        pytest.param(lambda: Downsampled(4), True, id="training", marks=pytest.mark.slow),
    ],
)
def test_a_depthwise_convolution_behind_tokens_of_a_square_image(build: Callable[[], nn.Module], grad: bool) -> None:
    torch.manual_seed(0)
    model = build().eval()
    explained = explain(model, dynamic=True)

    with torch.set_grad_enabled(grad):
        with pytest.raises(Exception, match=r"Invalid ranges \[0:-1\]|truth value of Relational"):
            torch.compile(model, dynamic=True)(torch.randn(2, 3, 64, 64))
        reports = [explained(torch.randn(2, 3, size, size)) for size in (64, 96, 65)]

    assert all(report.agrees for report in reports)
    assert "divide_strides_exactly" in repairs(reports[-1])


@concerned("multiples_of_sums")
def test_a_sum_of_sizes_is_divided_by_another() -> None:
    shape_env = ShapeEnv()
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 3)
    sizes: Any = FakeTensorMode(shape_env=shape_env).from_tensor(torch.empty(3, 5, 7), symbolic_context=context).shape
    n, height, width = (size.node.expr for size in sizes)
    tokens = sympy.expand(n * (height + 1) * (width + 1))
    numbers_in_tokens = n * sympy.expand(128 * (height + 1) * (width + 1))
    sizevars = SizeVarAllocator(shape_env)
    reported = list[str]()

    assert not sizevars.statically_known_multiple_of(numbers_in_tokens, tokens)
    with repaired([known("multiples_of_sums")], reported.append):
        assert sizevars.statically_known_multiple_of(numbers_in_tokens, tokens)
        assert sizevars.statically_known_multiple_of(tokens, n * height + n)
        assert reported == ["multiples_of_sums"] * 2
        assert not sizevars.statically_known_multiple_of(tokens + 1, tokens)
        assert not sizevars.statically_known_multiple_of(tokens, 2 * n * height + 2 * n)
    assert len(reported) == 2


def test_a_remainder_is_compared_without_reciprocals() -> None:
    n, m = sympy.symbols("n m", integer=True, positive=True)
    exact = {
        sympy.Mod(n + 1, n**2 + 2 * n + 1): Mod(1, n + 1),
        sympy.Mod(6 * n * m + 6 * n, 4 * n * m**2 + 8 * n * m + 4 * n): Mod(3, 2 * m + 2),
        sympy.Mod(n**2 * m + n, n * m + 1): sympy.S.Zero,
    }

    for remainder, expected in exact.items():
        asked = cancelled(sympy.Eq(remainder, 0))
        assert not any(power.exp.is_negative for power in asked.atoms(sympy.Pow))
        for values in ({n: 3, m: 5}, {n: 1, m: 1}, {n: 12, m: 2}):
            assert bool(asked.subs(values)) == bool(sympy.Eq(expected, 0).subs(values)), remainder
            assert bool(asked.subs(values)) == bool(sympy.Eq(remainder, 0).subs(values)), remainder


@pytest.mark.parametrize("question", ["n % 4", "(n * m) % m", "n"])
def test_any_other_question_stays_what_it_was(question: str) -> None:
    n, m = sympy.symbols("n m", integer=True, positive=True)
    asked = sympy.Eq(eval(question, {"n": n, "m": m}), 0)

    assert cancelled(asked) is asked


@pytest.mark.parametrize(
    "strides",
    [
        pytest.param(lambda h, w: [8 * h * w, h * w, w, 1], id="contiguous"),
        pytest.param(lambda h, w: [8 * h * w, 1, 8 * w, 8], id="channels last"),
        pytest.param(lambda h, _: [h.node.expr * 8 + 8, h.node.expr + 1, 1], id="expressions that hold for all sizes"),
        pytest.param(lambda *_: [48, 24, 6, 1], id="numbers"),
    ],
)
def test_strides_that_torch_can_order_by_itself_need_no_repair(strides: Callable[[Any, Any], list[Any]]) -> None:
    reported: list[str] = []
    seq = strides(*sizes_of_an_image())

    with repaired([known("order_symbolic_strides")], reported.append):
        ours = ir.get_stride_order(seq)

    assert list(ours) == list(getattr(ir.get_stride_order, "__wrapped__", ir.get_stride_order)(seq))
    assert reported == []


@pytest.mark.parametrize("defect", known_defects(), ids=lambda defect: defect.name)
def test_a_defect_has_a_range_and_replaces_what_torch_has(defect: Defect) -> None:
    assert defect.concerns(defect.since)
    assert defect.fixed is None or not defect.concerns(defect.fixed)
    if defect.concerns(torch_release()):
        assert all(hasattr(*owner_of(place)) for place in defect.replaces)


def of_two_tensors(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(torch.tensor(x.shape[0]), torch.tensor(y.shape[0]), rounding_mode="trunc")


def of_a_tensor_and_a_size(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(torch.tensor(x.shape[0]), y.shape[0], rounding_mode="trunc")


def of_products_of_sizes(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(torch.tensor(x.shape[0] * 3), y.shape[0] + 1, rounding_mode="trunc") - 1


@concerned("bound_infinite_quotients")
@pytest.mark.parametrize("fn", [of_two_tensors, of_a_tensor_and_a_size, of_products_of_sizes])
def test_quotients_of_unbounded_sizes(fn: Callable[..., Tensor]) -> None:
    inputs = torch.randn(8), torch.randn(3)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="Invalid NaN comparison"):
        torch.compile(fn, dynamic=True)(*inputs)
    torch.compiler.reset()

    explained = explain(fn, dynamic=True)
    report = explained(*inputs)

    assert report.agrees
    assert repairs(report) == ["bound_infinite_quotients"]
    compiled = torch.compile(fn, backend="magi", dynamic=True)
    for rows in (3, 7, 20):
        given = torch.randn(rows), torch.randn(4)
        torch.testing.assert_close(compiled(*given), fn(*given))


@pytest.mark.parametrize("quotient", [FloatTrueDiv, IntTrueDiv])
@given(a=st.integers(1, 1000), b=st.integers(1, 1000), halves=st.booleans(), size=st.integers(1, 2**32 - 1))
def test_a_quotient_of_multiples_of_a_size_is_a_number(quotient: Any, a: int, b: int, halves: bool, size: int) -> None:
    n = sympy.Symbol("n", integer=True, positive=True)
    scale = sympy.Float(0.5) if halves and quotient is FloatTrueDiv else 1
    counted = ToFloat(n) if quotient is FloatTrueDiv else n
    found = value_of_quotient(quotient(a * counted, scale * b * counted))
    assert found == (a * size) / (float(scale) * b * size)


def test_which_quotients_depend_on_the_size() -> None:
    n, m = (sympy.Symbol(name, integer=True, positive=True) for name in "nm")
    maybe_empty = ToFloat(sympy.Symbol("u", integer=True, nonnegative=True))
    of_sizes = [(ToFloat(n), 0.1 * ToFloat(n)), (ToFloat(n), ToFloat(n + 1)), (ToFloat(n), 2.0 * ToFloat(m))]
    for base, divisor in [*of_sizes, (maybe_empty, 2.0 * maybe_empty)]:
        assert value_of_quotient(FloatTrueDiv(base, divisor)) is None
    assert value_of_quotient(2.0 * ToFloat(n)) is None


def twice_as_large(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0)


def of_multiples_of_its_sizes(x: Tensor) -> Tensor:
    return F.interpolate(x, size=(3 * x.shape[2], 2 * x.shape[3]), mode="nearest-exact")


@concerned("number_for_quotient")
@pytest.mark.parametrize("fn", [twice_as_large, of_multiples_of_its_sizes])
def test_upsampling_by_a_factor(fn: Callable[[Tensor], Tensor]) -> None:
    report = explain(fn, dynamic=True)(torch.randn(1, 3, 45, 66))

    assert report.agrees
    assert repairs(report) == ["number_for_quotient"]
    compiled = torch.compile(fn, backend="magi", dynamic=True)
    for height in (2, 45, 111):
        x = torch.randn(1, 3, height, 33, requires_grad=True)
        ours, eager = compiled(x), fn(x)
        torch.testing.assert_close(ours, eager)
        gradients = [torch.autograd.grad(each.square().sum(), x) for each in (ours, eager)]
        torch.testing.assert_close(*gradients)


def by_what_is_padded(x: Tensor) -> Tensor:
    """By the share of it that an image would be padded with, to a multiple of eight."""
    padding = (8 - x.shape[-1] % 8) % 8
    return x * (padding / 8) + (5 - x.shape[-1]) % 8 / x.shape[-1]


@concerned("no_tensor_of_remainder")
def test_a_tensor_times_a_number_with_a_remainder_in_it() -> None:
    with pytest.raises(Exception, match="has no attribute 'python_mod'"):
        torch.compile(by_what_is_padded, dynamic=True)(torch.randn(2, 13))
    torch.compiler.reset()
    report = explain(by_what_is_padded, dynamic=True)(torch.randn(2, 13))

    assert report.agrees
    assert repairs(report) == ["no_tensor_of_remainder"]
    compiled = torch.compile(by_what_is_padded, backend="magi", dynamic=True)
    for width in (3, 8, 13, 64):
        x = torch.randn(2, width, requires_grad=True)
        ours, eager = compiled(x), by_what_is_padded(x)
        torch.testing.assert_close(ours, eager)
        gradients = [torch.autograd.grad(each.square().sum(), x) for each in (ours, eager)]
        torch.testing.assert_close(*gradients)


def shuffled(x: Tensor) -> Tensor:
    return x[torch.randperm(x.shape[0])]


def shuffled_twice(x: Tensor) -> Tensor:
    return shuffled(x.sin())[torch.randperm(x.shape[0])].cos()


def shuffled_rows(x: Tensor) -> Tensor:
    order = torch.randperm(x.shape[0])
    return x[order] + order.unsqueeze(1)


@concerned("match_whole_permutations")
@pytest.mark.parametrize(
    ("fn", "grad"),
    [
        (shuffled, True),
        (shuffled_twice, False),
        (shuffled_rows, False),
        pytest.param(shuffled, False, marks=pytest.mark.slow),
        pytest.param(shuffled_twice, True, marks=pytest.mark.slow),
        pytest.param(shuffled_rows, True, marks=pytest.mark.slow),
    ],
)
def test_a_tensor_indexed_by_a_whole_permutation(fn: Callable[[Tensor], Tensor], grad: bool) -> None:
    x = torch.randn(5, 3, requires_grad=grad)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="Not all inputs to pattern found"):
        torch.compile(fn, options={"fallback_random": True})(x)
    torch.compiler.reset()

    report = explain(fn)(x)

    assert report.agrees
    assert set(repairs(report)) == {"match_whole_permutations"}
    torch.compiler.reset()
    compiled = torch.compile(fn, backend="magi", options={"magi.check": True})
    assert compiled(x).shape == x.shape


SIZES = (5, 5, 5, 6, 6, 6, 5)


def image(size: int) -> Tensor:
    return torch.randn(2, 3, size, size + 1)


@concerned("keep_saved_strides_symbolic")
def test_stock_asserts_the_strides_of_another_size() -> None:
    layers = nn.Conv2d(3, 8, 3, padding=1)
    stock = torch.compile(layers, dynamic=True)
    for size in SIZES[:-1]:
        gradients(layers, stock, image(size))

    with pytest.raises(AssertionError, match="stride 90==126"):
        gradients(layers, stock, image(SIZES[-1]))


TRAINED: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "convolution": (lambda: nn.Conv2d(3, 8, 3, padding=1), image),
    "one dimension": (lambda: nn.Conv1d(3, 4, 3, padding=1), lambda size: torch.randn(2, 3, size)),
    "three dimensions": (lambda: nn.Conv3d(3, 4, 3, padding=1), lambda size: torch.randn(2, 3, 3, size, size + 1)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), image),
    "channels last": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3)),
        lambda size: image(size).to(memory_format=torch.channels_last),
    ),
    "norm": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.SiLU()), image),
    "linear": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)),
        lambda size: torch.randn(2, size, 6),
    ),
    "up": (
        lambda: nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(3, 4, 1), nn.Upsample(scale_factor=2)),
        lambda size: image(2 * size),
    ),
    "tokens": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(2), nn.Softmax(-1)), image),
    "attention": (Attention, lambda size: torch.randn(1, 8, size, size + 1)),
}


@pytest.mark.parametrize(
    "kind", [kind if kind == "convolution" else pytest.param(kind, marks=pytest.mark.slow) for kind in TRAINED]
)
def test_each_size_of_a_training_step_is_right(kind: str) -> None:
    torch.manual_seed(0)
    build, given = TRAINED[kind]
    layers = build()
    with collecting(Collector()) as collector:
        ours = torch.compile(layers, backend="magi", dynamic=True)
        for size in SIZES:
            x = given(size)
            assert agree(gradients(layers, ours, x), gradients(layers, layers, x), atol=1e-5), size

    named = {name for name in repairs(collector) if known(name).severity != "slower code"}
    needed = {"order_symbolic_strides", "keep_mutation_order"} if kind in {"attention", "up"} else set()
    of_strides = {"keep_saved_strides_symbolic"} & {defect.name for defect in active_defects()}
    if kind in {"channels last", "attention"} and torch_release() >= (2, 13):
        needed = needed | {"train_symbolic_convolutions"}
    assert named <= of_strides | needed
    assert kind != "convolution" or named == of_strides


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:NestedTensor does not implement")
def test_a_training_step_of_jagged_tensors() -> None:
    layer = nn.Linear(4, 8)

    def heads(rows: Tensor) -> Tensor:
        return layer(rows).unflatten(-1, (2, 4)).transpose(1, 2).sin().transpose(1, 2)  # type: ignore[no-any-return]

    compiled = torch.compile(heads, backend="magi", options={"magi.strict": True})
    for lengths in ((3, 5), (2, 5, 1)):
        rows = torch.nested.nested_tensor([torch.randn(n, 4) for n in lengths], layout=torch.jagged)
        gradients = [torch.autograd.grad(fn(rows).values().square().sum(), layer.weight) for fn in (compiled, heads)]
        torch.testing.assert_close(*gradients)


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "average": lambda x: F.adaptive_avg_pool2d(x, 7),
    "one dimension": lambda x: F.adaptive_avg_pool1d(x.flatten(2), 7),
    "largest": lambda x: F.adaptive_max_pool2d(x, 7),
    "half": lambda x: F.adaptive_avg_pool2d(x, (x.shape[2] // 2, x.shape[3] // 2)),
    "area": lambda x: F.interpolate(x, scale_factor=0.5, mode="area"),
    "larger": lambda x: F.adaptive_avg_pool2d(x, (2 * x.shape[2] + 1, 5)),
    "gate": lambda x: F.glu(torch.cat([x, 2 * x], 2), 2),
}
COMPILES = {"average", "one dimension", "largest", "gate"}


@pytest.mark.parametrize("kind", POOLS)
def test_a_pool_is_compiled_once_for_all_images(kind: str) -> None:
    def pool(x: Tensor) -> Tensor:
        return POOLS[kind](x.relu())

    images = [torch.randn(2, 3, *size) for size in ((45, 61), (46, 64), (20, 33))]
    stock = CompileCounterWithBackend("inductor")
    compiled = torch.compile(pool, backend=stock, dynamic=True)
    if kind in COMPILES:
        for x in images:
            compiled(x)
        assert stock.frame_count == len(images)
    else:
        with pytest.raises(torch._inductor.exc.InductorError, match="cannot determine truth value"):
            compiled(images[0])
    torch.compiler.reset()

    counter = CompileCounterWithBackend("magi")
    with collecting(Collector()) as collector:
        ours = torch.compile(pool, backend=counter, dynamic=True)
        for x in images:
            torch.testing.assert_close(ours(x), pool(x))
    assert counter.frame_count == 1
    assert repairs(collector) == ["pool_symbolic_images"]


@pytest.mark.parametrize(
    "points",
    [
        lambda x: torch.linspace(0, 1, x.shape[0]),
        lambda x: torch.linspace(0.5, x.shape[0] - 0.5, x.shape[0], dtype=torch.float64),
        lambda x: torch.linspace(start=x[0], end=-3.0, steps=x.shape[0] // 2, dtype=torch.float32, device="cpu"),
        lambda x: torch.linspace(2.0, 1.0, x.shape[0] // 40),
    ],
    ids=["numbers", "sizes", "a tensor and names", "one step"],
)
def test_points_are_spaced_by_a_symbolic_size(points: Callable[[Tensor], Tensor]) -> None:
    with collecting(Collector()) as collector:
        ours = torch.compile(lambda x: 2 * points(x), backend="magi", dynamic=True)
        for size in (61, 64, 43, 79):
            x = torch.randn(size)
            torch.testing.assert_close(ours(x), 2 * points(x))
    assert len(collector.compilations()) == 1
    assert repairs(collector) == ["space_symbolic_steps"]


@pytest.mark.parametrize(
    "points",
    [
        lambda x: torch.linspace(0, 9, x.shape[0], dtype=torch.int32),
        lambda x: torch.linspace(0, 1j, x.shape[0]),
        lambda x: torch.linspace(0, 1, x.shape[0], out=torch.empty(0)),
    ],
    ids=["integers", "complex numbers", "out"],
)
@pytest.mark.filterwarnings("ignore")
def test_other_points_are_left_to_torch(points: Callable[[Tensor], Tensor]) -> None:
    with collecting(Collector()) as collector:
        ours = torch.compile(points, backend="magi", dynamic=True)
        x = torch.randn(61)
        torch.testing.assert_close(ours(x), points(x))
    assert "space_symbolic_steps" not in repairs(collector)


def test_convolutions_are_compiled_once_for_all_images_of_a_training() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Upsample(scale_factor=2), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(5)
    )
    counter, frames = CompileCounterWithBackend("magi"), []
    with collecting(Collector()) as collector:
        ours = torch.compile(layers, backend=counter, dynamic=True)
        for size in ((45, 61), (46, 64), (20, 33)):
            x = torch.randn(2, 3, *size)
            assert agree(gradients(layers, ours, x), gradients(layers, layers, x), atol=1e-4), size
            frames.append(counter.frame_count)
    assert len(set(frames)) == 1
    active = {defect.name for defect in active_defects()}
    assert {"pool_symbolic_images", "train_symbolic_convolutions"} & active <= set(repairs(collector))


HAS_QUOTIENTS = pytest.mark.skipif(torch_release() < (2, 11), reason="torch 2.10 does not compile it")
RIGHT = [
    pytest.param(lambda x: x.sin() + 1, torch.randn(8), id="no defect"),
    pytest.param(
        lambda x: torch.div(torch.tensor(x.shape[0]), 4, rounding_mode="trunc"),
        torch.randn(8),
        id="a quotient of bounded sizes",
        marks=HAS_QUOTIENTS,
    ),
    pytest.param(lambda x: x[torch.randperm(x.shape[0])[:2]], torch.randn(5, 3), id="a part of a permutation"),
    pytest.param(nn.Conv2d(3, 8, 3, padding=1).requires_grad_(False), image(5), id="an inference saves nothing"),
]


@pytest.mark.parametrize(("fn", "x"), RIGHT)
def test_what_torch_compiles_right_needs_no_repair(fn: Callable[[Tensor], Tensor], x: Tensor) -> None:
    report = explain(fn, dynamic=True)(x)

    assert report.agrees
    assert [graph.repairs for graph in report.compilations[0].graphs] == [()]
    assert "Guards" not in report.to_text()


class Saving(nn.Module):
    """A region of which the backward needs an operand; from torch 2.13 on, its forward gives that back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.rand(8)), nn.Linear(8, 8)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        return x + F.silu(self.inner(normed * scale)).sin()


class Sharing(nn.Module):
    """A region of which each backward reads an operand that all of them have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return (x * scale).sin() * self.weight


class Regions(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.scale, self.weight = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.rand(8))
        self.regions = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scale = self.scale(x).exp()
        for region in self.regions:
            x = region(x, scale)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


@concerned("region_memory")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", [Saving, Sharing])
def test_gradients_of_nested_compile_regions(kind: type[nn.Module], dynamic: bool) -> None:
    torch.manual_seed(0)
    model, x = Regions(kind), torch.randn(5, 8)
    expected = gradients(model, model, x)
    stock = gradients(model, torch.compile(model, dynamic=dynamic), x)
    with collecting(Collector(fresh=True)) as collector:
        compiled = torch.compile(model, backend="magi", dynamic=dynamic, options={"magi.regions": False})
        ours = gradients(model, compiled, x)

    is_wrong = not agree(stock, expected)
    assert is_wrong or torch_release() < (2, 13), "torch has mended this: give the defect its last release"
    assert agree(ours, expected)
    assert "region_memory" in repairs(collector) or not is_wrong


@pytest.mark.parametrize(
    ("guards", "once"),
    [
        (["n // 8 > 1", "m // 8 > 1"], ["n // 8 > 1", "m // 8 > 1"]),
        (["n // 8 < n // 8 + 1"], ["(_size0 := (n // 8)) < _size0 + 1"]),
        (
            ["2 * (n // 8 + 1) < m", "n // 8 + 1 > 1", "n // 8 != 3"],
            ["2 * (_size1 := ((_size0 := (n // 8)) + 1)) < m", "_size1 > 1", "_size0 != 3"],
        ),
        (
            ["n == 0 or m // n > 1", "m // n > 2", "m // n > 3"],
            ["n == 0 or m // n > 1", "(_size0 := (m // n)) > 2", "_size0 > 3"],
        ),
        (["0 < n // 8 < m", "n // 8 != 3"], ["0 < n // 8 < m", "n // 8 != 3"]),
        (["f(n // 8) < n // 8", "not n // 8 == 3"], ["f(n // 8) < n // 8", "not n // 8 == 3"]),
    ],
    ids=["nothing", "in one", "within another", "or", "chain", "calls"],
)
def test_guards_compute_a_number_once(guards: list[str], once: list[str]) -> None:
    assert computed_once(guards) == once


def test_a_guard_that_is_too_long_stays() -> None:
    guards = ["+".join("n" * 3000) + " < 5", "n + n < 5"]
    assert computed_once(guards) == guards


NUMBERS: st.SearchStrategy[str] = st.recursive(
    st.sampled_from(["n", "m", "L['x'].size()[0]", "2", "(-1)"]),
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from(["+", "*", "-", "//", "%"]), inner),
    max_leaves=6,
)
GUARDS = st.builds("{} {} {}".format, NUMBERS, st.sampled_from(["<", "<=", "==", "!="]), NUMBERS) | st.builds(
    "n == 0 or {} < {}".format, NUMBERS, NUMBERS
)


@given(st.lists(GUARDS, min_size=1, max_size=6), st.integers(0, 5), st.integers(1, 5))
def test_guards_ask_what_they_asked(guards: list[str], n: int, m: int) -> None:
    def answer(guards: list[str]) -> object:
        _, source = guards_of_dynamo.build_guard_function(guards, "n, m")
        made: dict[str, Any] = {}
        exec(source, {}, made)
        try:
            return made["___make_guard_fn"](n, m)({"x": torch.empty(3)})
        except ZeroDivisionError:
            return "no number"

    assert answer(computed_once(guards)) == answer(guards)


@pytest.mark.parametrize("backend", ["magi", "inductor"])
def test_guards_of_layers_share_their_sizes(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, build = list[str](), guards_of_dynamo.build_guard_function

    def noted(code_parts: list[str], closure_args: str) -> tuple[str, str]:
        body, source = build(code_parts, closure_args)
        sources.append(source)
        return body, source

    monkeypatch.setattr(guards_of_dynamo, "build_guard_function", noted)
    net = nn.Sequential(*(nn.Conv2d(4, 4, 3, stride=2, padding=1) for _ in range(3)))
    compiled = torch.compile(net, backend=backend, dynamic=True)
    for side in (65, 97):
        x = torch.randn(2, 4, side, side + 2)
        torch.testing.assert_close(compiled(x), net(x))

    assert any("_size0" in source for source in sources) == (backend == "magi")
