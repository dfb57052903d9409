# SPDX-License-Identifier: Apache-2.0
"""``magi.check`` lets right code pass, and names piece, tensor and first operator of wrong code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from magi_backend import MismatchError, explain
from magi_backend._verify.check import CheckedPiece
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
