# SPDX-License-Identifier: Apache-2.0
"""Each known defect of torch: shown on stock ``torch.compile``, absent under ``magi``, named in the report."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from magi_backend import Report, explain
from magi_backend._collect import Collector, collecting
from magi_backend._defects import DEFECTS, active_defects
from magi_backend._torch_compat import REPAIRS, repaired_functions, torch_release
from torch import Tensor, nn
from torch._inductor import ir
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


DYNAMIC: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
    dynamic_sizes=[DimDynamic.STATIC, DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.DYNAMIC]
)


def concerned(name: str) -> pytest.MarkDecorator:
    defect = next(defect for defect in DEFECTS if defect.name == name)
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


def agree(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(actual, expected, strict=True))


@dataclass(frozen=True)
class Compiled:
    """The gradients of one model: eager, by stock Inductor, and by magi, with the report of the latter."""

    expected: list[Tensor]
    stock: list[Tensor]
    ours: list[Tensor]
    report: Report


def compiled_both_ways(*, dynamic: bool) -> Compiled:
    for install in REPAIRS.values():
        install()
        install()  # a second time wraps nothing
    torch.manual_seed(0)
    model, x = Upsampling(), torch.randn(1, 8, 16, 16)
    expected = gradients(model, model, x)
    stock = gradients(model, torch.compile(model, dynamic=dynamic), x)
    collector = Collector(fresh=False)
    with collecting(collector):
        # The wrong code of the stock compilation is in the cache now, and must not be found there.
        ours = gradients(model, torch.compile(model, backend="magi", dynamic=dynamic), x)
    return Compiled(expected, stock, ours, Report("Upsampling", torch.__version__, (), collector.compilations()))


@pytest.fixture(scope="module")
def upsampling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("upsampling")))
        yield compiled_both_ways(dynamic=False)


@concerned("keep_mutation_order")
def test_gradients_through_upsampling(upsampling: Compiled) -> None:
    assert not agree(upsampling.stock, upsampling.expected), "torch has mended this: give the defect its last release"
    assert agree(upsampling.ours, upsampling.expected)


@pytest.mark.slow
@concerned("keep_mutation_order")
def test_gradients_through_upsampling_of_dynamic_sizes(fresh_caches: Path) -> None:
    dynamic = compiled_both_ways(dynamic=True)

    assert not agree(dynamic.stock, dynamic.expected)
    assert agree(dynamic.ours, dynamic.expected)


def test_repairs_do_nothing_outside_this_backend(upsampling: Compiled) -> None:
    broken = any(defect.name == "keep_mutation_order" for defect in active_defects(torch_release()))

    assert agree(upsampling.stock, upsampling.expected) is not broken


@concerned("keep_mutation_order")
def test_the_report_names_the_guard(upsampling: Compiled) -> None:
    (compilation,) = upsampling.report.compilations
    backward = next(graph for graph in compilation.graphs if graph.kind == "backward")

    assert [(guard.name, guard.severity) for guard in backward.guards] == [("keep_mutation_order", "wrong code")]
    assert "silently zero" in " ".join(upsampling.report.to_text().split())


@concerned("order_symbolic_strides")
def test_symbolic_strides_are_put_in_order() -> None:
    environment = ShapeEnv()
    fake = FakeTensorMode(shape_env=environment).from_tensor(torch.empty(1, 8, 4, 6), symbolic_context=DYNAMIC)
    height, width = (size.node.expr for size in fake.shape[2:])  # type: ignore[attr-defined]
    channels_last = [8 * height * width, 1, 8 * width, 8]
    known: Any = types.SimpleNamespace(sizevars=types.SimpleNamespace(shape_env=environment))
    reported: list[str] = []
    stock = getattr(ir.get_stride_order, "_magi_original", ir.get_stride_order)

    with pytest.raises(TypeError, match="cannot determine truth value of Relational"):
        stock(channels_last)
    with repaired_functions(frozenset({"order_symbolic_strides"}), reported.append), V.set_graph_handler(known):
        ours = ir.get_stride_order(channels_last)

    assert list(ours) == list(stock([8 * 4 * 6, 1, 8 * 6, 8]))
    assert reported == ["order_symbolic_strides"]


@pytest.mark.slow
@concerned("order_symbolic_strides")
def test_attention_trains_at_dynamic_sizes() -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(1, 8, 4, 6)
    collector = Collector(fresh=False)
    with collecting(collector):
        ours = gradients(model, torch.compile(model, backend="magi", dynamic=True), x)

    assert agree(ours, gradients(model, model, x))
    guards = {g.name for c in collector.compilations() for graph in c.graphs for g in graph.guards}
    assert "order_symbolic_strides" in guards


@concerned("keep_mutation_order")
def test_a_graph_without_the_defect_has_no_guard() -> None:
    report = explain(lambda x: x.sin() + 1)(torch.randn(8))

    assert [graph.guards for graph in report.compilations[0].graphs] == [()]
    assert "Guards" not in report.to_text()


def test_what_was_read_before_a_write_keeps_its_value(ns: str) -> None:
    @torch.library.custom_op(f"{ns}::fill", mutates_args=("out",))
    def fill(x: Tensor, out: Tensor, factor: int) -> None:
        out.copy_(x * factor)

    def chain(x: Tensor, buffer: Tensor) -> Tensor:
        fill(x, buffer, 2)
        before = buffer + 1
        fill(before, buffer, 3)
        return buffer * before

    expected = chain(torch.ones(3), torch.zeros(3))
    stock = torch.compile(chain)(torch.ones(3), torch.zeros(3))
    report = explain(chain)(torch.ones(3), torch.zeros(3))

    broken = any(defect.name == "realize_readers_first" for defect in active_defects(torch_release()))
    if torch_release() < (2, 14):  # whether later releases have it is not known
        assert not torch.equal(stock, expected)
    assert report.agrees
    guards = [guard.name for graph in report.compilations[0].graphs for guard in graph.guards]
    assert ("realize_readers_first" in guards) is broken


def test_every_defect_has_a_repair_and_a_range() -> None:
    assert {defect.name for defect in DEFECTS} == set(REPAIRS)
    for defect in DEFECTS:
        assert defect.concerns(defect.since)
        assert defect.fixed is None or not defect.concerns(defect.fixed)
