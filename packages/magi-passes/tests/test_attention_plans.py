# SPDX-License-Identifier: Apache-2.0
"""Lengths that vary have cuDNN's plans when they have paid for them; test_gpu.py has the numbers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_passes import calls, rewritten
from magi_passes import AttentionPlansPass, PassContext
from magi_passes._torch_compat import attention
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext


aten = torch.ops.aten
FORWARD, BACKWARD = attention.operators().values()


def _graph(
    *,
    varies: bool = True,
    keys: int = 4,
    numbers: int = 64,
    is_biased: bool = False,
    trains: bool = False,
    drop: float = 0,
) -> GraphModule:
    """A graph of what torch calls for attention on an H200, and of its backward if it *trains*."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    kinds = [DimDynamic.DYNAMIC if varies and dim == 2 else DimDynamic.STATIC for dim in range(4)]
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
    long = mode.from_tensor(torch.empty(2, 4, 130, numbers, device="meta"), symbolic_context=context).shape[2]
    with mode:
        q, k, v = (torch.empty(2, n, long, numbers, dtype=torch.bfloat16, device="cuda") for n in (4, keys, keys))
        bias = torch.empty(long, long, dtype=torch.bfloat16, device="cuda") if is_biased else None

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Any:
        out, lse, starts, ends, most, fewest, seed, offset, _ = aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, bias, trains, drop
        )
        if not trains:
            return out.neg()
        return aten._scaled_dot_product_cudnn_attention_backward.default(
            out, q, k, v, out, lse, seed, offset, bias, starts, ends, most, fewest, drop, False
        )

    return make_fx(attend)(q, k, v, bias)


@pytest.mark.parametrize(
    ("form", "count"),
    [
        ({}, 1),
        ({"trains": True}, 2),
        ({"keys": 2}, 1),
        ({"is_biased": True}, 1),
        ({"is_biased": True, "keys": 2}, 0),
        ({"is_biased": True, "trains": True}, 0),
        ({"varies": False}, 0),
        ({"numbers": 512}, 0),
        ({"drop": 0.1}, 0),
        ({"drop": 0.1, "trains": True}, 0),
    ],
)
def test_which_calls_choose_when_they_run(form: dict[str, Any], count: int) -> None:
    gm = _graph(**form)
    reason = AttentionPlansPass().is_applicable(gm.graph, PassContext())
    assert reason.text == f"{count} attentions by cuDNN have symbolic lengths"
    if count:
        gm = rewritten(gm, AttentionPlansPass())
    assert len(calls(gm, FORWARD)) + len(calls(gm, BACKWARD)) == count


def test_not_for_kernels_that_must_be_deterministic_or_for_code_in_another_language() -> None:
    graph = _graph().graph
    in_cpp = PassContext(config={**PassContext().config, "cpp_wrapper": True})
    assert not AttentionPlansPass().is_applicable(graph, in_cpp)
    torch.use_deterministic_algorithms(True)
    try:
        assert not AttentionPlansPass().is_applicable(graph, PassContext())
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_operators_have_the_results_of_those_of_cudnn() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 7, 4, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        for planned, ours in attention.operators().items():
            given = (
                (q, q, q, None, True) if ours is FORWARD else (q, q, q, q, q, q, q, q, *[None] * 3, 7, 7, 0.0, False)
            )
            expected, found = planned(*given), ours(*given)
            assert [getattr(x, "shape", x) for x in found] == [getattr(x, "shape", x) for x in expected]
            assert found[0].stride() == expected[0].stride() == q.stride()


def test_a_process_that_imports_the_package_runs_code_from_a_cache() -> None:
    program = """
import sys
import magi_passes
import torch
assert "torch._inductor.lowering" not in sys.modules
for name in ("scaled_dot_product_attention", "scaled_dot_product_attention_backward"):
    assert callable(getattr(torch.ops.magi_passes, name).default.body)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def _queries(length: int, heads: int = 4) -> Tensor:
    return torch.empty(1, heads, length, 64, device="meta")


def test_the_first_lengths_of_a_kind_have_a_plan_at_once() -> None:
    plans = attention.Plans()
    had = [plans.has_one(_queries(n), _queries(n), False, False, False) for n in range(1, 9)]
    assert had == [True] * attention.AT_ONCE + [False] * (8 - attention.AT_ONCE)
    assert plans.has_one(_queries(1), _queries(1), False, False, False)
    for form in ((True, False, False), (False, True, False), (False, False, True)):
        assert plans.has_one(_queries(8), _queries(8), *form)
    assert plans.has_one(_queries(8, heads=8), _queries(8), False, False, False)


def test_a_longer_length_pays_for_its_plan_in_fewer_calls() -> None:
    plans = attention.Plans()
    for n in range(1, 1 + attention.AT_ONCE):
        plans.has_one(_queries(n), _queries(n), False, False, False)

    def until_it_has_one(length: int) -> int:
        calls = 0
        while not plans.has_one(_queries(length), _queries(length), False, False, False):
            calls += 1
        return calls

    # A call of 4 heads and 8,192 queries and keys of 64 numbers loses 0.11 ms, one of 8 queries 0.01 ms.
    assert [until_it_has_one(8), until_it_has_one(8192)] == [6500, pytest.approx(570, rel=0.1)]


@pytest.mark.parametrize(
    ("queries", "keys", "batch", "is_causal"),
    [(9, 0, 1, False), (0, 0, 1, True), (9, 8, 1, True), (9, 9, 70000, False)],
)
def test_what_the_other_kernels_do_not_compute_stays(queries: int, keys: int, batch: int, is_causal: bool) -> None:
    plans = attention.Plans()
    for more in range(2 * attention.AT_ONCE):
        query, key = (_queries(0 if n == 0 else n + more).expand(batch, -1, -1, -1) for n in (queries, keys))
        assert plans.has_one(query, key, False, is_causal, False)


@given(st.lists(st.integers(1, 12), max_size=300), st.integers(1, 6))
def test_any_order_takes_at_most_twice_the_best_and_the_plans_at_once(order: list[int], gain: int) -> None:
    """Each call without a plan loses *gain*, and a plan costs 6."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SECONDS_OF_A_PLAN", 6.0)
        patch.setattr(attention, "LOST_BY_A_CALL", float(gain))
        patch.setattr(attention, "LOST_BY_A_KEY", 0.0)
        patch.setattr(attention, "LOST_BY_A_PRODUCT", 0.0)
        plans, taken, planned = attention.Plans(), 0, set[int]()
        for n in order:
            if plans.has_one(_queries(n), _queries(n), False, False, False):
                taken += 0 if n in planned else 6
                planned.add(n)
            else:
                assert n not in planned
                taken += gain
    best = sum(min(6, gain * order.count(n)) for n in set(order))
    # The last call before a plan may lose more than the rest of its price.
    assert taken <= 2 * best + len(set(order)) * gain + 6 * attention.AT_ONCE


def test_lengths_without_a_plan_are_forgotten_in_the_order_of_their_last_calls() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MOST_LENGTHS", 2)
        patch.setattr(attention, "AT_ONCE", 0)
        patch.setattr(attention, "SECONDS_OF_A_PLAN", 1.5e-5)  # two calls
        plans = attention.Plans()
        had = [plans.has_one(_queries(n), _queries(n), False, False, False) for n in (1, 2, 1, 1, 3, 4, 2, 2, 2, 2, 1)]
        # 1 has had its calls and keeps its plan; 2 begins anew after 3 and 4.
        assert had == [False, False, False, True, False, False, False, False, True, True, True]
