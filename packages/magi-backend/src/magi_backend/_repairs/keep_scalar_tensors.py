# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel of the user can read a constant Tensor without dimensions (torch 2.10 to 2.15).

In a package of AOTInductor the parameters and buffers of a model are constants. `GraphLowering.get_attr`
(torch/_inductor/graph.py) takes one without dimensions for its number, and a kernel, which needs an address, gets that
as its argument (``UserDefinedTritonKernel`` in torch/_inductor/ir.py): `TypeError: '<=' not supported between instances
of 'Constant' and 'int'`. For kernels of a library torch makes a Tensor of the number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._defect import Defect
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable


NAME = "keep_scalar_tensors"


def patch() -> None:
    """Make a Tensor of such a number, as for other kernels."""
    from torch._inductor.ir import Constant, ExternKernel, UserDefinedTritonKernel

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def initialised(self: Any, *, kernel_args: dict[str, Any], **others: Any) -> None:
            numbers = {name: value for name, value in kernel_args.items() if isinstance(value, Constant)}
            if numbers and is_active(NAME):
                report(NAME)
                kernel_args |= {name: ExternKernel.realize_input(number) for name, number in numbers.items()}
            original(self, kernel_args=kernel_args, **others)

        return initialised

    replace(UserDefinedTritonKernel, "__init__", make)


DEFECT = Defect(
    name=NAME,
    effect="a package of AOTInductor with a Triton kernel that reads a buffer without dimensions does not compile",
    severity="no code",
    since=(2, 10, 0),
    fixed=None,
    repair="the kernel gets the buffer",
    patch=patch,
)
