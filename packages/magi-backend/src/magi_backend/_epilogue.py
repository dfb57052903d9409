# SPDX-License-Identifier: Apache-2.0
"""Pointwise work behind a user's Triton kernel, done by that kernel before it stores.

Inductor can put ``relu`` into the store of the kernel in front of it, which saves a launch and a trip through memory,
but leaves that off by default (torch >= 2.12). It sees by itself whether the kernel has one store, and whether what it
writes to was empty. It does not see that another launch wrote to the same tensor before:

    out = empty(n); first_half[...](x, out); second_half[...](x, out); return out.relu()

It would put the relu into the second launch, and then loses the first (2.12) or fails (2.13). Nor does it see that the
graph returns what the kernel wrote, as a backward needs it, beside what the pointwise work makes of it: that tensor is
then never written, and the call ends in a NameError (2.13, ``can_fuse`` in torch/_inductor/scheduler.py asks nodes
only). So the graph as a whole is left alone in either case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from magi_passes import MagiInductorPass, Reason

from . import _torch_compat


if TYPE_CHECKING:
    from magi_passes import PassContext
    from torch.fx import Graph, Node


def _is_shared(tensor: Node) -> bool:
    """Whether something else than the launch that writes to *tensor* may have written to its memory, or reads it."""
    source, crossed = tensor, False
    while _torch_compat.is_item_or_view(source):
        source, crossed = source.args[0], True  # type: ignore[assignment]
    if not _torch_compat.is_empty(source):
        # A tensor with contents of its own is never fused into, unless it came out of a write to an empty one.
        return _torch_compat.is_write(source)
    return crossed or len(source.users) > 1


def _has_epilogue(result: Node) -> bool:
    """Whether a pointwise operator reads *result* and no other tensor; Inductor puts no load into a user's kernel."""
    return any(_torch_compat.is_pointwise(user.target) and _reads_only(result, user) for user in result.users)


def _reads_only(result: Node, operator: Node) -> bool:
    """Whether all that *operator* reads is *result*, what pointwise operators make of it, or constant."""
    seen, waiting = {result}, list(operator.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        is_constant = node.op == "call_function" and not node.all_input_nodes
        if not is_constant and not _torch_compat.is_pointwise(node.target):
            return False
        waiting += node.all_input_nodes
    return True


def _is_returned(result: Node) -> bool:
    """Whether the graph returns *result*, or a view of it."""
    return any(user.op == "output" or (_is_view(user) and _is_returned(user)) for user in result.users)


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and _torch_compat.is_item_or_view(node)


@dataclass(frozen=True)
class EpilogueFusion(MagiInductorPass):
    """Let Inductor fuse pointwise operators into the Triton launches of a graph, where each writes a tensor alone."""

    inductor_config_keys_potentially_mutated_by_this_pass = _torch_compat.epilogue_keys()

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        """Whether a pointwise operator reads only what a launch wrote, and no tensor is written by two of them."""
        del context
        launches = _torch_compat.triton_launches(graph)
        if not launches:
            return Reason(False, "no Triton launch")
        for launch in launches:
            for parameter, tensor in launch.written.items():
                if _is_shared(tensor):
                    return Reason(False, f"{parameter!r} of {launch.kernel} is not written by that launch alone")
            if any(_has_epilogue(result) and _is_returned(result) for result in launch.results):
                return Reason(False, f"the graph returns what {launch.kernel} wrote as well")
        count = sum(any(map(_has_epilogue, launch.results)) for launch in launches)
        if not count:
            return Reason(False, "no pointwise operator reads only what a Triton kernel wrote")
        return Reason(True, f"a pointwise operator reads only what {count} of {len(launches)} Triton launches wrote")

    def __call__(self, graph: Graph) -> None:
        """Turn it on for this graph."""
        del graph
        _torch_compat.fuse_epilogues()
