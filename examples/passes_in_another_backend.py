# SPDX-License-Identifier: Apache-2.0
"""Put passes of magi-passes into a backend that somebody else wrote. Needs magi-passes alone.

Their backend wraps Inductor, installs a pass of its own, and knows nothing of ours. All it does for its users is to
take `options`; that is enough.

    python examples/passes_in_another_backend.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from magi_passes import MagiInductorPass, PassContext, PassPipeline, Reason, collect_records
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule


class TheirCounter(CustomGraphPass):
    """Their pass: counts the operators of each graph that is compiled."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, graph: Graph) -> None:
        """Called by Inductor after its own passes."""
        self.counts.append(len(graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)))

    def uuid(self) -> str:
        """Part of Inductor's cache key."""
        return "their-counter-1"


counter = TheirCounter()


def their_backend(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Inductor with their pass in front of whatever the user asked for."""
    from torch._inductor.compile_fx import compile_fx  # Inductor is slow to import, so not above

    patches = {"post_grad_custom_pre_pass": counter, **(options or {})}
    compiled: Any = compile_fx(gm, list(example_inputs), config_patches=patches)
    return compiled  # type: ignore[no-any-return]


def sines(graph: Graph) -> list[Any]:
    """Every sine in *graph*."""
    return list(graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default))


@dataclass(frozen=True)
class SmallAngles(MagiInductorPass):
    """Our pass, at the same hook as theirs: sin(x) = x for angles that are known to be small."""

    hook = "post_grad_custom_pre_pass"

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:
        """Only where there is a sine."""
        del context
        return Reason(bool(sines(graph)), f"{len(sines(graph))} sines")

    def __call__(self, graph: Graph) -> None:
        """Replace each sine by its argument."""
        for node in sines(graph):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def model(x: Tensor) -> Tensor:
    """Two sines."""
    return x.sin().sin() + 1


def main() -> None:
    """Their pass and ours run on the same graph, in that order."""
    base = {"post_grad_custom_pre_pass": counter}  # what their backend would install
    options = PassPipeline([SmallAngles()]).inductor_options(base)
    compiled = torch.compile(model, backend=their_backend, options=options)
    x = torch.full((3,), 1e-3)
    with torch.no_grad(), collect_records() as records:
        torch.testing.assert_close(compiled(x), x + 1, rtol=0, atol=0)
    print("their pass saw", counter.counts, "sines")
    for record in records:
        print(record)


if __name__ == "__main__":
    main()
