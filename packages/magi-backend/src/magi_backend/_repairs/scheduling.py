# SPDX-License-Identifier: Apache-2.0
"""Defects in the order in which kernels run, in their fusion, and in which memory they use again.

The last is about regions that are compiled once and called many times (``torch.compiler.nested_compile_region``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from magi_backend._torch_compat.compiling import configs, epilogue_keys

from ._defect import Defect, report, report_if


def _are_epilogues_fused_by_user() -> bool:
    """Whether the user turned the fusion of epilogues on. Torch does not fuse by default: stock torch is then right."""
    return any(getattr(configs()[0], key) for key in epilogue_keys())


def _load_as_stored(original: Callable[..., Any], kernel: Any, name: str, index: Any) -> Any:
    """The value from which a fused epilogue computes: cast as the store of the kernel casts it, under a new name.

    ``FusedUserDefinedTritonKernel`` puts ``tmp0 = <the stored expression>`` and the operators on ``tmp0`` before the
    store. The expression has the dtype of the kernel's computation: floats that are stored into an int tensor are not
    rounded, and a bfloat16 value is passed to ``tl.sigmoid``, which takes only float32. Also, a variable ``tmp0`` of
    the kernel is overwritten.
    """
    from torch._inductor.codegen import triton
    from torch._inductor.virtualized import V

    if name != kernel.ir_node.mutable_args[0].get_name():
        return original(kernel, name, index)
    source = kernel.ir_node.kernel_src
    # What a kernel computes from float32 only is in float32, so the cast changes nothing.
    if kernel.cse.name_prefix in source or {each.get_dtype() for each in kernel.ir_node.inputs} != {torch.float32}:
        report("exact_epilogues")
    while kernel.cse.name_prefix in source:
        kernel.cse.name_prefix = f"epilogue_{kernel.cse.name_prefix}"
    dtype, expression = V.graph.get_dtype(name), kernel.original_stored_expr
    stored = f"tl.cast({expression}, {triton.triton_store_type(dtype)})"
    kernel.original_stored_expr = f"{stored}.to({triton.triton_compute_type(dtype)})"
    try:
        value = original(kernel, name, index)
    finally:
        kernel.original_stored_expr = expression
    if dtype in {torch.float16, torch.bfloat16}:
        value.dtype = torch.float32
    return value


EXACT_EPILOGUES = Defect(
    name="exact_epilogues",
    effect="pointwise work fused into a user's Triton kernel starts from a value that was not rounded to the "
    "tensor's dtype, does not compile on 16-bit values, and overwrites variables of the kernel named tmp0",
    severity="wrong code",
    since=(2, 12, 0),
    repair="the value is cast as the store casts it, and the names are new",
    replaces={"torch._inductor.codegen.triton:FusedUserDefinedTritonKernel.load": _load_as_stored},
    is_torch_concerned=_are_epilogues_fused_by_user,
)


def _is_in_place(epilogue: Any) -> bool:
    """Whether *epilogue* writes each element of its buffer where it reads it, and reads nothing elsewhere."""
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.virtualized import V

    known_equal = V.graph.sizevars.statically_known_equals
    reads, writes = epilogue.read_writes.reads, epilogue.read_writes.writes
    if len(writes) != 1 or not all(isinstance(dep, MemoryDep) for dep in (*reads, *writes)):
        return False
    (write,) = writes
    return all(
        read.var_names == write.var_names
        and known_equal(read.index, write.index)
        and all(map(known_equal, read.size, write.size))
        for read in reads
    )


def _can_fuse_in_place(
    original: Callable[..., bool], scheduler: Any, node1: Any, node2: Any, *args: Any, **kwargs: Any
) -> bool:
    """Whether two nodes can be fused; an epilogue that moves elements cannot be fused into a user's kernel.

    ``FusedUserDefinedTritonKernel`` changes the value that the user's kernel stores, and leaves the address as it is.
    So the epilogue must write each element where it reads it. ``Scheduler.can_fuse`` compares only the layouts of the
    two buffers, and these are also equal where the epilogue flips, transposes or broadcasts: the elements are then
    stored where they came from. Upstream: pytorch #184247 and #186921.
    """
    from torch._inductor.scheduler import ExternKernelSchedulerNode, SchedulerNode

    can = original(scheduler, node1, node2, *args, **kwargs)
    is_epilogue = isinstance(node1, ExternKernelSchedulerNode) and isinstance(node2, SchedulerNode)
    if not can or not is_epilogue or _is_in_place(node2):
        return can
    report("match_epilogue_indices")
    return False


MATCH_EPILOGUE_INDICES = Defect(
    name="match_epilogue_indices",
    effect="pointwise work that also moves elements (a flip, a transposed copy) is fused into a user's Triton kernel, "
    "which stores them unmoved",
    severity="wrong code",
    since=(2, 12, 0),
    fixed=(2, 14, 1),
    repair="only pointwise work that writes each element where it reads it is fused",
    replaces={"torch._inductor.scheduler:Scheduler.can_fuse": _can_fuse_in_place},
    is_torch_concerned=_are_epilogues_fused_by_user,
)


def _can_fuse_rereads(original: Callable[..., bool], scheduler: Any, weak_dep: Any, reader: Any, writer: Any) -> bool:
    """Whether *reader* can be fused with *writer*, which overwrites what it reads: both must use the same elements.

    ``Scheduler.fusable_weak_dep`` looks for reads under the buffer's first name. After a first write the buffer has
    another name, so the reads are not found, and the kernel reads elements that it has overwritten:
    ``op(y, x); x[1:] = x[:-1].clone()``.
    """
    from torch._inductor.dependencies import MemoryDep

    if not original(scheduler, weak_dep, reader, writer):
        return False
    first_name = scheduler.mutation_real_name[weak_dep.mutating_buf]
    (write,) = (dep for dep in writer.read_writes.writes if dep.name == weak_dep.mutating_buf)
    later = [
        dep
        for dep in reader.read_writes.reads
        if dep.name != first_name and scheduler.mutation_real_name.get(dep.name) == first_name
    ]
    if all(isinstance(dep, MemoryDep) and dep.index == write.index and dep.size == write.size for dep in later):
        return True
    report("fuse_rereads_in_place")
    return False


FUSE_REREADS_IN_PLACE = Defect(
    name="fuse_rereads_in_place",
    effect="a tensor that was changed in place, and is then shifted or transposed in place, is computed from elements "
    "that were overwritten",
    severity="wrong code",
    fixed=(2, 15, 0),
    repair="the read is a kernel of its own, before the write",
    replaces={"torch._inductor.scheduler:Scheduler.fusable_weak_dep": _can_fuse_rereads},
)


_LOST = "_magi_lost_reads"
"""The attribute of a repaired node: its current dependences, and the reads that torch had kept."""


def _unrepaired(node: Any, parts: Sequence[Any]) -> Any:
    """The names that *node* would wait for if its *parts* had the reads that torch had kept."""
    others = [part for part in node.get_nodes() if part not in parts]
    gained = {dep for part in parts for dep in part.read_writes.reads} - {
        dep for part in others for dep in part.read_writes.reads
    }
    kept = [dep for dep in node.unmet_dependencies if dep not in gained]
    inside, available = set(node.get_buffer_names()), node.scheduler.available_buffer_names
    lost = [dep for part in parts for dep in part.__dict__[_LOST][1]]
    return type(node.unmet_dependencies)(
        [*kept, *(dep for dep in lost if dep.name not in inside and dep.name not in available)]
    )


def _in_order(original: Callable[..., list[Any]], *args: Any, **kwargs: Any) -> list[Any]:
    """The nodes in torch's order; each repaired one that would be ahead of a write without the repair is reported."""
    nodes = next(given for given in args if isinstance(given, list))  # before it, a method has its scheduler
    parts_of = {node: [p for p in node.get_nodes() if p.__dict__.get(_LOST, [0])[0] is p.read_writes] for node in nodes}
    repaired = {node: parts for node, parts in parts_of.items() if parts}
    if not repaired:
        return original(*args, **kwargs)
    right = {node: node.unmet_dependencies for node in repaired}
    try:
        for node, parts in repaired.items():
            node.unmet_dependencies = _unrepaired(node, parts)
        unrepaired = original(*args, **kwargs)
    finally:
        for node, dependences in right.items():
            node.unmet_dependencies = dependences
    places = {name: place for place, node in enumerate(unrepaired) for name in node.get_buffer_names()}
    at = {part: place for place, node in enumerate(unrepaired) for part in node.get_nodes()}
    for part in (part for parts in repaired.values() for part in parts):
        if any(places.get(dep.name, -1) > at[part] for dep in part.read_writes.reads):
            report("keep_mutation_order")
            del part.__dict__[_LOST]  # each node is reported once
    return original(*args, **kwargs)


def _recompute_body(original: Callable[..., None], node: Any, *args: Any, **kwargs: Any) -> None:
    """Keep what a node waits for besides the buffers that its recomputed loop body reads.

    ``SchedulerNode.recompute_size_and_body``, which the C++ backend calls to fuse loops, reads the dependences of a
    node again from its body. There a mutated buffer has its first name, so that a reader of ``index_put_``'s result no
    longer waits for it (torch 2.13, pytorch #185509). And a write into a buffer does not depend on those that read it
    before, so that ``v = x * 2; x[1:] = y; return v, v * 3`` computes from the new elements (torch 2.10 and 2.11,
    pytorch #177631). The two functions that order the nodes may then put one of the two first. To find out whether
    they would have, they are called with the dependences that torch had kept.
    """
    from torch._inductor.dependencies import StarDep, WeakDep

    reads = node.read_writes.reads
    added = type(reads)(dep for dep in reads if isinstance(dep, (StarDep, WeakDep)))
    original(node, *args, **kwargs)
    lost = node.read_writes
    known = lost.with_read(added).rename(node.mutation_renames)
    if known != lost:
        node.set_read_writes(known)
        node.__dict__[_LOST] = (node.read_writes, lost.reads)


KEEP_MUTATION_ORDER = Defect(
    name="keep_mutation_order",
    effect="on a CPU, gradients through upsampling and other scatter-adds are silently zero (torch 2.13), and what is "
    "computed from a tensor before its slice is overwritten has the new elements (torch 2.10 and 2.11)",
    severity="wrong code",
    fixed=(2, 14, 0),
    repair="a kernel that reads a mutated buffer waits for the mutation, and the mutation for those that read before",
    replaces={
        "torch._inductor.scheduler:SchedulerNode.recompute_size_and_body": _recompute_body,
        "torch._inductor.scheduler:Scheduler.topological_sort_schedule": _in_order,
        "torch._inductor.memory:reorder_for_peak_memory": _in_order,
    },
)


def _register_after_readers(
    original: Callable[..., None],
    fallback: Any,
    layout: Any,
    kernel: Any,
    tensors: Any,
    others: Any,
    unflatten: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Compute the expressions that read a buffer before an operator that writes to it is registered.

    ``FallbackKernel`` first registers itself as an operation, and then, in ``MutationOutput``, realizes the pointwise
    expressions that read the old value. So these are computed after the write, and read the new value.
    """
    from torch._inductor.virtualized import V

    if isinstance(kernel, torch._ops.OpOverload) and kernel._schema.is_mutable:
        graph = V.graph
        known = len(graph.operations)
        given, named = unflatten(tensors, others)
        for info, arg in torch._library.utils.zip_schema(kernel._schema, given, named):
            if info.alias_info is not None and info.alias_info.is_write:
                for tensor in arg if isinstance(arg, (list, tuple)) else (arg,):
                    readers = list(graph.name_to_users.get(tensor.get_name(), ())) if tensor is not None else []
                    for reader in readers:
                        reader.realize()
        names = [operation.get_operation_name() for operation in graph.operations[known:]]
        # The scheduler drops buffers that nothing uses, whichever value they would have read.
        if names:
            report_if("realize_readers_first", lambda: any(name not in graph.removed_operations for name in names))
    original(fallback, layout, kernel, tensors, others, unflatten, *args, **kwargs)


REALIZE_READERS_FIRST = Defect(
    name="realize_readers_first",
    effect="what was computed from a buffer before a custom operator writes to it is computed from the new value",
    severity="wrong code",
    repair="the old value is read before the write",
    replaces={"torch._inductor.ir:FallbackKernel.__init__": _register_after_readers},
)


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
