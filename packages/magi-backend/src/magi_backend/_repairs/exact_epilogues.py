# SPDX-License-Identifier: Apache-2.0
"""A fused epilogue computes from what the kernel stores, under names that the kernel does not use (torch >= 2.12).

``FusedUserDefinedTritonKernel`` puts ``tmp0 = <the stored expression>`` and the operators on ``tmp0`` before the
store. The expression has the dtype of the kernel's computation: floats that are stored into an int tensor are not
rounded, and a bfloat16 value is passed to ``tl.sigmoid``, which takes only float32. Also, a variable ``tmp0`` of the
kernel is overwritten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ._defect import Defect
from ._kernels import are_epilogues_fused_by_user
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable


NAME = "exact_epilogues"


def _dtypes(kernel: Any) -> set[torch.dtype]:
    """The dtypes of the tensors that the launch takes."""
    return {tensor.get_dtype() for tensor in kernel.ir_node.inputs}


def _has_own(kernel: Any) -> bool:
    """Whether the source of the user's kernel has a name with the prefix of the names of the epilogue."""
    return kernel.cse.name_prefix in kernel.ir_node.kernel_src


def patch() -> None:
    """Cast the value as the store casts it, and use new names."""
    from torch._inductor.codegen import triton
    from torch._inductor.virtualized import V

    def as_stored(expression: str, dtype: torch.dtype) -> str:
        stored = f"tl.cast({expression}, {triton.triton_store_type(dtype)})"
        return f"{stored}.to({triton.triton_compute_type(dtype)})"

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def load(self: Any, name: str, index: Any) -> Any:
            if not is_active(NAME) or name != self.ir_node.mutable_args[0].get_name():
                return original(self, name, index)
            # What a kernel computes from float32 only is in float32, so the cast changes nothing.
            if _has_own(self) or _dtypes(self) != {torch.float32}:
                report(NAME)
            while _has_own(self):
                self.cse.name_prefix = f"epilogue_{self.cse.name_prefix}"
            dtype, expression = V.graph.get_dtype(name), self.original_stored_expr
            self.original_stored_expr = as_stored(expression, dtype)
            try:
                value = original(self, name, index)
            finally:
                self.original_stored_expr = expression
            if dtype in {torch.float16, torch.bfloat16}:
                value.dtype = torch.float32
            return value

        return load

    # The class came with torch 2.12.
    fused: Any = getattr(triton, "FusedUserDefinedTritonKernel", None)
    if fused is not None:
        replace(fused, "load", make)


DEFECT = Defect(
    name=NAME,
    effect="pointwise work fused into a user's Triton kernel starts from a value that was not rounded to the "
    "tensor's dtype, does not compile on 16-bit values, and overwrites variables of the kernel named tmp0",
    severity="wrong code",
    since=(2, 12, 0),
    fixed=None,
    repair="the value is cast as the store casts it, and the names are new",
    patch=patch,
    is_torch_concerned=are_epilogues_fused_by_user,
)
