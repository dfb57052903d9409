# SPDX-License-Identifier: Apache-2.0
"""Symbolic strides are ordered with the shape environment (torch < 2.14.1).

``GraphLowering.run_node`` calls ``ir.get_stride_order(strides)`` without one. Python's sort then asks symbolic
comparisons for a truth value. Those that hold for all sizes have one; any other raises an error.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ._defect import Defect
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


NAME = "order_symbolic_strides"


def patch() -> None:
    """Use the shape environment if Python's sort cannot compare two strides."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def make(original: Callable[..., Sequence[int]]) -> Callable[..., Sequence[int]]:
        def get_stride_order(seq: Sequence[Any], shape_env: Any = None) -> Sequence[int]:
            if shape_env is not None or not is_active(NAME):
                return original(seq, shape_env)
            try:
                return original(seq)
            except TypeError:
                # sympy: "cannot determine truth value of Relational".
                order = original(seq, V.graph.sizevars.shape_env)
                report(NAME)
                return order

        return get_stride_order

    if "shape_env" in inspect.signature(ir.get_stride_order).parameters:
        replace(ir, "get_stride_order", make)


DEFECT = Defect(
    name=NAME,
    effect="attention in a training graph with dynamic sizes does not compile: "
    "'cannot determine truth value of Relational'",
    severity="no code",
    since=(2, 10, 0),
    fixed=(2, 14, 1),
    repair="symbolic strides are compared by what is known of the sizes",
    patch=patch,
)
