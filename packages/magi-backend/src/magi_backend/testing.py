# SPDX-License-Identifier: Apache-2.0
"""The dispatcher of hot sizes without a compilation, to measure the cost of finding the code of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._hot.captured import GraphInputs, SizeInput
from ._hot.table import Size, SizeTable


def size_dispatcher(
    inputs: int, sizes: Sequence[int], codes: Mapping[tuple[int, ...], Callable[[list[Any]], Any]]
) -> Callable[..., Any]:
    """The function that calls a graph with hot sizes, with the existing code in *codes*.

    Args:
        inputs: How many inputs the graph has.
        sizes: The positions of the inputs that are sizes, in order.
        codes: The code for values of the sizes; each is a function of a list of the other inputs.

    Returns:
        A function of *inputs* arguments, which counts calls and may drop code. For sizes without code it returns None.

    Example:
        >>> find = size_dispatcher(3, [1], {(8,): lambda given: given})
        >>> find("x", 8, "y"), find("x", 9, "y")
        (['x', 'y'], None)
    """
    names = tuple(f"input{place}" for place in range(inputs))
    hot = tuple(SizeInput(place, f"s{place}", names[place]) for place in sizes)
    table = SizeTable(
        GraphInputs(names, names, hot, differentiates=False),
        general=lambda *_: None,
        make=lambda key, _: codes[key],
        hot_sizes=len(codes),
        hot_after=2**31,
        explicit=[],
        label=f"{inputs} inputs",
        changed=lambda: None,
    )
    table.codes.update({values: Size(run=code) for values, code in codes.items()})
    return table.dispatch()
