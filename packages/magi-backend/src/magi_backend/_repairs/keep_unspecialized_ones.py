# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel of the user gets a ``do_not_specialize`` argument of 1 as a number, on all releases.

Triton makes a constant of each int argument that is 1, except for the parameters named in ``do_not_specialize``.
Inductor does so for those too (``equals_1`` of `define_user_defined_triton_kernel` in
torch/_inductor/codegen/wrapper.py). In the body the parameter is then a Python int, and ``T.to(tl.int64)`` does not
compile. `fused_recurrent_delta_rule_fwd_kernel` of flash-linear-attention fails in this way when it decodes one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._defect import Defect
from ._kernels import parameters_of
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


NAME = "keep_unspecialized_ones"


def patch() -> None:
    """Pass such an argument to Inductor as an expression, rather than as a number."""
    from torch._inductor.codegen import wrapper

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def define_user_defined_triton_kernel(
            self: Any, kernel: Any, configs: Any, kwargs: Mapping[str, Any], *args: Any, **rest: Any
        ) -> Any:
            ones = _unspecialized_ones(kernel, kwargs) if is_active(NAME) else {}
            if ones:
                report(NAME)
            return original(self, kernel, configs, {**kwargs, **ones}, *args, **rest)

        return define_user_defined_triton_kernel

    replace(wrapper.PythonWrapperCodegen, "define_user_defined_triton_kernel", make)


def _unspecialized_ones(kernel: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The ``do_not_specialize`` arguments of *kernel* that are 1, as expressions that hide their value."""
    import sympy
    from torch._inductor.virtualized import V
    from torch.utils._sympy.functions import Identity

    given = {
        parameter.name: kwargs.get(parameter.name)
        for parameter in parameters_of(kernel)
        if parameter.do_not_specialize and not parameter.is_constexpr
    }
    return {
        name: Identity(sympy.Integer(1))
        for name, value in given.items()
        if isinstance(value, int | sympy.Integer) and V.graph.sizevars.statically_known_equals(value, 1)
    }


DEFECT = Defect(
    name=NAME,
    effect="a Triton kernel of the user whose `do_not_specialize` argument is 1 gets a constant, and may not compile",
    severity="no code",
    since=(2, 10, 0),
    fixed=None,
    repair="arguments that the user's Triton kernels do not specialize stay numbers where they are 1",
    patch=patch,
)
