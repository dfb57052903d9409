# SPDX-License-Identifier: Apache-2.0
"""``magi.check`` lets right code pass, and names piece, tensor and operator of wrong code wherever that is."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from _wrong import COS_BECOMES_SIN, Becomes, aten
from magi_backend import MismatchError, explain, magi_register_custom_op
from magi_backend._verify import blame
from magi_backend._verify.blame import CheckedPiece, readable
from magi_backend._verify.compare import Difference, compare, compare_trees
from magi_opschema import op_def
from torch import Tensor, nn
from torch.nn import functional as F


class CosBecomesSinAfterOthers(Becomes):
    """In memory that others have used."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        for node in graph.find_nodes(op="call_function", target=aten.empty.memory_format):
            node.target, node.args = aten.full.default, (node.args[0], 7.0)
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "memory_format"}


def wrong_on_the_way(x: Tensor) -> Tensor:
    y = x.relu() + 1
    z = torch.cos(y) * 2
    return z - y


@pytest.mark.kernels
def test_right_code_passes_and_is_on_record() -> None:
    linear = torch.nn.Linear(4, 4)

    def fn(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(linear(x).relu(), 0.5)

    report = explain(fn, {"magi.check": True})(torch.randn(3, 4, requires_grad=True))

    (check,) = report.compilations[-1].checks
    assert check.agrees
    assert check.compared >= 4  # an output, an input and its gradient, the parameters and theirs
    assert "Checks against eager" in report.to_text()
    assert report.agrees


def blamed(
    fn: Callable[..., Any],
    *args: Any,
    wrong: Any = COS_BECOMES_SIN,
    dynamic: bool = False,
    boundaries: Sequence[str] = (),
) -> str:
    """What the check says of *fn* where the compiler is *wrong*."""
    options: dict[str, Any] = {"magi.check": True, "magi.boundary_ops": boundaries, "post_grad_custom_pre_pass": wrong}
    with pytest.raises(MismatchError) as caught:
        torch.compile(fn, backend="magi", dynamic=dynamic, options=options)(*args)
    return str(caught.value)


def test_a_wrong_output_names_the_first_operator() -> None:
    message = blamed(wrong_on_the_way, torch.randn(5, 5))

    assert message.startswith("magi.check: graph 0: output[0] of the compiled code differs from eager by ")
    assert "The first operator that differs is cos (node cos), File" in message
    assert "z = torch.cos(y) * 2" in message


Reports = list[tuple[str, tuple[Difference, ...]]]


def piece(compiled: Callable[..., Any], eager: torch.nn.Module | Callable[..., Any], reports: Reports) -> CheckedPiece:
    return CheckedPiece(
        compiled,
        torch.fx.symbolic_trace(eager),
        "piece 0",
        names={},
        blame=lambda args, gradients: "",
        report=lambda title, found: reports.append((title, found)),
        seconds=0.0,
    )


def test_only_the_first_call_is_checked() -> None:
    reports: Reports = []
    checked_once = piece(torch.neg, lambda x: -x, reports)

    checked_once(torch.ones(3))
    checked_once(torch.ones(3))

    assert [title for title, _ in reports] == ["piece 0"]


def test_a_function_that_writes_is_checked_and_explained_on_copies() -> None:
    def fn(x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1

    compiled = torch.compile(fn, backend="magi", options={"magi.check": True})
    x = torch.ones(3)

    assert explain(fn)(x).agrees
    torch.testing.assert_close(x, torch.ones(3))
    torch.testing.assert_close(compiled(x), torch.full((3,), 3.0))
    torch.testing.assert_close(x, torch.full((3,), 2.0))


@pytest.mark.parametrize("factor", [2.0, 3.0], ids=["right", "wrong"])
def test_every_body_of_an_op_is_compared(ns: str, factor: float) -> None:
    """The eager call and the compiled one run `first`; the others would pass unseen."""

    @magi_register_custom_op(f"{ns}::double", mutates_args=["out"])
    def double(x: Tensor, out: Tensor) -> Tensor:
        out.copy_(x + x)
        return x + x

    @double.implementation(priority=1)
    def first(x: Tensor, out: Tensor) -> Tensor:
        return out.copy_(x * 2) + 0

    @double.implementation(when=lambda x: x.numel() < 9)
    def second(x: Tensor, out: Tensor) -> Tensor:
        out.copy_(x * factor)
        return x + x

    @double.implementation(when=lambda x: x.numel() > 9)
    def unfit(x: Tensor, out: Tensor) -> Tensor:
        raise AssertionError

    def fn(x: Tensor, out: Tensor) -> Tensor:
        return double(x.cos(), out) + torch.rand(3)

    explained = explain(fn, {"magi.check": True})
    if factor != 2:
        text = f"magi.check: graph 0: out after the call of eager code with the body 'second' of {ns}::double differs"
        with pytest.raises(MismatchError, match=text):
            explained(torch.ones(3), torch.ones(3))
        return
    titles = [check.piece for check in explained(torch.ones(3), torch.ones(3)).compilations[-1].checks]
    names = ["first", "second", "unfit", "default"]
    assert titles == ["graph 0", *(f"graph 0, the body '{name}' of {ns}::double" for name in names)]
    assert op_def(double).served["second"] == 1


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
            "argument[0][0] after the call",
            "argument[0][1] after the call",
        ]
        assert "The first operator that differs is cos " in blamed(wrong_on_the_way, x)


def test_a_wrong_gradient_names_the_first_operator_on_the_way_back() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        z = torch.sin(x * 2)
        return (z * y).exp().sum()

    message = blamed(fn, torch.randn(5, requires_grad=True), torch.randn(5))

    assert "gradient of x of the compiled code differs" in message
    assert "The first operator that differs on the way back from the outputs is sin (node z), File" in message


def test_the_piece_of_a_split_graph_is_named(ns: str) -> None:
    @torch.library.custom_op(f"{ns}::same", mutates_args=())
    def same(x: Tensor) -> Tensor:
        return x.clone()

    same.register_fake(torch.empty_like)
    message = blamed(lambda x: same(x + 1).cos(), torch.randn(5), boundaries=[f"{ns}::same"])

    assert "magi.check: piece 1: output[0] of the compiled code differs" in message


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
def test_float32_is_as_accurate_as_what_it_was_computed_from(options: dict[str, Any]) -> None:
    report = explain(MixedPrecision(), options)(torch.randn(32, 64))
    assert report.agrees
    assert any(d.name.startswith("gradient") and d.largest > 1e-3 for d in report.calls[-1].differences)


def test_a_wrong_operator_among_bfloat16_is_named() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.cos((x.bfloat16() @ y.bfloat16()).float())

    message = blamed(fn, torch.randn(32, 64), torch.randn(64, 16))
    assert "The first operator that differs is cos " in message


def vector(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


NAN, INF = float("nan"), float("inf")
LARGE, PAIRS = vector(30, -40, 0.125, dtype=torch.bfloat16), vector(0x12, 0x13, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("actual", "expected", "agrees"),
    [
        (vector(1.0), vector(1.00001), True),
        (vector(1.0), vector(1.1), False),
        (vector(NAN), vector(1.0), False),
        (vector(NAN), vector(NAN), True),
        (vector(INF), vector(INF), True),
        (vector(INF), vector(-INF), False),
        (vector(1, dtype=torch.int64), vector(2, dtype=torch.int64), False),
        (vector(True, dtype=torch.bool), vector(False, dtype=torch.bool), False),
        (torch.zeros(2), torch.zeros(3), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), False),
        (torch.zeros(0), torch.zeros(0), True),
        (None, torch.zeros(2), False),
        (None, None, True),
        (3, 3, True),
        # An element near zero has the error of the others.
        (LARGE + vector(0, 0, 0.5, dtype=torch.bfloat16), LARGE, True),
        (LARGE + vector(0, 0, 4.0, dtype=torch.bfloat16), LARGE, False),
        (LARGE.float() + vector(0, 0, 0.5), LARGE.float(), False),
        # Pairs of float4 are compared by their bytes.
        (PAIRS.view(torch.float4_e2m1fn_x2), PAIRS.clone().view(torch.float4_e2m1fn_x2), True),
        (PAIRS[:1].view(torch.float4_e2m1fn_x2), PAIRS[1:].view(torch.float4_e2m1fn_x2), False),
        ((torch.zeros(1),), [torch.zeros(1)], False),
    ],
)
def test_compare(actual: object, expected: object, agrees: bool) -> None:
    (difference,) = compare_trees("output", actual, expected)

    assert difference.agrees is agrees
    assert agrees or difference.largest > 0
    assert ("structure" in difference.note) is isinstance(actual, tuple)


def test_zeros_do_not_pass_for_small_gradients() -> None:
    gradient = torch.full((3,), 1e-6)

    assert compare("gradient", torch.zeros(3), gradient).agrees
    assert not compare("gradient", torch.zeros(3), gradient, scale=1e-6).agrees


@pytest.fixture
def attention(ns: str) -> Callable[[Tensor, Tensor], None]:
    """A boundary that fills what an earlier piece allocates, as the attentions of vLLM do."""

    @torch.library.custom_op(f"{ns}::attention", mutates_args=("out",))
    def attention(x: Tensor, out: Tensor) -> None:
        out.copy_(x.sin())

    attention.register_fake(lambda x, out: None)
    return attention


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

    def eager(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return ALLOCATIONS[how](x), y + 1

    reports: Reports = []
    piece(lambda x, y: (filled[1], y + 1), eager, reports)(filled[0], torch.ones(3))
    assert [difference.agrees for difference in reports[-1][1]] == [True, True]
    with pytest.raises(MismatchError, match=r"output\[1\]"):
        piece(lambda x, y: (filled[1], y + 2), eager, reports)(filled[0], torch.ones(3))


def test_a_boundary_that_fills_what_a_piece_allocates_beside_float8(attention: Any) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.relu() + 1
        out = torch.empty_like(y)
        scaled = (x * 3).to(torch.float8_e4m3fn)
        attention(y, out)
        return out.view(-1) * 2, out + scaled.float()

    options: dict[str, Any] = {"magi.check": True, "magi.boundary_ops": [attention._opoverload.name()]}
    x = torch.randn(4, 5)
    torch.testing.assert_close(torch.compile(fn, backend="magi", options=options)(x), fn(x))


def test_the_search_passes_over_memory_that_nobody_has_written(attention: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        half = torch.cos(x + 1)
        attention(half, out)
        return out + half

    wrong = CosBecomesSinAfterOthers(aten.cos.default, aten.sin.default)
    message = blamed(fn, torch.randn(4, 5), wrong=wrong, boundaries=[attention._opoverload.name()])
    assert re.search("piece 0: output.* The first operator that differs is cos ", message)


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


SINH, COSH = Becomes(aten.sinh.default), Becomes(aten.cosh.default)
SINH_BEFORE_EXP = Becomes(aten.sinh.default, before=aten.exp.default)


def written(x: Tensor) -> Tensor:
    y = x * 2
    y[0] = torch.sinh(x[0])
    y.add_(1)
    return y.relu()


def in_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x
        z = torch.sinh(y)
        return (z @ x).float()


def in_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x + 1
        z = torch.sinh(y)
    return x * z


Function = Callable[..., Tensor]
SINH_IN: dict[str, Function] = {
    "branches": lambda x: torch.stack([x.cos(), torch.sinh(x), x.exp() * 2]).sum(0),
    "items": lambda x: x.split(2)[0] * torch.sinh(x.split(2)[1]).max(dim=0).values + 1,
    "written": written,
    "autocast": in_autocast,
    "no grad": in_no_grad,
    "mapped": lambda x: torch.sinh(x + torch.vmap(Tensor.exp)(x)) * 2,
    "drops": lambda x: F.dropout(torch.sinh(F.dropout(x.relu(), 0.5) + x), 0.25) + torch.rand_like(x),
    "reshaped": lambda x: torch.sinh(x.view(x.shape[0] // 2, 2, -1)).sum(0).expand(3, 2, -1).cos(),
}


@pytest.mark.parametrize(
    "kind", [kind if kind == "branches" else pytest.param(kind, marks=pytest.mark.slow) for kind in SINH_IN]
)
def test_the_wrong_operator_is_named(kind: str) -> None:
    message = blamed(SINH_IN[kind], torch.randn(4, 4), wrong=SINH, dynamic=kind == "reshaped")

    assert "The first operator that differs is sinh (node " in message


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(torch.sinh(q) @ k.T, -1) @ v


@pytest.mark.slow
@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x, weight: (x @ weight).mul_(2).sinh_().sum(), id="in place"),
        pytest.param(lambda x, weight: attended(*(x @ weight).chunk(3, dim=-1)), id="attention"),
        pytest.param(lambda x, weight: (torch.sinh((x @ weight).sum(0).expand(4, -1)) * 3).mean(), id="expanded"),
    ],
)
def test_the_operator_with_a_wrong_gradient_is_named(fn: Function) -> None:
    weight = torch.randn(4, 12, requires_grad=True)
    message = blamed(fn, torch.randn(4, 4), weight, wrong=COSH)

    assert "gradient of weight of the compiled code differs" in message
    assert "The first operator that differs on the way back from the outputs is sinh" in message


@pytest.mark.slow
def test_the_range_is_named_where_operators_are_wrong_together_only() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.cos() * 2 + 1
        z = torch.sinh(y)
        w = z.exp()
        return (w / 3).relu() - 1

    message = blamed(fn, torch.randn(4, 4), wrong=SINH_BEFORE_EXP)

    assert "It is among 2 operators that differ when they are compiled together" in message
    assert "from sinh (node z)" in message
    assert "to exp (node w)" in message


@pytest.mark.slow
def test_a_range_is_named_where_the_search_has_used_up_what_it_may_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blame, "AT_ONCE", 1)
    monkeypatch.setattr(blame, "WAYS", 2)
    monkeypatch.setattr(blame, "MOST", 1.0)
    monkeypatch.setattr(blame, "SMALL", 1)

    def fn(x: Tensor) -> Tensor:
        y = torch.sinh(x.cos() * 2)
        return (y / 3).relu() - 1

    message = blamed(fn, torch.randn(4, 4), wrong=SINH)

    assert "It is among 3 operators" in message
    assert "from cos (node cos)" in message
    assert "to sinh (node y)" in message


def test_a_difference_that_needs_the_whole_piece_is_reported() -> None:
    message = blamed(lambda x: torch.sinh(x).exp(), torch.randn(4), wrong=SINH_BEFORE_EXP)

    assert "No shorter part of it differs when it is compiled separately, so only the whole piece goes wrong" in message


@pytest.mark.slow
def test_parameters_have_the_names_of_their_module() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4, bias=False)])

        def forward(self, x: Tensor) -> Tensor:
            return torch.sinh(self.blocks[0](x))

    assert "gradient of blocks.0.weight of the compiled" in blamed(Scaled(), torch.randn(4, 4), wrong=COSH)


def test_a_written_input_has_its_name() -> None:
    def fn(x: Tensor, state: Tensor) -> Tensor:
        state.copy_(torch.sinh(x))
        return x + 1

    message = blamed(fn, torch.randn(4), torch.zeros(4), wrong=SINH)
    assert "magi.check: graph 0: state after the call of the compiled" in message


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['self']._modules['blocks']._modules['0']._parameters['weight']", "blocks.0.weight"),
        ("L['self']._buffers['mean']", "mean"),
        ("L['self'].scale", "scale"),
        ("G['net']._modules['up']._parameters['bias']", "net.up.bias"),
        ("L['cfg'].inner['mask'][0]", "cfg.inner['mask'][0]"),
        ("L['x']", "x"),
        ("___as_tensor(s0)", ""),
    ],
)
def test_sources_are_read(source: str, name: str) -> None:
    assert readable(source) == name


def test_the_cost_is_said_before_the_search(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def search(*_: object, **__: object) -> str:
        said.extend(caplog.messages)
        return "It is that one."

    monkeypatch.setattr("magi_backend._compose.first_operator", search)
    with caplog.at_level(logging.WARNING, "magi_backend"):
        message = blamed(torch.sinh, torch.randn(4), wrong=SINH)

    (line,) = said
    assert "magi.check: graph 0: output[0] of the compiled code differs from eager by" in line
    assert "Searching for the operator, which takes about " in line
    assert " s, at most about " in line
    assert message.endswith("It is that one.")


def test_a_failed_search_is_reported_with_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> str:
        msg = "no room"
        raise MemoryError(msg)

    monkeypatch.setattr("magi_backend._compose.first_operator", fails)
    message = blamed(torch.sinh, torch.randn(4), wrong=SINH)

    assert message.startswith("magi.check: graph 0: output[0] of the compiled code differs from eager by")
    assert message.endswith("The search for the operator failed with MemoryError: no room")
