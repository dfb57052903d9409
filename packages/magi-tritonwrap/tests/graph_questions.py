# SPDX-License-Identifier: Apache-2.0
"""What a test asks of the graph that a call of an op becomes."""

from __future__ import annotations

from typing import Any

import torch
from magi_tritonwrap.testing import GraphLaunch, aot_graphs, launches_of


def launch_count(op: Any, *inputs: Any, dynamic: bool | None = None) -> int:
    (graph,) = aot_graphs(lambda *args: op(*args) + 1, *(inputs or (torch.ones(300),)), dynamic=dynamic)
    assert str(op) not in operators(graph)
    return len(launches_of(graph))


def launch_of(op: Any, *inputs: Any, dynamic: bool | None = None) -> GraphLaunch:
    """The one launch in the graph of a call."""
    (graph,) = aot_graphs(op, *(inputs or (torch.ones(300),)), dynamic=dynamic)
    (launch,) = launches_of(graph)
    return launch


def op_stays(op: Any, *inputs: Any) -> bool:
    (graph,) = aot_graphs(lambda *args: op(*args) + 1, *(inputs or (torch.ones(300),)))
    return str(op) in operators(graph)


def operators(graph: torch.fx.GraphModule) -> set[str]:
    """The names of the operators that a graph calls. An operator that is registered again has several OpOverloads."""
    return {str(node.target) for node in graph.graph.nodes}
