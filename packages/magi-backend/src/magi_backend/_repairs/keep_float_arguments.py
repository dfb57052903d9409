# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel of the user gets its float arguments in 32 bits, as Triton passes them (torch 2.11 to 2.14).

`signature_of` (torch/_inductor/codegen/triton_utils.py) declares each Python float as ``fp64``, as Inductor's own
kernels need it, but also in kernels of the user. So ``scale * x`` is float64: a kernel that passes the product to
`tl.dot` together with float32 does not compile, and one that computes it in a loop takes 1.5 times as long (`chunk_gla`
and `fused_recurrent_gla` of flash-linear-attention, one H200, torch 2.11). Triton's launcher takes a float in 32 bits
unless its parameter is annotated with another type, and so does torch 2.15.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ._defect import Defect
from ._kernels import parameters_of
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable


NAME = "keep_float_arguments"

_annotated: ContextVar[frozenset[str]] = ContextVar("magi_annotated_parameters", default=frozenset())
"""Names of the parameters that are annotated with a type in the user's kernel that is being declared."""


def patch() -> None:
    """Declare such an argument as ``fp32``."""
    from torch._inductor.codegen import wrapper

    def make_definition(original: Callable[..., Any]) -> Callable[..., Any]:
        def define_user_defined_triton_kernel(self: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
            token = _annotated.set(_annotated_parameters(kernel))
            try:
                return original(self, kernel, *args, **kwargs)
            finally:
                _annotated.reset(token)

        return define_user_defined_triton_kernel

    def make_declaration(original: Callable[..., dict[str, str]]) -> Callable[..., dict[str, str]]:
        def signature_to_meta(*args: Any, **kwargs: Any) -> dict[str, str]:
            declared = original(*args, **kwargs)
            wide = [name for name, kind in declared.items() if kind == "fp64" and name not in _annotated.get()]
            if not wide or not is_active(NAME):
                return declared
            report(NAME)
            return declared | dict.fromkeys(wide, "fp32")

        return signature_to_meta

    replace(wrapper.PythonWrapperCodegen, "define_user_defined_triton_kernel", make_definition)
    # This function declares kernels of the user only.
    replace(wrapper, "signature_to_meta", make_declaration)


def _annotated_parameters(kernel: Any) -> frozenset[str]:
    """The parameters of *kernel* that are annotated with a type."""
    return frozenset(parameter.name for parameter in parameters_of(kernel) if parameter.annotation_type)


DEFECT = Defect(
    name=NAME,
    effect="a Triton kernel of the user that takes a float computes in float64: slower, or it does not compile",
    severity="no code",
    since=(2, 11, 0),
    fixed=(2, 15, 0),
    repair="float arguments of the user's Triton kernels are passed in 32 bits, as Triton does",
    patch=patch,
)
