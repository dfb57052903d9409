# SPDX-License-Identifier: Apache-2.0
"""A quotient of two sizes without an upper bound has no known range, rather than none (every torch from 2.10 on).

Inductor computes the range of each value. ``SymPyValueRangeAnalysis.truediv`` divides the ends of the ranges unless
both are infinite, but it checks for the infinity of floats, and sizes have a different one. It divides ``int_oo`` by
``int_oo``, and cannot compare the resulting nan: ``torch.div(x.shape[0], y.shape[0], rounding_mode="trunc")`` does not
compile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._defect import Defect
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable


NAME = "bound_infinite_quotients"


def patch() -> None:
    """Return the range that torch returns for infinite floats."""
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import SymPyValueRangeAnalysis, ValueRanges

    def meet(a: Any, b: Any) -> bool:
        """Whether an infinite end of *a* is divided by one of *b*. Torch does not divide by a range with 0 in it."""
        unbounded = (values.lower == -int_oo or values.upper == int_oo for values in (a, b))
        return all(unbounded) and 0 not in b

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def truediv(a: Any, b: Any) -> Any:
            if is_active(NAME) and meet(ValueRanges.wrap(a), ValueRanges.wrap(b)):
                report(NAME)
                return ValueRanges.unknown()
            return original(a, b)

        return truediv

    replace(SymPyValueRangeAnalysis, "truediv", make)


DEFECT = Defect(
    name=NAME,
    effect="a division of two dynamic sizes as tensors, as in Longformer, does not compile: "
    "'TypeError: Invalid NaN comparison'",
    severity="no code",
    since=(2, 10, 0),
    fixed=None,
    repair="the range of a quotient of two unbounded sizes is taken as unknown",
    patch=patch,
)
