# SPDX-License-Identifier: Apache-2.0
"""``magi.check`` lets right code pass, and names piece, tensor and first operator of wrong code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from magi_backend import MismatchError, explain
from magi_backend._verify.check import CheckedPiece
from magi_backend._verify.compare import compare
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass


class CosBecomesSin(CustomGraphPass):
    """A wrong compiler: every cosine becomes a sine."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is torch.ops.aten.cos.default:
                node.target = torch.ops.aten.sin.default

    def uuid(self) -> None:
        return None


class CosBecomesSinAfterOthers(CosBecomesSin):
    """The same, in memory that others have used."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.empty.memory_format):
            node.target, node.args = torch.ops.aten.full.default, (node.args[0], 7.0)
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "memory_format"}


def wrong_on_the_way(x: Tensor) -> Tensor:
    y = x.relu() + 1
    z = torch.cos(y) * 2
    return z - y


@pytest.mark.kernels
def test_right_code_passes_and_is_on_record() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 4)

    def fn(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(linear(x).relu(), 0.5)

    report = explain(fn, {"magi.check": True})(torch.randn(3, 4, requires_grad=True))

    (check,) = report.compilations[-1].checks
    assert check.agrees
    assert check.compared >= 4  # an output, an input and its gradient, the parameters and theirs
    assert "Checks against eager" in report.to_text()
    assert report.agrees


def test_a_wrong_output_names_the_first_operator() -> None:
    options: dict[str, Any] = {"magi.check": True, "post_grad_custom_pre_pass": CosBecomesSin()}
    compiled = torch.compile(wrong_on_the_way, backend="magi", options=options)

    with pytest.raises(MismatchError) as caught:
        compiled(torch.randn(5, 5))

    message = str(caught.value)
    assert message.startswith("magi.check: graph 0: output[0] of the compiled code differs from eager by ")
    assert "The first operator that differs is cos (node cos), File" in message
    assert "z = torch.cos(y) * 2" in message


def test_only_the_first_call_is_checked() -> None:
    reported: list[str] = []
    piece = CheckedPiece(
        torch.neg,
        torch.fx.symbolic_trace(lambda x: -x),
        "piece",
        names={},
        blame=lambda args, gradients: "",
        report=lambda title, differences: reported.append(title),
        seconds=0.0,
    )

    piece(torch.ones(3))
    piece(torch.ones(3))

    assert reported == ["piece"]


def test_a_function_that_writes_is_checked_on_copies() -> None:
    def fn(x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1

    compiled = torch.compile(fn, backend="magi", options={"magi.check": True})
    x = torch.ones(3)

    torch.testing.assert_close(compiled(x), torch.full((3,), 3.0))
    torch.testing.assert_close(x, torch.full((3,), 2.0))


@pytest.mark.parametrize("options", [{}, {"magi.check": True}], ids=["explain", "check"])
def test_inference_mode(options: dict[str, Any]) -> None:
    """Its tensors do not count writes."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return (x * y).relu_()

    with torch.inference_mode():
        x = torch.randn(3, 4)
        report = explain(fn, options)(x, x[1:2])
        assert report.agrees
        assert [d.name for d in report.calls[-1].differences] == [
            "output",
            "argument after the call[0][0]",
            "argument after the call[0][1]",
        ]
        wrong: dict[str, Any] = {"magi.check": True, "post_grad_custom_pre_pass": CosBecomesSin()}
        with pytest.raises(MismatchError, match="The first operator that differs is cos "):
            torch.compile(wrong_on_the_way, backend="magi", options=wrong)(x)


def test_a_wrong_gradient_names_the_first_operator_on_the_way_back() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        z = torch.sin(x * 2)
        return (z * y).exp().sum()

    options: dict[str, Any] = {"magi.check": True, "post_grad_custom_pre_pass": CosBecomesSin()}
    compiled = torch.compile(fn, backend="magi", options=options)

    with pytest.raises(MismatchError) as caught:
        compiled(torch.randn(5, requires_grad=True), torch.randn(5))

    message = str(caught.value)
    assert "gradient of x of the compiled code differs" in message
    assert "The first operator that differs on the way back from the outputs is sin (node z), File" in message


def test_the_piece_of_a_split_graph_is_named(ns: str) -> None:
    @torch.library.custom_op(f"{ns}::same", mutates_args=())
    def same(x: Tensor) -> Tensor:
        return x.clone()

    same.register_fake(torch.empty_like)
    options: dict[str, Any] = {
        "magi.check": True,
        "magi.boundary_ops": [f"{ns}::same"],
        "post_grad_custom_pre_pass": CosBecomesSin(),
    }
    compiled = torch.compile(lambda x: same(x + 1).cos(), backend="magi", options=options)

    with pytest.raises(MismatchError, match=r"magi.check: piece 1: output\[0\] of the compiled code differs"):
        compiled(torch.randn(5))


class MixedPrecision(torch.nn.Module):
    """Its parameters and its result are float32, its products bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 16)
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y: Tensor = self.layers(x)
        return torch.cos(y.float())


@pytest.mark.kernels
@pytest.mark.parametrize("options", [{}, {"magi.check": True}], ids=["explain", "check"])
@pytest.mark.parametrize("seed", range(3))
def test_float32_is_as_accurate_as_what_it_was_computed_from(options: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    report = explain(MixedPrecision(), options)(torch.randn(32, 64))
    assert report.agrees
    assert any(d.name.startswith("gradient") and d.largest > 1e-3 for d in report.calls[-1].differences)


def test_a_wrong_operator_among_bfloat16_is_named() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.cos((x.bfloat16() @ y.bfloat16()).float())

    options: dict[str, Any] = {"magi.check": True, "post_grad_custom_pre_pass": CosBecomesSin()}
    compiled = torch.compile(fn, backend="magi", options=options)
    with pytest.raises(MismatchError, match="The first operator that differs is cos "):
        compiled(torch.randn(32, 64), torch.randn(64, 16))


def test_an_element_near_zero_has_the_error_of_the_others() -> None:
    large = torch.tensor([30.0, -40.0, 0.125], dtype=torch.bfloat16)
    assert compare("output", large + torch.tensor([0.0, 0.0, 0.5], dtype=torch.bfloat16), large).agrees
    assert not compare("output", large + torch.tensor([0.0, 0.0, 4.0], dtype=torch.bfloat16), large).agrees
    assert not compare("output", large.float() + torch.tensor([0.0, 0.0, 0.5]), large.float()).agrees


@pytest.fixture
def attention(ns: str) -> Callable[[Tensor, Tensor], None]:
    """A boundary that fills what an earlier piece allocates, as the attentions of vLLM do."""

    @torch.library.custom_op(f"{ns}::attention", mutates_args=("out",))
    def attention(x: Tensor, out: Tensor) -> None:
        out.copy_(x.sin())

    attention.register_fake(lambda x, out: None)
    return attention


def checked(fn: Callable[..., Any], attention: Any, **options: Any) -> Callable[..., Any]:
    named = [attention._opoverload.name()]
    given: dict[str, Any] = {"magi.check": True, "magi.boundary_ops": named, **options}
    return torch.compile(fn, backend="magi", options=given)


Allocation = Callable[[Tensor], Tensor]
ALLOCATIONS: dict[str, Allocation] = {
    "empty_like": torch.empty_like,
    "empty": lambda x: torch.empty(x.shape, dtype=x.dtype),
    "new_empty": lambda x: x.new_empty(x.shape),
    "empty_strided": lambda x: torch.empty_strided((5, 5), (1, 5), dtype=x.dtype),
    "packet": lambda x: torch.ops.aten.empty_like(x),  # noqa: PLW0108 - a trace takes the packet for a leaf
    "overload": lambda x: torch.ops.aten.new_empty.default(x, [5, 5]),
}


ALLOCATED = [torch.float32, torch.complex64, torch.int64, torch.uint64, torch.bool]
ALLOCATED += [torch.float8_e4m3fn, torch.float8_e8m0fnu]


@pytest.mark.parametrize("dtype", ALLOCATED, ids=str)
@pytest.mark.parametrize("how", ALLOCATIONS)
def test_memory_that_nobody_has_written_is_not_compared(how: str, dtype: torch.dtype) -> None:
    filled = [torch.full((5, 5), value).to(dtype) for value in (1, 0)]

    class Piece(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return ALLOCATIONS[how](x), y + 1

    gm = torch.fx.symbolic_trace(Piece())
    reports: list[Any] = []

    def check(compiled: Callable[..., Any]) -> CheckedPiece:
        return CheckedPiece(
            compiled,
            gm,
            "piece 0",
            names={},
            blame=lambda args, gradients: "",
            report=lambda title, found: reports.append(found),
            seconds=0.0,
        )

    check(lambda x, y: (filled[1], y + 1))(filled[0], torch.ones(3))
    assert [difference.agrees for difference in reports[-1]] == [True, True]
    with pytest.raises(MismatchError, match=r"output\[1\]"):
        check(lambda x, y: (filled[1], y + 2))(filled[0], torch.ones(3))


def test_a_boundary_that_fills_what_a_piece_allocates(attention: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.relu() + 1
        out = torch.empty_like(y)
        attention(y, out)
        return out.view(-1) * 2

    x = torch.randn(4, 5)
    assert torch.equal(checked(fn, attention)(x), fn(x))


def test_the_search_passes_over_memory_that_nobody_has_written(attention: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        half = torch.cos(x + 1)
        attention(half, out)
        return out + half

    with pytest.raises(MismatchError, match=r"piece 0: output.* The first operator that differs is cos "):
        checked(fn, attention, post_grad_custom_pre_pass=CosBecomesSinAfterOthers())(torch.randn(4, 5))


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint16, torch.uint64], ids=str
)
def test_dtypes_that_torch_does_not_compare(dtype: torch.dtype) -> None:
    """One step between neighbours is rounding; two are not."""
    bits = torch.tensor([0x38, 0x39, 0x3A], dtype=torch.uint8)
    numbers = bits.view(dtype) if dtype.itemsize == 1 else bits.to(dtype)
    assert compare("output", numbers[:2], numbers[:2]).agrees
    assert compare("output", numbers[:2], numbers[1:]).agrees == (dtype.itemsize == 1)
    assert not compare("output", numbers[:1], numbers[2:]).agrees


def test_pairs_of_float4_are_compared_by_their_bytes() -> None:
    pairs = torch.tensor([0x12, 0x13], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert compare("output", pairs, pairs.clone()).agrees
    assert not compare("output", pairs[:1], pairs[1:]).agrees


def test_a_piece_that_returns_float8(attention: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        scaled = (x * 3).to(torch.float8_e4m3fn)
        attention(x, out)
        return out + scaled.float()

    x = torch.randn(4, 5)
    torch.testing.assert_close(checked(fn, attention)(x), fn(x))
