# SPDX-License-Identifier: Apache-2.0
"""Pointwise operators after a user's Triton kernel, fused into that kernel before its store.

Inductor can fuse ``relu`` into the store of the kernel before it, which saves a launch and a write and read of memory,
but does not do so by default (torch >= 2.12). It checks whether the kernel has a single store, and whether the tensor
that it writes to was empty. It does not see that another launch wrote to the same tensor before:

    out = empty(n); first_half[...](x, out); second_half[...](x, out); return out.relu()

It would fuse the relu into the second launch, and then lose the first launch (2.12) or fail (2.13). Nor does it see
that the graph returns the tensor that the kernel wrote as well, as a backward needs: that tensor is then never written,
and the call ends in a NameError (2.13, ``can_fuse`` in torch/_inductor/scheduler.py looks at nodes only). In both cases
nothing in the graph is fused.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from magi_passes import MagiInductorPass, PassContext, Reason
from torch._ops import OpOverload
from torch.fx import Graph, Node

from . import _torch_compat


def _is_shared(tensor: Node) -> bool:
    """Whether the memory of *tensor* may be written or read by anything else than the launch that writes to it."""
    source, crossed = tensor, False
    while _is_item_or_view(source):
        source, crossed = source.args[0], True  # type: ignore[assignment]
    if not _torch_compat.nodes.is_empty(source):
        # Inductor never fuses into a launch on a tensor with contents, unless these come from a write to an empty
        # tensor.
        return _torch_compat.nodes.is_write(source)
    return crossed or len(source.users) > 1


def _has_epilogue(result: Node) -> bool:
    """Whether a pointwise operator reads only *result*, because Inductor adds no load to a user's kernel."""
    return any(_is_pointwise(user) and _reads_only(result, user) for user in result.users)


def _is_pointwise(node: Node) -> bool:
    """Whether *node* computes each element from the elements at the same position."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def _reads_only(result: Node, operator: Node) -> bool:
    """Whether *operator* reads only *result*, constants, and what pointwise operators compute from these."""
    seen, waiting = {result}, list(operator.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        is_constant = node.op == "call_function" and not node.all_input_nodes
        if not is_constant and not _is_pointwise(node):
            return False
        waiting += node.all_input_nodes
    return True


def _is_returned(result: Node) -> bool:
    """Whether the graph returns *result*, or a view of it."""
    return any(user.op == "output" or (_is_item_or_view(user) and _is_returned(user)) for user in result.users)


def _is_item_or_view(node: Node) -> bool:
    """Whether *node* is an item or a view of its first argument."""
    is_view = isinstance(node.target, OpOverload) and node.target.is_view
    return is_view or node.target is operator.getitem


@dataclass(frozen=True)
class EpilogueFusion(MagiInductorPass):
    """Let Inductor fuse pointwise operators into the Triton launches of a graph, if each tensor has one writer."""

    inductor_config_keys_potentially_mutated_by_this_pass = _torch_compat.compiling.epilogue_keys()

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        """It applies if a pointwise operator reads only what a launch wrote, and no tensor has two writers."""
        del context
        launches = _torch_compat.nodes.triton_launches(graph)
        if not launches:
            return Reason(False, "no Triton launch")
        for kernel, launch in launches:
            arguments: Any = launch.kwargs["kwargs"]
            for parameter in launch.kwargs["tensors_to_clone"]:  # type: ignore[union-attr]
                if _is_shared(arguments[parameter]):
                    return Reason(False, f"{parameter!r} of {kernel} is not written by that launch alone")
            if any(_has_epilogue(result) and _is_returned(result) for result in launch.users):
                return Reason(False, f"the graph returns what {kernel} wrote as well")
        count = sum(any(map(_has_epilogue, launch.users)) for _, launch in launches)
        if not count:
            return Reason(False, "no pointwise operator reads only what a Triton kernel wrote")
        return Reason(True, f"a pointwise operator reads only what {count} of {len(launches)} Triton launches wrote")

    def __call__(self, graph: Graph) -> None:
        """Turn the fusion on for this graph."""
        del graph
        for key in self.inductor_config_keys_potentially_mutated_by_this_pass:
            setattr(_torch_compat.compiling.configs()[0], key, True)
