# SPDX-License-Identifier: Apache-2.0
"""A fused epilogue computes each element in place: it reads where it writes (torch >= 2.12).

``FusedUserDefinedTritonKernel`` changes the value that the user's kernel stores, and leaves the address as it is. So
the epilogue must write each element where it reads it. ``Scheduler.can_fuse`` compares only the layouts of the two
buffers, and these are also equal where the epilogue flips, transposes or broadcasts: the elements are then stored where
they came from. Upstream: pytorch #184247 and #186921.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._defect import Defect
from ._kernels import are_epilogues_fused_by_user
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable


NAME = "match_epilogue_indices"


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


def patch() -> None:
    """Refuse to fuse an epilogue that moves elements."""
    from torch._inductor.scheduler import ExternKernelSchedulerNode, Scheduler, SchedulerNode

    def make(original: Callable[..., bool]) -> Callable[..., bool]:
        def can_fuse(self: Any, node1: Any, node2: Any, *args: Any, **kwargs: Any) -> bool:
            can = original(self, node1, node2, *args, **kwargs)
            if (
                not can
                or not is_active(NAME)
                or not isinstance(node1, ExternKernelSchedulerNode)
                or not isinstance(node2, SchedulerNode)
                or _is_in_place(node2)
            ):
                return can
            report(NAME)
            return False

        return can_fuse

    replace(Scheduler, "can_fuse", make)


DEFECT = Defect(
    name=NAME,
    effect="pointwise work that also moves elements (a flip, a transposed copy) is fused into a user's Triton kernel, "
    "which stores them unmoved",
    severity="wrong code",
    since=(2, 12, 0),
    fixed=None,
    repair="only pointwise work that writes each element where it reads it is fused",
    patch=patch,
    is_torch_concerned=are_epilogues_fused_by_user,
)
