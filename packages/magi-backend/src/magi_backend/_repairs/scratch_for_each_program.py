# SPDX-License-Identifier: Apache-2.0
"""The scratch memory of a Triton kernel is as large as its grid (torch 2.10 and 2.11).

A kernel that makes a tensor descriptor keeps it in scratch memory, each program at its own place behind the others. In
code for C++, AOTInductor's among it, Inductor allocates the memory of one program (``cpp_scratch`` in
torch/_inductor/codegen/cuda/device_op_overrides.py), so the others write over other Tensors. Later releases multiply it
by the grid, whose three sizes are variables of the generated function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._defect import Defect
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable


NAME = "scratch_for_each_program"


def patch() -> None:
    """Multiply the size that is written by that of the grid."""
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def cpp_scratch(self: Any, idx: int, workspace: Any, *args: Any, **kwargs: Any) -> Any:
            written = original(self, idx, workspace, *args, **kwargs)
            if not is_active(NAME) or written is None:
                return written
            lines, name = written
            enlarged = for_each_program(lines, workspace.size)
            if enlarged != lines:
                report(NAME)
            return enlarged, name

        return cpp_scratch

    replace(CUDADeviceOpOverrides, "cpp_scratch", make)


def for_each_program(lines: list[str], size: int) -> list[str]:
    """The *lines* that allocate *size* bytes, with so many for each program of a grid.

    Example:
        >>> for_each_program(["int64_t scratch_0_size[] = {128};"], 128)
        ['int64_t scratch_0_size[] = {static_cast<int64_t>(128) * grid_0 * grid_1 * grid_2};']
    """
    whole_grid = f"_size[] = {{static_cast<int64_t>({size}) * grid_0 * grid_1 * grid_2}};"
    return [line.replace(f"_size[] = {{{size}}};", whole_grid) for line in lines]


DEFECT = Defect(
    name=NAME,
    effect="in a package of AOTInductor, a Triton kernel that makes tensor descriptors writes over other Tensors",
    severity="wrong code",
    since=(2, 10, 0),
    fixed=(2, 12, 1),
    repair="the scratch memory of a Triton kernel is as large as its grid",
    patch=patch,
)
