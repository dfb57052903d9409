# SPDX-License-Identifier: Apache-2.0
"""Graphs, symbolic sizes and operators, and our own operator. Tried on torch 2.10 to 2.15."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch.fx import Graph, Node


def size_hint(size: torch.SymInt) -> int:
    """The value of *size* for the example inputs; 1 when it depends on data."""
    return int(size.node.hint) if size.node.has_hint() else 1


def guard_on(condition: bool | torch.SymBool) -> bool:
    """The truth of *condition* for the example inputs; a guard limits the compiled code to inputs with the same truth.

    Reading the truth of a symbolic comparison adds the guard to the shape environment. All releases.
    """
    return bool(condition)


def is_erased(node: Node) -> bool:
    """Whether *node* was taken out of its graph. All releases."""
    return bool(node._erased)


def is_body_of_higher_order_op(graph: Graph) -> bool:
    """Whether Inductor compiles *graph* as the body of `cond`, `while_loop` or a similar operator.

    Inductor notes the strides of outputs if it restores them: for a whole graph and for the body of
    `invoke_subgraph` (`_recursive_record_original_output_strides` in torch/_inductor/compile_fx.py). All releases.
    """
    from torch._inductor.virtualized import NullHandler, V

    is_at_work = not isinstance(V.fake_mode, NullHandler)
    return is_at_work and "original_output_strides" not in graph.output_node().meta


def outputs_that_are_bases() -> range:
    """The positions of outputs that AOTAutograd added to the current graph because several outputs are views of them.

    `num_forward_returns` in torch/_functorch/_aot_autograd/schemas.py has the order of outputs. All releases.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None:
        return range(0)
    first = metadata.num_mutated_inp_runtime_indices + metadata.num_outputs
    return range(first, first + metadata.num_intermediate_bases)


def operator_types() -> tuple[type, ...]:
    """The classes of torch's operators, which their name identifies. All releases."""
    return (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)


def paddings() -> frozenset[Callable[..., Any]]:
    """The targets of `torch.nn.functional.pad` and the padding modules in a captured graph, also after decomposition.

    All releases; Dynamo captures the first or the second.
    """
    aten = torch.ops.aten
    functions = (torch.nn.functional.pad, torch._C._nn.pad, torch.constant_pad_nd)
    return frozenset({*functions, aten.pad.default, aten.constant_pad_nd.default})


def symbolic_dispatch() -> AbstractContextManager[object]:
    """A context in which operators decompose in Python.

    In C++, they would ask a symbolic size for its number. All releases.
    """
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


@functools.cache
def _library() -> torch.library.Library:
    """The library that holds our operators, which live as long as it."""
    return torch.library.Library("magi_passes", "FRAGMENT")


@functools.cache
def channels_last_op() -> torch._ops.OpOverload:
    """``magi_passes::channels_last(x)``: a copy of *x* with the channels innermost in memory.

    Inductor lowers it to a constraint on the kernel that computes *x*, which then writes that layout itself. Its own
    `prims.inductor_force_stride_order` takes strides, and cannot sort symbolic ones.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    library = _library()
    library.define("channels_last(Tensor x) -> Tensor")

    def copy(x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)

    library.impl("channels_last", copy, "CompositeExplicitAutograd")
    library.impl("channels_last", copy, "Meta")
    op: torch._ops.OpOverload = torch.ops.magi_passes.channels_last.default

    @register_lowering(op, type_promotion_kind=None)
    def lower(x: Any) -> Any:
        # The position of each dimension in the order of strides, from the innermost.
        order = [3, 0, 2, 1] if len(x.get_size()) == 4 else [4, 0, 3, 2, 1]
        return ir.ExternKernel.require_stride_order(x, order)

    return op
