# SPDX-License-Identifier: Apache-2.0
"""A reader of a buffer that was written before is fused with its next write only if both use the same elements.

``Scheduler.fusable_weak_dep`` demands that a kernel which reads a buffer and writes to it reads each element where it
writes it. It looks for reads under the buffer's first name. After a first write the buffer has another name, so the
reads are not found, and the kernel reads elements that it has overwritten: ``op(y, x); x[1:] = x[:-1].clone()``
(torch >= 2.10).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._defect import Defect
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable


NAME = "fuse_rereads_in_place"


def _reads_elsewhere(scheduler: Any, weak_dep: Any, reader: Any, writer: Any) -> bool:
    """Whether *reader* reads a later version of the buffer at other elements than *writer* writes."""
    from torch._inductor.dependencies import MemoryDep

    first_name = scheduler.mutation_real_name[weak_dep.mutating_buf]
    (write,) = (dep for dep in writer.read_writes.writes if dep.name == weak_dep.mutating_buf)
    reads = [
        dep
        for dep in reader.read_writes.reads
        if dep.name != first_name and scheduler.mutation_real_name.get(dep.name) == first_name
    ]
    return any(not isinstance(dep, MemoryDep) or dep.index != write.index or dep.size != write.size for dep in reads)


def patch() -> None:
    """Look for reads under the later names too."""
    from torch._inductor.scheduler import Scheduler

    def make(original: Callable[..., bool]) -> Callable[..., bool]:
        def fusable_weak_dep(self: Any, weak_dep: Any, node1: Any, node2: Any) -> bool:
            can = original(self, weak_dep, node1, node2)
            if not can or not is_active(NAME) or not _reads_elsewhere(self, weak_dep, node1, node2):
                return can
            report(NAME)
            return False

        return fusable_weak_dep

    replace(Scheduler, "fusable_weak_dep", make)


DEFECT = Defect(
    name=NAME,
    effect="a tensor that was changed in place, and is then shifted or transposed in place, is computed from elements "
    "that were overwritten",
    severity="wrong code",
    since=(2, 10, 0),
    fixed=None,
    repair="the read is a kernel of its own, before the write",
    patch=patch,
)
