# SPDX-License-Identifier: Apache-2.0
"""The quotient of two sizes inside a Triton kernel is what Python's ``/`` gives (every torch from 2.10 on).

``TritonPrinter`` writes ``s0 / s1`` for a division of two symbolic sizes. Triton divides integers in float32, and its
``/`` of float32 is PTX's ``div.full``, which may be two units in the last place too small. So ``45 / 45`` may be less
than 1, and a nearest upsampling, which rounds ``i * (s0 / s1)`` down, reads the pixel before the right one everywhere.
Python divides in float64, and Triton's ``/`` of float64 is rounded as IEEE 754 requires.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._defect import Defect
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable


NAME = "divide_sizes_exactly"


def _division(printer: Any, dividend: Any, divisor: Any) -> str:
    """The code of the quotient in the widest float of the device; for float32, a function divides exactly."""
    float_type = getattr(printer, "_get_scalar_float_type", lambda: "tl.float64")()
    left, right = (f"tl.cast({printer.doprint(size)}, {float_type})" for size in (dividend, divisor))
    return f"({left} / {right})" if float_type == "tl.float64" else f"tl.div_rn({left}, {right})"


def patch() -> None:
    """Print the exact division."""
    from torch._inductor.codegen.triton import TritonPrinter

    def make(original: Callable[..., str]) -> Callable[..., str]:
        def _print_IntTrueDiv(self: Any, expr: Any) -> str:  # noqa: N802  # sympy finds it by this name
            if not is_active(NAME):
                return original(self, expr)
            report(NAME)
            return _division(self, *expr.args)

        return _print_IntTrueDiv

    replace(TritonPrinter, "_print_IntTrueDiv", make)


DEFECT = Defect(
    name=NAME,
    effect="on a GPU, nearest upsampling to a size given by another tensor is shifted by a pixel at some sizes",
    severity="wrong code",
    since=(2, 10, 0),
    fixed=None,
    repair="a quotient of sizes is computed in float64, as Python does",
    patch=patch,
)
