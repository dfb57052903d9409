# SPDX-License-Identifier: Apache-2.0
"""Attention of lengths that vary, with a plan of cuDNN for each length that has paid for it.

On an H100 and its successors, torch takes cuDNN's kernels for attention first. They are up to twice as fast as flash
attention, but cuDNN makes a plan for each shape: the first call of a length waits 50 to 75 ms (an H200, torch 2.11),
and twice that in training. A text that grows by one token has a new length at each.

So the first few lengths of a kind of attention have a plan at once, as in a program that always sees the same. A
further length has other kernels first, and a plan once its calls have lost as much time as that takes. For any order of
lengths, they lose at most twice what they would if it were known which return, and these few plans. The argument is
that of a skier who rents until the rent is the price of a pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from magi_passes import _torch_compat
from magi_passes._framework.compilation import PassContext, Reason
from magi_passes._framework.graph_pass import CheckedPass
from magi_passes._graph.nodes import operands_of

from .wide_heads import WIDEST_OF_FAST_KERNELS


_torch_compat.attention.operators()  # code from a cache calls them too


@dataclass(frozen=True)
class AttentionPlansPass(CheckedPass):
    """Let attention of symbolic lengths have the kernels of cuDNN once the calls of a length have paid for its plan.

    This is about calls for which torch has chosen cuDNN, without dropout, and without a bias if there are gradients.
    Results of one input differ by rounding before and after its plan. Not where torch is asked for deterministic
    kernels, or for a program in C++.

    Example:
        >>> import torch
        >>> from magi_passes import AttentionPlansPass, PassPipeline, collect_records
        >>> options = PassPipeline([AttentionPlansPass()]).inductor_options()
        >>> attend = torch.compile(torch.nn.functional.scaled_dot_product_attention, dynamic=True, options=options)
        >>> with collect_records() as records:
        ...     out = attend(*torch.randn(3, 2, 4, 130, 64))
        >>> records[0].reason  # on a CPU
        '0 attentions by cuDNN have symbolic lengths'
    """

    hook: ClassVar[str] = "post_grad_custom_pre_pass"

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        """It applies if torch has chosen cuDNN for attention of a symbolic length."""
        if torch.are_deterministic_algorithms_enabled() or context.config["cpp_wrapper"]:
            return Reason(False, "kernels must be deterministic, or are called from C++")
        count = len(_of_lengths_that_vary(graph))
        return Reason(count > 0, f"{count} attentions by cuDNN have symbolic lengths")

    def __call__(self, graph: Graph) -> None:
        """Call operators of the same schema."""
        _torch_compat.attention.call_bodies()
        for node in _of_lengths_that_vary(graph):
            node.target = _torch_compat.attention.operators()[node.target]


def _of_lengths_that_vary(graph: Graph) -> list[Node]:
    targets = _torch_compat.attention.operators()
    return [
        node
        for target in targets
        for node in graph.find_nodes(op="call_function", target=target)
        if _has_other_kernels(node)
    ]


def _has_other_kernels(node: Node) -> bool:
    """Whether flash attention, or the kernel that takes a bias, computes the same as *node*, of lengths that vary."""
    given = operands_of(node)
    query, key, value = (given[name].meta["val"] for name in ("query", "key", "value"))
    is_biased, has_gradient = given["attn_bias"] is not None, given.get("compute_log_sumexp", True)
    return (
        any(isinstance(x.shape[2], torch.SymInt) for x in (query, key))
        and not given.get("dropout_p")
        and query.shape[3] == value.shape[3]
        and query.shape[3] <= WIDEST_OF_FAST_KERNELS
        and not (is_biased and (has_gradient or query.shape[1] != key.shape[1]))
    )
