# SPDX-License-Identifier: Apache-2.0
"""Several bodies of one op: which one serves a call, and that they agree."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from magi_opschema import magi_register_custom_op, op_def, opcheck, use_implementation
from magi_opschema.errors import EnvironmentVariableError, FakeMismatchError, RuleError
from torch import Tensor


@dataclass(frozen=True)
class Scale:
    factor: float = 2.0
    rows: int = 2


def new_op(name: str, **options: Any) -> Any:
    """An op that multiplies, registered anew."""

    @magi_register_custom_op(f"implementations::{name}", infer_output_meta_fn=["x"], override=True, **options)
    def scaled(x: Tensor, cfg: Scale = Scale(), *, twice: bool = False) -> Tensor:
        return x * cfg.factor * (1 + twice)

    return scaled


def other(x: Tensor, cfg: Scale = Scale(), *, twice: bool = False) -> Tensor:
    return (x + x * twice) * cfg.factor


def test_the_first_that_serves_a_call_runs_by_priority_and_else_the_op_s_own_body() -> None:
    op = new_op("order")
    x = torch.ones(2, 3)
    assert op_def(op).served == {}
    op(x)  # its kernel is compiled before it has implementations
    op.implementation(other, name="anything")
    op.implementation(other, name="rows", priority=2, when=lambda x, cfg: x.shape[0] == cfg.rows)
    op.implementation(other, name="doubles", priority=1, dtypes=(torch.float64,), devices=("cpu",))
    op.implementation(other, name="hopper", priority=3, capability=(9, 0))
    assert [one.name for one in op_def(op).implementations] == ["hopper", "rows", "doubles", "anything"]
    for given, served in ((x, "rows"), (x[:1].double(), "doubles"), (x[:1], "anything")):
        before = op_def(op).served.get(served, 0)
        torch.testing.assert_close(op(given, twice=True), given * 4)
        assert op_def(op).served[served] == before + 1
    assert op_def(op).served == {"rows": 1, "doubles": 1, "anything": 1}
    with use_implementation(op, "default"), use_implementation(op, "doubles"):
        op(x)  # which it does not serve
    assert op_def(op).served["default"] == 1
    assert re.search(
        r"body +rows at test_implementations.py:\d+, priority 2, when at test_implementations", str(op_def(op))
    )
    op(x[:1])
    assert op_def(op).served["anything"] == 2


def test_gradients_vmap_and_compiled_code_have_the_choice() -> None:
    op = new_op(
        "rules", setup_context_fn=lambda ctx, inputs, output: None, backward_fn=lambda ctx, grad: (grad * 2, None, None)
    )
    op.implementation(when=lambda x: x.shape[0] < 4)(other)
    x = torch.ones(3, requires_grad=True)
    op(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3
    compiled: Any = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5, 3):
        torch.testing.assert_close(compiled(torch.ones(rows)), torch.full((rows,), 2.0))
    assert op_def(op).served == {"other": 3, "default": 1}
    torch.testing.assert_close(torch.vmap(op)(torch.ones(2, 3)), torch.full((2, 3), 2.0))
    with ThreadPoolExecutor(4) as pool:
        assert all(out.sum() == 6 for out in pool.map(op, [torch.ones(3)] * 100))


def test_the_first_real_call_of_each_is_compared_with_the_fake() -> None:
    op = new_op("fake")
    op(torch.ones(2))

    @op.implementation(when=lambda x: x.dim() == 2)
    def flat(x: Tensor, cfg: Scale = Scale(), *, twice: bool = False) -> Tensor:
        return x.flatten() * cfg.factor

    op(torch.ones(2))
    with pytest.raises(FakeMismatchError, match=rf"{flat.__code__.co_firstlineno + 1}\)$"):
        op(torch.ones(2, 2))


def test_opcheck_compares_each_with_the_op_s_own_body() -> None:
    op = new_op("compared")
    op.implementation(other, name="right")
    op.implementation(other, name="elsewhere", devices=("meta",))
    results = opcheck(op, (torch.ones(2), Scale(3.0)), test_utils="test_schema")
    assert results["implementation right"] == "SUCCESS"
    assert results["implementation elsewhere"].startswith("SKIPPED")

    @op.implementation(when=lambda twice: twice)
    def forgetful(x: Tensor, cfg: Scale = Scale(), *, twice: bool = False) -> Tensor:
        return x * cfg.factor

    with pytest.raises(RuleError, match="the implementation forgetful at .* differs from the op's own body: "):
        opcheck(op, (torch.ones(2),), {"twice": True}, test_utils="test_schema")
    found: Any = opcheck(op, (torch.ones(2),), {"twice": True}, test_utils="test_schema", raise_exception=False)
    assert isinstance(found["implementation forgetful"], RuleError)


def test_the_environment_names_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGI_OPSCHEMA_IMPLEMENTATIONS", "other::op=x, implementations::named=slow")
    op = new_op("named")
    op.implementation(other, name="fast", priority=1)
    with pytest.raises(RuleError, match="named has no implementation 'slow'. There are fast, default"):
        op(torch.ones(1))
    op.implementation(other, name="slow")
    op(torch.ones(1))
    assert op_def(op).served == {"slow": 1}
    monkeypatch.setenv("MAGI_OPSCHEMA_IMPLEMENTATIONS", "implementations::named")
    with pytest.raises(
        EnvironmentVariableError, match="'implementations::named' is not 'namespace::op=implementation'"
    ):
        new_op("named").implementation(other)


@pytest.mark.parametrize(
    ("add", "sentence"),
    [
        (lambda op: op.implementation(other, name="default"), r"'default' \(str\) cannot be the name of an implement"),
        (lambda op: op.implementation(other, priority=1.5), r"priority=1.5 \(float\) is not an int"),
        (lambda op: op.implementation(lambda x: x), r"the body takes \(x\), expected \(x, cfg, twice\)"),
        (
            lambda op: op.implementation(other, when=lambda cgf: True),
            "when asks for 'cgf', but the op has no such parameter. Did you mean 'cfg'?",
        ),
        (lambda op: op.implementation(other, when=3), r"when=3 \(int\) does not say what it takes"),
        (lambda op: op.implementation(other, devices="cuda"), r"devices='cuda' is a string; give a collection"),
        (lambda op: op.implementation(other, dtypes=()), r"dtypes=\(\) must be a collection of dtype"),
        (lambda op: op.implementation(other, capability=9), r"capability=9 must be two ints, such as \(9, 0\)"),
        (lambda op: [op.implementation(other), op.implementation(other)], "it has an implementation 'other' already"),
        (lambda op: use_implementation(op, "othr").__enter__(), "has no implementation 'othr'. There are default"),
    ],
)
def test_what_is_refused(add: Callable[[Any], object], sentence: str) -> None:
    with pytest.raises(RuleError, match=sentence):
        add(new_op("refused"))
