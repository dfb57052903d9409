# SPDX-License-Identifier: Apache-2.0
"""What a training graph saves for its backward, and what it recomputes.

Outputs of operators registered with ``is_compute_sensitive`` are saved, also inside the user's checkpoint. With a
memory budget, outputs of matrix products and of attention are saved too, and memory-bound operators are recomputed
until the budget is met.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from magi_passes import MagiInductorPass, PassContext, Reason
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from . import _torch_compat


def outputs(graph: Graph, chosen: Callable[[Node], bool]) -> list[Node]:
    """The outputs of the *chosen* nodes of *graph*; for a tuple, the items that are taken from it."""
    nodes = {node for node in graph.nodes if node.op == "call_function" and chosen(node)}
    # An operator that the compiler sees through is several nodes; only those that other nodes read must be saved.
    leaving = [node for node in nodes if not node.users.keys() <= nodes]
    return [
        item
        for node in leaving
        for item in (node.users if not isinstance(node.meta.get("val"), torch.Tensor) else (node,))
        if isinstance(item.meta.get("val"), torch.Tensor)
    ]


@dataclass(frozen=True)
class SelectiveRecompute(MagiInductorPass):
    """Mark the tensors that the partitioner must save.

    Attributes:
        sensitive: Names of the compute-sensitive operators in the graph. They are part of the cache key, because the
            graph does not show whether an operator was registered as one.
        products: Whether outputs of matrix products, convolutions and attention are saved too.
    """

    hook: ClassVar[str] = "joint_custom_post_pass"

    sensitive: tuple[str, ...] = ()
    products: bool = False

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        """It applies if there is a backward and something to save for it."""
        del context
        if not _torch_compat.nodes.has_backward(graph):
            return Reason(False, "there is no backward")
        sensitive, products = self._saved(graph)
        if not sensitive and not products:
            return Reason(False, "no compute-sensitive operator" + (", no product" if self.products else ""))
        return Reason(True, f"{len(sensitive)} compute-sensitive outputs and {len(products)} products are saved")

    def __call__(self, graph: Graph) -> None:
        """Mark these tensors."""
        for node in (node for saved in self._saved(graph) for node in saved):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def _saved(self, graph: Graph) -> tuple[list[Node], list[Node]]:
        """The compute-sensitive outputs of *graph*, and the products outside of the user's own checkpoints.

        A checkpoint decides for itself.
        """

        def is_sensitive(node: Node) -> bool:
            # Of a node in the place of a call that the compiler has replaced, the captured graph has the function.
            _, source = (node.meta.get("source_fn_stack") or [(None, None)])[-1]
            names = {_torch_compat.nodes.operator_name(target) for target in (node.target, source)}
            return not names.isdisjoint(self.sensitive) and not _torch_compat.nodes.in_backward(node)

        def is_free_product(node: Node) -> bool:
            is_free = "recompute" not in node.meta and not _torch_compat.nodes.in_backward(node)
            return is_free and _torch_compat.nodes.is_product(node.target)

        return outputs(graph, is_sensitive), outputs(graph, is_free_product) if self.products else []


def partitioner_settings(memory_budget: float | None) -> dict[str, Any]:
    """The settings of AOTAutograd's partitioner for *memory_budget*.

    A budget of exactly 0 makes the partitioner save nothing but inputs, whatever is marked; just above it, it saves
    the marked tensors and as little else as it can.
    """
    return {} if memory_budget is None else {"activation_memory_budget": max(memory_budget, 1e-6)}
