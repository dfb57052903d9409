# SPDX-License-Identifier: Apache-2.0
"""Quotients inside the remainder of two symbolic strides are cancelled (torch < 2.14.1).

``Layout._stride_expr_ge_or_false`` asks the shape environment whether ``left % right`` is 0. The ``%`` is that of
sympy, which takes out the greatest common divisor and does not cancel quotients, so images of n+1 by n+1 pixels give
``Mod(1, (n**2 + 2*n + 1)/(n + 1))``. A reciprocal is not an integer: its range is empty, which raises an error, and a
guard with one in it cannot be printed. The quotients are polynomials, so they can be cancelled, and ``Mod`` of torch
leaves the result unchanged.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ._defect import Defect
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable


NAME = "divide_strides_exactly"


@functools.lru_cache(4096)
def cancelled(question: Any) -> Any:
    """*question*, with the reciprocals in its remainders cancelled."""
    import sympy
    from torch.utils._sympy.functions import Mod

    def has_reciprocal(remainder: Any) -> bool:
        return any(power.exp.is_negative for power in remainder.atoms(sympy.Pow))

    remainders = [found for found in question.atoms(sympy.Mod) if has_reciprocal(found)]
    return question.xreplace({found: Mod(*map(sympy.cancel, found.args)) for found in remainders})


def patch() -> None:
    """Ask the shape environment a question without reciprocals."""
    from torch._inductor.sizevars import SizeVarAllocator

    def make(original: Callable[..., bool]) -> Callable[..., bool]:
        def evaluate_expr(self: Any, left: Any, *args: Any, **kwargs: Any) -> bool:
            if not is_active(NAME):
                return original(self, left, *args, **kwargs)
            asked = cancelled(left)
            if asked is not left and asked != left:
                report(NAME)
            return original(self, asked, *args, **kwargs)

        return evaluate_expr

    replace(SizeVarAllocator, "evaluate_expr", make)


DEFECT = Defect(
    name=NAME,
    effect="convolutions behind tokens of a square image of dynamic size do not compile: "
    "'ValueRangeError: Invalid ranges [0:-1]'",
    severity="no code",
    since=(2, 13, 0),
    fixed=(2, 14, 1),
    repair="strides that divide each other are divided before their remainder is asked for",
    patch=patch,
)
