# SPDX-License-Identifier: Apache-2.0
"""Attention with heads that are too wide for the fast kernels, as two matrix products and a softmax.

Flash attention and cuDNN take heads of at most 256 numbers. The decoder of an image has one head as wide as its
channels, 384, 512 or more, and so gets the kernel for all other cases (``fmha_cutlassF``), at a quarter of the speed
of a matrix product. Products have to store the scores of all queries and keys, so this is for sequences up to a limit,
which is a guard; longer ones compile once more, and keep the kernel.

    scores = (query @ key.mT) * scale    # float32, as in that kernel
    powers = exp(scores - scores.amax(-1, True))
    out = (powers.to(value.dtype) @ value) / powers.sum(-1, True)

The division comes last, as in flash attention, so that the scores are read twice and not three times. Keys and values
are padded with zeros to a multiple of 16, because a row of scores that starts at an odd address is read and multiplied
number by number.

On one H200 (torch 2.11, bfloat16), the kernel takes 3.66 ms for 16,384 queries and keys of 512 numbers, a sixth of the
decoder of Stable Diffusion XL.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from magi_passes._framework.compilation import PassContext, Reason
from magi_passes._framework.graph_pass import CheckedPass
from magi_passes._graph.nodes import (
    CONVERT,
    Writer,
    aten,
    hinted,
    is_half_on_cuda,
    operands_of,
    product_in_float32,
    replace_by,
)
from magi_passes._graph.strides import strides_kept


WIDEST_OF_FAST_KERNELS = 256
FEWEST_SCORES, MOST_SCORES = 2**20, 2**28
"""Fewer take no time; as many take 1.6 GB, in float32 and in half precision."""
ALIGNED = 16
"""What Triton wants of a stride to read 16 bytes at once; cuBLAS is content with 8 numbers."""


@dataclass(frozen=True)
class WideHeadsPass(CheckedPass):
    """Compute attention with heads of more than 256 numbers by matrix products, which are faster than its kernel.

    Attention in half precision on CUDA is rewritten, without a mask, dropout or a gradient.
    """

    hook: ClassVar[str] = "post_grad_custom_pre_pass"

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:  # noqa: ARG002
        """It applies if some attention has wide heads, and not too many scores."""
        count = sum(1 for _ in _wide(graph))
        return Reason(count > 0, f"{count} attentions with heads of more than {WIDEST_OF_FAST_KERNELS} numbers")

    def __call__(self, graph: Graph) -> None:
        """Rewrite these, with a guard on the number of scores."""
        with strides_kept(graph):
            for attention, out in _wide(graph):
                bool(_scores(attention) <= MOST_SCORES)  # reading the truth of a symbolic comparison adds the guard
                replace_by(out, _by_products(Writer(attention), attention))
                # It may draw random numbers, for dropout, so it is not erased with its output.
                graph.erase_node(attention)


def _wide(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """The calls of the kernel that are rewritten, each with the node of its output."""
    kernel = aten._scaled_dot_product_efficient_attention.default  # noqa: SLF001
    for node in list(graph.find_nodes(op="call_function", target=kernel)):
        query, *_ = values = [operand.meta["val"] for operand in node.args[:3]]
        given = operands_of(node)
        if (
            is_half_on_cuda(query)
            and not any(given.get(name) for name in ("attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"))
            and not isinstance(given.get("scale"), Node)
            and [(user.target, user.args[1:]) for user in node.users] == [(operator.getitem, (0,))]
            and all(isinstance(x.shape[3], int) and x.shape[3] > WIDEST_OF_FAST_KERNELS for x in values)
            and FEWEST_SCORES <= hinted(_scores(node)) <= MOST_SCORES
        ):
            yield node, next(iter(node.users))


def _scores(attention: Node) -> Any:
    """The number of scores: batch · heads · queries · keys."""
    query, key = (operand.meta["val"] for operand in attention.args[:2])  # type: ignore[union-attr]
    return query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]


def _by_products(write: Writer, attention: Node) -> Node:
    """The output of *attention*: (batch, heads, queries, numbers)."""
    operands: Any = attention.args[:3]
    query, key, value = (
        write(aten.reshape.default, x, [-1, write.size(x, 2), x.meta["val"].shape[3]]) for x in operands
    )
    scale: Any = attention.kwargs.get("scale")
    if scale is None:
        scale = query.meta["val"].shape[-1] ** -0.5
    keys = write.size(key, 1)
    more = _up_to_a_multiple(write, keys)
    if more != 0:
        key, value = (write(aten.constant_pad_nd.default, x, [0, 0, 0, more], 0.0) for x in (key, value))
    transposed = write(aten.permute.default, key, [0, 2, 1])
    # A power of two, as in flash attention. Inductor takes a power of e for the softmax of `prepare_softmax_online`,
    # and warns that it cannot make that of symbolic sizes.
    product = product_in_float32(write, query, transposed)
    scores = write(aten.mul.Tensor, product, scale * math.log2(math.e))
    if more != 0:
        scores = _minus_infinity_from(write, scores, keys)
    powers = write(aten.exp2.default, write(aten.sub.Tensor, scores, write(aten.amax.default, scores, [-1], True)))
    # In float32, since a sum of so many may be too large for float16.
    sums = product_in_float32(write, write(CONVERT, powers, value.meta["val"].dtype), value)
    out = write(aten.div.Tensor, sums, write(aten.sum.dim_IntList, powers, [-1], True))
    shape = [write.size(operands[0], dim) for dim in range(3)]
    out = write(CONVERT, out, value.meta["val"].dtype)
    return write(aten.reshape.default, out, [*shape, value.meta["val"].shape[-1]])


def _up_to_a_multiple(write: Writer, size: Any) -> Any:
    """What *size*, an int or the node of a symbol, lacks to the next multiple of `ALIGNED`."""
    if isinstance(size, int):
        return -size % ALIGNED
    # Not ``-size % ALIGNED``: of a sum with a remainder torch does not see that it is a multiple.
    count = write(operator.floordiv, write(operator.add, size, ALIGNED - 1), ALIGNED)
    return write(operator.sub, write(operator.mul, count, ALIGNED), size)


def _minus_infinity_from(write: Writer, scores: Node, keys: Any) -> Node:
    """*scores* with those of the padding, which start at column *keys*, as minus infinity, whose power is zero."""
    device, length = scores.meta["val"].device, write.size(scores, 2)
    how = {"dtype": torch.int64, "device": device, "requires_grad": False}
    columns = write(torch.ops.prims.iota.default, length, start=0, step=1, **how)
    nothing = write(aten.full.default, [], -math.inf, dtype=torch.float32, device=device)
    return write(aten.where.self, write(aten.lt.Scalar, columns, keys), scores, nothing)
