# SPDX-License-Identifier: Apache-2.0
"""Attention with heads that are too wide for the fast kernels, as two matrix products and a softmax.

Flash attention and cuDNN take heads of at most 256 numbers. The decoder of an image has one head as wide as its
channels, 384, 512 or more, and so gets the kernel for all other cases (``fmha_cutlassF``), at a quarter of the speed
of a matrix product. Products have to store the scores of all queries and keys, so this is for sequences up to a limit,
which is a guard; longer ones compile once more, and keep the kernel.

    scores = (query @ key.mT) * scale    # float32, as in that kernel
    out = softmax(scores).to(value.dtype) @ value

On one H200 (torch 2.11, bfloat16), the kernel takes 3.66 ms for 16,384 queries and keys of 512 numbers, a sixth of the
decoder of Stable Diffusion XL.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Graph, Node

from magi_passes._framework.compilation import PassContext, Reason
from magi_passes._framework.graph_pass import CheckedPass
from magi_passes._graph.nodes import CONVERT, Writer, aten, hinted, is_half_on_cuda, product_in_float32, replace_by
from magi_passes._graph.strides import strides_kept


WIDEST_OF_FAST_KERNELS = 256
FEWEST_SCORES, MOST_SCORES = 2**20, 2**28
"""Fewer take no time; as many take 1.6 GB, in float32 and in half precision."""


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
        names = ("attn_bias", "compute_log_sumexp", "dropout_p", "is_causal")
        given = {**dict(zip(names, node.args[3:], strict=False)), **node.kwargs}
        if (
            is_half_on_cuda(query)
            and not any(given.get(name) for name in names)
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
    transposed = write(aten.permute.default, key, [0, 2, 1])
    # A power of two, as in flash attention. Inductor takes a power of e for the softmax of `prepare_softmax_online`,
    # and warns that it cannot make that of symbolic sizes.
    product = product_in_float32(write, query, transposed)
    scores = write(aten.mul.Tensor, product, scale * math.log2(math.e))
    powers = write(aten.exp2.default, write(aten.sub.Tensor, scores, write(aten.amax.default, scores, [-1], True)))
    shares = write(aten.div.Tensor, powers, write(aten.sum.dim_IntList, powers, [-1], True))
    out = write(aten.bmm.default, write(CONVERT, shares, value.meta["val"].dtype), value)
    shape = [write.size(operands[0], dim) for dim in range(3)]
    return write(aten.reshape.default, out, [*shape, value.meta["val"].shape[-1]])
