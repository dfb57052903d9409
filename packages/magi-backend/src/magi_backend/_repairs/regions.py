# SPDX-License-Identifier: Apache-2.0
"""Defects of regions that are compiled once and called many times (``torch.compiler.nested_compile_region``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ._defect import Defect, report


def _kept_apart(
    original: Callable[..., None], result: Any, layout: Any, region: Any, indices: Any, *args: Any, **kwargs: Any
) -> None:
    """Make *result* one of *region*, and see that no memory that it shares is used for anything else.

    The forward of a region gives the backward what it saves, which may be an operand, or a view of another result.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    original(result, layout, region, indices, *args, **kwargs)
    result.magi_operands = []
    if not isinstance(region, ir.InvokeSubgraph):
        return
    subgraph: Any = region.subgraph
    no_memory = (ir.ShapeAsConstantBuffer, ir.NoneAsConstantBuffer)
    names = ["" if isinstance(each, no_memory) else each.get_name() for each in subgraph.graph.graph_outputs]
    name = names[indices[0][1]]
    given: Any = zip(region.inputs, subgraph.graph.graph_input_names, strict=True)
    operands = [operand.get_name() for operand, parameter in given if parameter == name]
    if operands or names.count(name) > 1:
        report("region_memory")
        result.magi_operands = operands
        V.graph.never_reuse_buffers.update([result.get_name(), *operands])


def _with_operands(original: Callable[..., Sequence[str]], result: Any) -> Sequence[str]:
    return [*original(result), *result.magi_operands]


def _without_donations(original: Callable[..., None], graph: Any, *args: Any, **kwargs: Any) -> None:
    """Make the *graph* of a body, whose inputs its caller may use again.

    Torch takes the positions of the inputs that the whole backward may overwrite for those of the body's.
    """
    original(graph, *args, **kwargs)
    if graph.bw_donated_idxs:
        report("region_memory")
        graph.bw_donated_idxs = None


REGION_MEMORY = Defect(
    name="region_memory",
    effect="gradients of a nested_compile_region are computed from memory that other kernels have overwritten",
    severity="wrong code",
    repair="what a region gives back and takes is kept until its last use",
    replaces={
        "torch._inductor.ir:MultiOutput.__init__": _kept_apart,
        "torch._inductor.ir:MultiOutput.get_inputs_that_alias_output": _with_operands,
        "torch._inductor.graph:SubgraphLowering.__init__": _without_donations,
    },
)
