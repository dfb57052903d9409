# SPDX-License-Identifier: Apache-2.0
"""A graph pass of one's own, with a parameter, a reason and a setting that it changes. Needs magi-passes alone.

It drops the outer one of two equal roundings, relus or absolute values: f(f(x)) is f(x) for each of them. In graphs in
which it found any, it asks Inductor for small kernels.

    python examples/graph_pass.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from magi_passes import MagiInductorPass, PassContext, PassPipeline, Reason, collect_records
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.fx import Graph, Node


aten = torch.ops.aten
IDEMPOTENT = ("abs", "ceil", "floor", "relu", "round", "sign", "trunc")


def repeated(graph: Graph) -> list[tuple[Node, Node]]:
    """Each call in *graph* whose argument is a call of the same operator, and that argument."""
    targets = [getattr(aten, name).default for name in IDEMPOTENT]
    calls = [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]
    return [(node, inner) for node in calls if isinstance(inner := node.args[0], Node) and inner.target == node.target]


@dataclass(frozen=True)
class DropRepeated(MagiInductorPass):
    """Replace f(f(x)) by f(x).

    Attributes:
        fusion_limit: How many operators Inductor may put into a kernel of a graph that this pass changed.
    """

    inductor_config_keys_potentially_mutated_by_this_pass = ("max_fusion_size",)
    fusion_limit: int = 16

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        """Changes nothing, and says why."""
        count = len(repeated(graph))
        return Reason(count > 0, f"{count} repeated calls in the {'backward' if context.is_backward else 'forward'}")

    def __call__(self, graph: Graph) -> None:
        """Not called when a cache has the result: leave nothing behind but the graph and the setting."""
        for node, inner in repeated(graph):
            node.replace_all_uses_with(inner)
            graph.erase_node(node)
        inductor_config.max_fusion_size = self.fusion_limit


def model(x: Tensor) -> Tensor:
    """Two libraries, each of which rounds."""
    return (x * 3).round().round() + x.relu()


def main() -> None:
    """Compile with the pass; show its record; show that nothing leaked."""
    before = inductor_config.max_fusion_size
    compiled = torch.compile(model, options=PassPipeline([DropRepeated(fusion_limit=8)]).inductor_options())
    x = torch.linspace(-1, 1, 7)
    with torch.no_grad(), collect_records() as records:
        torch.testing.assert_close(compiled(x), model(x))
    for record in records:
        print(record)
    assert inductor_config.max_fusion_size == before
    print("max_fusion_size is what it was:", before)


if __name__ == "__main__":
    main()
