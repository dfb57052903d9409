# SPDX-License-Identifier: Apache-2.0
"""A quotient of two sizes without an upper bound has no known range, rather than none (every torch from 2.10 on).

Inductor asks for the range of each value that it computes. ``SymPyValueRangeAnalysis.truediv`` divides the ends of the
ranges, unless infinities meet; but it looks for the infinity of floats, and that of sizes is another one. It divides
``int_oo`` by ``int_oo``, and cannot compare the nan that comes out: ``torch.div(x.shape[0], y.shape[0],
rounding_mode="trunc")`` does not compile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._defect import Defect
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable


NAME = "bound_infinite_quotients"


def patch() -> None:
    """Answer the question for such sizes as torch answers it for infinite floats."""
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import SymPyValueRangeAnalysis, ValueRanges

    def meet(a: Any, b: Any) -> bool:
        """Whether an infinity of *a* is divided by one of *b*; a range with 0 in it is not divided by."""
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
    effect="a division of two dynamic sizes as tensors, as Longformer has it, does not compile: "
    "'TypeError: Invalid NaN comparison'",
    severity="no code",
    since=(2, 10, 0),
    fixed=None,
    repair="the range of a quotient of two unbounded sizes is taken as unknown",
    patch=patch,
)
