# SPDX-License-Identifier: Apache-2.0
"""Memory that an allocation leaves as it was: which elements of a result depend on it, and so are not compared.

A piece of a graph may return such memory. vLLM allocates the output of an attention in one piece, for example, and the
attention, which is a boundary, writes to it. Eager runs with zeros in this memory, and again with NaN, or with the
largest number for integers. Elements that become NaN, or another integer, depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from magi_backend import _torch_compat

from .compare import comparable
from .run import Outcome, run
from .trees import leaves_of, with_leaves


@dataclass(frozen=True)
class Expected:
    """What eager computes.

    Attributes:
        outcome: The run that a compiled one is compared with.
        other: The run with other contents in memory that nobody has written; None if the graph allocates none.
    """

    outcome: Outcome
    other: Outcome | None

    def settle(self, actual: Outcome) -> Outcome:
        """*actual*, with the elements of `outcome` where these depend on memory that nobody has written."""
        if self.other is None:
            return actual
        names = ("outputs", "inputs", "gradients")
        trees = {name: [getattr(each, name) for each in (actual, self.outcome, self.other)] for name in names}
        return replace(actual, **{name: _settled(*found) for name, found in trees.items()})


def run_eager(
    gm: GraphModule,
    args: tuple[Any, ...],
    rewind: Callable[[], object],
    result: Callable[[Any], Any] = lambda outputs: outputs,
) -> Expected:
    """Run *gm* on copies of *args*, and a second time if its result may depend on what was in memory.

    Args:
        gm: The graph.
        args: Its inputs.
        rewind: Called before the second run, which gets the random numbers of the first.
        result: What becomes of the outputs before they are copied.
    """
    if not any(_torch_compat.is_empty(node) for node in gm.graph.nodes):
        return Expected(run(lambda *args: result(gm(*args)), args), None)
    first = run(lambda *args: result(_Filled(gm, torch.Tensor.zero_).run(*args)), args)
    rewind()
    return Expected(first, run(lambda *args: result(_Filled(gm, _fill_otherwise).run(*args)), args))


class _Filled(Interpreter):
    """Runs a graph, and fills the memory that its calls leave as it was."""

    def __init__(self, gm: GraphModule, fill: Callable[[torch.Tensor], object]) -> None:
        super().__init__(gm)
        self._fill = fill

    def run_node(self, node: Node) -> Any:
        value = super().run_node(node)
        if _torch_compat.is_empty(node):
            with torch.no_grad():
                self._fill(value.view(torch.uint8) if value.dtype is torch.float4_e2m1fn_x2 else value)
        return value


def _fill_otherwise(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


def _settled(actual: Any, expected: Any, other: Any) -> Any:
    """*actual*, with the elements of *expected* that are others in *other*."""
    places = {path: (leaf, twin) for (path, leaf), (_, twin) in zip(leaves_of(expected), leaves_of(other), strict=True)}
    leaves = iter([_settled_leaf(leaf, *places.get(path, (None, None))) for path, leaf in leaves_of(actual)])
    return with_leaves(actual, lambda _: next(leaves))


def _settled_leaf(actual: Any, expected: Any, other: Any) -> Any:
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return actual
    if actual.shape != expected.shape or actual.dtype != expected.dtype or expected.layout is not torch.strided:
        return actual
    # torch 2.11 does not choose between unsigned numbers.
    bits = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(actual.dtype)
    ours, theirs = (actual, expected) if bits is None else (actual.view(bits), expected.view(bits))
    return torch.where(_depends(comparable(expected), comparable(other)), theirs, ours).view(actual.dtype)


def _depends(expected: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The elements that depend on memory that nobody has written.

    Floating-point elements that merely differ do not count, because the order of additions may differ between runs.
    """
    if expected.is_floating_point() or expected.is_complex():
        return other.isnan() & ~expected.isnan()
    return expected != other
