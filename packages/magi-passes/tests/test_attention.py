# SPDX-License-Identifier: Apache-2.0
"""Attention that is written out becomes the operator, with the same numbers, strides and gradients, or stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from magi_passes import AttentionMaskPass, PassContext, WrittenAttentionPass
from torch import Tensor
from torch.fx import GraphModule


F = torch.nn.functional
LENGTH = 131


def transformers_form(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.125
    scores = F.softmax(scores + bias, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(scores, p=0.1, training=False), v).transpose(1, 2).contiguous()


def causal(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    seen = torch.tril(torch.ones(q.shape[2], q.shape[2], device=q.device))[None, None]
    out = F.softmax(scores.masked_fill(seen == 0, float("-inf")), dim=-1) @ v
    return out.transpose(1, 2).contiguous().view(out.shape[0], q.shape[2], -1) + bias.sum()


def biased_and_scaled_in_place(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = (q @ k.mT - bias) / 8
    scores *= 0.5
    return torch.softmax(scores, -1) @ v


def sums_of_products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    scores = torch.einsum("bihd, bjhd -> bhij", q, k).float() * 0.125 + 3
    return torch.einsum("bhij,bhjd->bihd", scores.softmax(-1).type_as(v), v)


def batches_of_matrices(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    scores = torch.baddbmm(bias.expand(-1, 4, -1, -1).flatten(0, 1), q, k.transpose(-1, -2), alpha=0.125)
    return torch.bmm(scores.softmax(dim=-1), v)


def temperature_and_rows_hidden_in_whole(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    hidden = (bias > 0.5) | (torch.arange(bias.shape[2], device=q.device) == 5)[:, None]
    scores = (q @ k.mT / q.new_tensor(9.0)) * q.new_ones(4, 1, 1)
    return scores.masked_fill(hidden, torch.finfo(q.dtype).min).softmax(-1) @ v


def some_are_replaced_then_biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.where(bias[:1] > 0.1, 0.125 * (q @ k.mT), torch.tensor(-math.inf, device=q.device)) + bias
    scores.masked_fill_(bias < -0.9, -math.inf)
    return (scores.softmax(3) @ v).view(-1, 64)


FORMS = [
    *(transformers_form, causal, biased_and_scaled_in_place, sums_of_products, batches_of_matrices),
    *(temperature_and_rows_hidden_in_whole, some_are_replaced_then_biased),
]


def attention_inputs(
    dtype: torch.dtype = torch.float32, length: int = LENGTH, device: str = "cpu"
) -> tuple[Tensor, ...]:
    """Queries, keys and values of two sequences with four heads, and a bias."""
    torch.manual_seed(0)
    operands = [torch.randn(2, length, 4, 64).to(device, dtype).transpose(1, 2) for _ in range(3)]
    return *operands, torch.randn(2, 1, length, length).to(device, dtype)


def _rewritten(form: Callable[..., Any], given: tuple[Tensor, ...]) -> tuple[Callable[..., Any], list[str]]:
    """*form* captured for any length and rewritten, and the reasons of the two passes."""
    reasons: list[str] = []

    def rewrite(gm: GraphModule, _inputs: object) -> Callable[..., Any]:
        for part in (WrittenAttentionPass(), AttentionMaskPass()):
            reason = part.is_applicable(gm.graph, PassContext())
            reasons.append(reason.text)
            if reason:
                part(gm.graph)
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    for x in given:
        torch._dynamo.mark_dynamic(x, 2)
    torch._dynamo.mark_dynamic(given[3], 3)
    rewritten = torch.compile(form, backend=rewrite)
    rewritten(*given)
    return rewritten, reasons


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_numbers_strides_and_gradients_are_those_of_eager(form: Callable[..., Tensor]) -> None:
    rewritten, reasons = _rewritten(form, attention_inputs())
    assert reasons[0] == "1 attentions are written out"
    assert ("1 what comes later" in reasons[1]) is (form is causal)
    for length, needs_gradients in [(LENGTH, False), (144, False), (LENGTH, True), (144, True)]:
        results = []
        for call in (form, rewritten):
            given = [x.requires_grad_(needs_gradients) for x in attention_inputs(length=length)]
            out = call(*given)
            loss = out.square().sum()
            gradients = torch.autograd.grad(loss, given, materialize_grads=True) if needs_gradients else ()
            results.append((out, *gradients))
        assert results[0][0].stride() == results[1][0].stride()
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-3)
    with torch.no_grad():
        half = attention_inputs(torch.bfloat16)
        exact = form(*(x.double() for x in half)) if form is not causal else form(*(x.float() for x in half))
        assert (rewritten(*half) - exact).abs().max() < 0.05 * exact.abs().max()


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / 8


def softmax_over_queries(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return _scores(q, k).softmax(-2) @ v


def two_softmaxes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return _scores(q, k).softmax(-1).softmax(-1) @ v


def the_softmax_is_read(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights = _scores(q, k).softmax(-1)
    return weights @ v, weights


def a_factor_of_each_key(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (_scores(q, k) * bias).softmax(-1) @ v


def divided_by_scores(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (3.0 / (_scores(q, k).abs() + 1)).softmax(-1) @ v


def negated(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (1.0 - _scores(q, k)).softmax(-1) @ v


def added_twice(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.add(_scores(q, k), bias, alpha=2).softmax(-1) @ v


def masked_with_a_small_number(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return _scores(q, k).masked_fill(bias > 0, -100.0).softmax(-1) @ v


def masked_then_scaled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (_scores(q, k).masked_fill(bias > 0, -1e4) * 1e-4).softmax(-1) @ v


def changed_after_the_softmax(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k)
    out = scores.softmax(-1) @ v
    return out, scores.mul_(2)


def rounded_down(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.div(q @ k.mT, 8, rounding_mode="floor").softmax(-1) @ v


def values_are_changed_in_between(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores, keys = q @ k.mT, k
    keys.mul_(2)
    return scores.softmax(-1) @ v


def a_precise_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (_scores(q, k) + bias.double()).softmax(-1).float() @ v


def few_keys(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return _scores(q, k[:, :, :77]).softmax(-1) @ v[:, :, :77]


def values_from_the_left(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return v.mT @ _scores(q, k).softmax(-1)


def without_gradients_of_scores(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    with torch.no_grad():
        weights = _scores(q, k).softmax(-1)
    return weights @ v


def in_less_precision(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return _scores(q, k).bfloat16().float().softmax(-1) @ v


def a_random_one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.dropout(_scores(q, k).softmax(-1), 1e-9) @ v


KEPT = [
    *(softmax_over_queries, two_softmaxes, the_softmax_is_read, a_factor_of_each_key, divided_by_scores, negated),
    *(
        added_twice,
        masked_with_a_small_number,
        rounded_down,
        values_are_changed_in_between,
        changed_after_the_softmax,
        a_precise_bias,
        few_keys,
    ),
    *(values_from_the_left, without_gradients_of_scores, in_less_precision, a_random_one),
]


@pytest.mark.parametrize("form", KEPT, ids=lambda form: form.__name__)
def test_what_is_not_that_attention_stays(form: Callable[..., Any]) -> None:
    rewritten, reasons = _rewritten(form, attention_inputs())
    assert set(reasons) == {"0 attentions are written out", "no mask of attention"}
    torch.testing.assert_close(rewritten(*attention_inputs()), form(*attention_inputs()), rtol=1e-4, atol=1e-3)


def test_nothing_is_rewritten_where_kernels_must_be_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        _, reasons = _rewritten(transformers_form, attention_inputs())
    finally:
        torch.use_deterministic_algorithms(False)
    assert reasons[0] == "0 attentions are written out"
