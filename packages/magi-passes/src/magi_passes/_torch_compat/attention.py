# SPDX-License-Identifier: Apache-2.0
"""Operators that choose the kernel of attention when they are called. All releases.

``magi_passes::scaled_dot_product_attention`` and its backward have the schemas of
``aten::_scaled_dot_product_cudnn_attention`` and of its backward. Each calls that operator if there is a plan for the
lengths, and else one that needs none. Flash attention and cuDNN save the same: the natural logarithm of the sum of
powers, for each query. So either backward follows either forward.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import compiling


SECONDS_OF_A_PLAN = 0.065
LOST_BY_A_CALL, LOST_BY_A_KEY, LOST_BY_A_PRODUCT = 1e-5, 6.4e-13, 5.6e-15
"""The seconds that a call without cuDNN loses: as such, for each number of the keys, and for each of these that is
multiplied by one of a query. As measured on an H200 with torch 2.11 (docs/performance.md)."""
LOST_BY_A_BACKWARD = 2.6
"""How many times as much a backward loses by its products."""
AT_ONCE = 4
"""How many lengths of a kind have a plan at once."""
MOST_LENGTHS = 4096
"""How many lengths without a plan are remembered."""
MOST_SEQUENCES = 65535
"""The extents of a grid along y and z, which are the sequences and their heads."""

_aten = torch.ops.aten


class Plans:
    """Which lengths have a plan, and what the calls of the others have lost.

    A length is the shapes of the queries and keys of one kind: heads, a dtype, and one form of the kernel.
    """

    def __init__(self) -> None:
        self._planned: set[tuple[Any, ...]] = set()
        self._lost: dict[tuple[Any, ...], float] = {}
        self._of_kind: Counter[tuple[Any, ...]] = Counter()
        self._lock = threading.Lock()

    def has_one(self, query: Tensor, key: Tensor, is_biased: bool, is_causal: bool, is_backward: bool) -> bool:
        """Whether the call of this length may use its plan, or make it. If not, what the call loses is counted."""
        length = (query.shape, key.shape, query.dtype, is_biased, is_causal, is_backward)
        if length in self._planned or not _is_for_others(query, key, is_causal):
            return True
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # a plan cannot be made now
        with self._lock:
            lost = self._lost.pop(length, None)
            if lost is None:
                kind = (query.shape[1], key.shape[1], query.shape[3], *length[2:])
                self._of_kind[kind] += 1
                lost = math.inf if self._of_kind[kind] <= AT_ONCE else 0.0
            if lost >= SECONDS_OF_A_PLAN:
                self._planned.add(length)
                return True
            queries = query.shape[1] * query.shape[2] / key.shape[1]
            products = queries * (0.5 if is_causal else 1.0) * (LOST_BY_A_BACKWARD if is_backward else 1.0)
            self._lost[length] = lost + LOST_BY_A_CALL + key.numel() * (LOST_BY_A_KEY + LOST_BY_A_PRODUCT * products)
            if len(self._lost) > MOST_LENGTHS:
                del self._lost[next(iter(self._lost))]  # the one whose last call is longest ago
        return False


def _is_for_others(query: Tensor, key: Tensor, is_causal: bool) -> bool:
    """Whether the other kernels compute what cuDNN does for these sizes.

    For fewer queries than keys, flash attention takes the last query to be causal with all keys, and torch the first
    one with the first. Sequences are an extent of its grid.
    """
    is_square = query.shape[2] == key.shape[2]
    return bool(key.numel()) and (is_square or not is_causal) and query.shape[0] <= MOST_SEQUENCES


def _attention(
    plans: Plans,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    given = (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask)
    if plans.has_one(query, key, attn_bias is not None, is_causal, False):
        return _aten._scaled_dot_product_cudnn_attention.default(*given, scale=scale)  # type: ignore[no-any-return]
    if attn_bias is None:
        flash = _aten._scaled_dot_product_flash_attention.default
        out, powers, *_ = flash(query, key, value, 0.0, is_causal, scale=scale)
        powers = powers.unsqueeze(-1)
    else:
        efficient, bias = _aten._scaled_dot_product_efficient_attention.default, _aligned(attn_bias, query, key)
        out, powers, *_ = efficient(query, key, value, bias, False, 0.0, is_causal, scale=scale)
    # Without dropout, a backward is given seeds that it does not read.
    seeds = [torch.empty((), dtype=torch.int64, device=query.device) if compute_log_sumexp else None for _ in range(2)]
    return _with_strides_of(query, out), powers, None, None, query.shape[2], key.shape[2], *seeds, None


def _attention_backward(
    plans: Plans,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    powers: Tensor,
    *rest: Any,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    seed, offset, *_, is_causal = rest
    if plans.has_one(query, key, False, is_causal, True):
        cudnn = _aten._scaled_dot_product_cudnn_attention_backward.default
        return cudnn(grad_out, query, key, value, out, powers, *rest, scale=scale)  # type: ignore[no-any-return]
    flash = _aten._scaled_dot_product_flash_attention_backward.default
    saved = (out, powers.squeeze(-1), None, None, query.shape[2], key.shape[2])
    grads = flash(grad_out, query, key, value, *saved, 0.0, is_causal, seed, offset, scale=scale)
    return tuple(map(_with_strides_of, (query, key, value), grads))


def _aligned(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """*bias* for each score, in rows that start at multiples of 16 bytes, as its kernel wants them."""
    bias = bias.expand(*bias.shape[:-1], key.shape[2])
    starts = (bias.data_ptr() // bias.itemsize, *bias.stride()[:-1])
    if bias.stride(-1) != 1 or any(start % 8 for start in starts):
        bias = torch.nn.functional.pad(bias, (0, -key.shape[2] % 8))[..., : key.shape[2]]
    return bias.expand(*query.shape[:3], key.shape[2])


def _with_strides_of(given: Tensor, result: Tensor) -> Tensor:
    """*result* with the strides of ``empty_like(given)``, which are those of the results of cuDNN."""
    if result.stride() == given.stride() or result.stride() == torch.empty_like(given, device="meta").stride():
        return result
    return torch.empty_like(given).copy_(result)


@functools.cache
def operators() -> dict[Any, Any]:
    """The operators of cuDNN's attention, and for each the one that chooses a kernel when it is called."""
    # No global variable has the plans, since cache keys depend on what the functions of a pass name.
    library, plans, chosen = compiling.library(), Plans(), dict[Any, Any]()
    cudnn = _aten._scaled_dot_product_cudnn_attention, _aten._scaled_dot_product_cudnn_attention_backward
    bodies: tuple[Callable[..., Any], ...] = (_attention, _attention_backward)
    for packet, body in zip(cudnn, bodies, strict=True):
        planned = packet.default
        name = planned._schema.name.removeprefix("aten::_").replace("cudnn_", "")
        library.define(str(planned._schema).replace(planned._schema.name, name))
        chosen[planned] = op = getattr(torch.ops.magi_passes, name).default
        op.body = functools.partial(body, plans)
        library.impl(name, op.body, "CUDA")
        library.impl(name, planned, "Meta")
    return chosen


@functools.cache
def call_bodies() -> None:
    """Let generated code call the bodies of these operators, without torch's dispatcher, which takes 4 microseconds."""
    from torch._inductor.lowering import fallback_handler, register_lowering

    def lower(op: Any, *args: Any, **kwargs: Any) -> Any:
        results = fallback_handler(op, add_to_fallback_set=False)(*args, **kwargs)
        call = results[0].data.data.inputs[0]
        call.python_kernel_name += ".body"
        return results

    for op in operators().values():
        register_lowering(op, type_promotion_kind=None)(functools.partial(lower, op))
