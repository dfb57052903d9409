# SPDX-License-Identifier: Apache-2.0
"""``magi.check`` names the operator that is wrong, wherever it is in the graph, or a range that contains it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _wrong import Becomes, aten
from magi_backend import MismatchError
from magi_backend._verify import blame
from magi_backend._verify.blame import readable
from torch import Tensor, nn


SINH, COSH = Becomes(aten.sinh.default), Becomes(aten.cosh.default)
SINH_BEFORE_EXP = Becomes(aten.sinh.default, before=aten.exp.default)


def blamed(fn: Callable[..., Any], *args: Any, wrong: Becomes = SINH, dynamic: bool = False) -> str:
    options: dict[str, Any] = {"magi.check": True, "post_grad_custom_pre_pass": wrong}
    with pytest.raises(MismatchError) as caught:
        torch.compile(fn, backend="magi", dynamic=dynamic, options=options)(*args)
    return str(caught.value)


def branches(x: Tensor) -> Tensor:
    a, b, c = x.cos(), torch.sinh(x), x.exp()
    d = c * 2
    return a + d + b


def written(x: Tensor) -> Tensor:
    y = x * 2
    y[0] = torch.sinh(x[0])
    y.add_(1)
    return y.relu()


def by_items(x: Tensor) -> Tensor:
    a, b = x.split(2)
    largest: Tensor = torch.sinh(b).max(dim=0).values
    product: Tensor = a * largest
    return product + 1


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


def mapped(x: Tensor) -> Tensor:
    mapped_rows: Tensor = torch.vmap(Tensor.exp)(x)
    return torch.sinh(x + mapped_rows) * 2


def with_drops(x: Tensor) -> Tensor:
    y = nn.functional.dropout(x.relu(), 0.5)
    return nn.functional.dropout(torch.sinh(y + x), 0.25) + torch.rand_like(x)


def reshaped(x: Tensor) -> Tensor:
    rows = x.view(x.shape[0] // 2, 2, -1)
    return torch.sinh(rows).sum(0).expand(3, 2, -1).cos()


MORE = [written, by_items, in_autocast, in_no_grad, mapped, with_drops, reshaped]


@pytest.mark.parametrize("fn", [branches, *(pytest.param(fn, marks=pytest.mark.slow, id=fn.__name__) for fn in MORE)])
def test_the_wrong_operator_is_named(fn: Callable[[Tensor], Tensor]) -> None:
    message = blamed(fn, torch.randn(4, 4), dynamic=fn is reshaped)

    assert "The first operator that differs is sinh (node " in message


def attention(x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = (x @ weight).chunk(3, dim=-1)
    return nn.functional.softmax(torch.sinh(q) @ k.T, -1) @ v


def drawn_out(x: Tensor, weight: Tensor) -> Tensor:
    y = (x @ weight).sum(0, keepdim=True).expand(4, -1)
    return (torch.sinh(y) * 3).mean()


def in_place(x: Tensor, weight: Tensor) -> Tensor:
    y = x @ weight
    y.mul_(2)
    torch.sinh_(y)
    return y.sum()


@pytest.mark.slow
@pytest.mark.parametrize("fn", [in_place, attention, drawn_out])
def test_the_operator_with_a_wrong_gradient_is_named(fn: Callable[[Tensor, Tensor], Tensor]) -> None:
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

    message = blamed(fn, torch.randn(4, 4))

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

    assert "magi.check: graph 0: state after the call of the compiled" in blamed(fn, torch.randn(4), torch.zeros(4))


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
        message = blamed(torch.sinh, torch.randn(4))

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
    message = blamed(torch.sinh, torch.randn(4))

    assert message.startswith("magi.check: graph 0: output[0] of the compiled code differs from eager by")
    assert message.endswith("The search for the operator failed with MemoryError: no room")
