# SPDX-License-Identifier: Apache-2.0
"""What a package with an operator should test: torch's own checks, gradients, and one graph."""

from __future__ import annotations

import torch
from magi_opschema import op_def, opcheck
from rowscale import Scale, scale_rows


X = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64, requires_grad=True)
FACTORS = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)


def test_schema() -> None:
    expected = "scale_rows(Tensor x, Tensor factors, float cfg__power=1.0) -> Tensor"

    assert str(op_def(scale_rows).lowering.schema) == expected


def test_values() -> None:
    assert scale_rows(X, FACTORS, Scale(power=2.0)).tolist() == [[4.0, 8.0], [27.0, 36.0]]


def test_opcheck() -> None:
    assert set(opcheck(scale_rows, (X, FACTORS)).values()) == {"SUCCESS"}


def test_gradients() -> None:
    assert torch.autograd.gradcheck(lambda x, factors: scale_rows(x, factors, Scale(1.5)), (X, FACTORS))


def test_one_graph() -> None:
    compiled = torch.compile(scale_rows, backend="aot_eager", fullgraph=True)

    torch.testing.assert_close(compiled(X, FACTORS, Scale(0.5)), scale_rows(X, FACTORS, Scale(0.5)))
