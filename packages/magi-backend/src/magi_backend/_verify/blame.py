# SPDX-License-Identifier: Apache-2.0
"""Find the operator whose compiled result, or gradient, differs from eager although its inputs are those of eager.

The graph is cut into parts that are compiled side by side in one graph and compute from eager values, so each is judged
separately. The first wrong part is cut again, until it is one operator. If no part is wrong, the difference needs
several operators together; then the range is shortened from both ends while it stays wrong.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from magi_backend import _torch_compat

from .parts import Part, Unit, entering_values, part_of, side_by_side, units
from .random import replayed_random_numbers
from .run import Outcome, differences, run
from .uninitialised import run_eager


Compile = Callable[[GraphModule], Callable[..., Any]]

WAYS = 16
"""Into how many parts a range is cut."""
AT_ONCE = 24
"""A range of at most so many operators is cut into single ones."""
TYPICAL, MOST = 1.5, 3.0
"""What a search compiles, in multiples of the operators of the graph: a typical value, and the limit."""
SMALL = 4 * AT_ONCE
"""So many operators may always be compiled, because in small graphs the limit would end a search that costs little."""


def cost(seconds: float) -> str:
    """How long a search takes, as text, if compiling the whole piece took *seconds*."""
    return f"about {TYPICAL * seconds:.0f} s, at most about {MOST * seconds:.0f} s"


def first_operator(gm: GraphModule, args: tuple[Any, ...], compile_part: Compile, *, gradients: bool) -> str:
    """A sentence on the operator of *gm* whose output, or with *gradients* whose gradient, differs for inputs *args*.

    *compile_part* compiles a graph that consists of a part of *gm*.
    """
    whole = units(gm)
    search = _Search(gm, args, compile_part, gradients=gradients, left=max(int(MOST * len(whole)), SMALL))
    span = search.narrow(whole)
    if len(span) == 1:
        direction = " on the way back from the outputs" if gradients else ""
        return f"The first operator that differs{direction} is {_describe(span[0])}."
    if len(span) == len(whole):
        return "No shorter part of it differs when it is compiled separately, so only the whole piece goes wrong."
    return (
        f"It is among {len(span)} operators that differ when they are compiled together, and of which no part was "
        f"found to differ by itself: from {_describe(span[0])} to {_describe(span[-1])}."
    )


@dataclass
class _Search:
    """One search, with the operators that it may still compile."""

    gm: GraphModule
    args: tuple[Any, ...]
    compile_part: Compile
    gradients: bool
    left: int

    @functools.cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes of the tensors in the whole graph, whose errors a part of it may have."""
        return _torch_compat.dtypes_in(self.gm)

    def narrow(self, span: tuple[Unit, ...]) -> tuple[Unit, ...]:
        """The shortest range in *span* that was found to differ."""
        alone_right = False
        while len(span) > 1 and self.left >= len(span):
            wrong = None if alone_right else self._wrong(_pieces(span))
            if wrong is None:
                alone_right = alone_right or len(span) <= AT_ONCE
                wrong = self._wrong_without_an_end(span)
            if wrong is None:
                return span
            span = wrong
        return span

    def _wrong_without_an_end(self, span: tuple[Unit, ...]) -> tuple[Unit, ...] | None:
        """*span* without its last or first quarter, whichever is still wrong."""
        quarter = max(len(span) // 4, 1)
        candidates = [part for part in (span[:-quarter], span[quarter:]) if len(part) > 1]
        return self._wrong(candidates) if candidates and self.left >= sum(map(len, candidates)) else None

    def _wrong(self, candidates: Sequence[tuple[Unit, ...]]) -> tuple[Unit, ...] | None:
        """The first of *candidates* that differs; for gradients the last, because the backward reaches that first."""
        self.left -= sum(map(len, candidates))
        parts = [part_of(self.gm, units) for units in candidates]
        found = [units for units, differ in zip(candidates, self._differ(parts), strict=True) if differ]
        if not found:
            return None
        return found[-1] if self.gradients else found[0]

    def _differ(self, parts: Sequence[Part]) -> list[bool]:
        entered = entering_values(self.gm, self.args, parts)
        together = side_by_side(self.gm, parts, entered)
        flat = tuple(value for each in entered for value in each.values)
        compiled = self.compile_part(_torch_compat.graph_copy(together))
        with replayed_random_numbers() as numbers:
            eager = run_eager(together, flat, numbers.rewind)
            numbers.rewind()
            actual, expected = eager.settle(run(compiled, flat)), eager.outcome
        verdicts, start = [], 0
        for index, each in enumerate(entered):
            places = range(start, start + len(each.values))
            ours, theirs = (_outcome(each, index, places) for each in (actual, expected))
            found = differences(ours, theirs, kind="input", computed_in=self.dtypes)
            wrong = [difference for difference in found if not difference.agrees]
            verdicts.append(any(self.gradients or not d.name.startswith("gradient") for d in wrong))
            start = places.stop
        return verdicts


def _pieces(span: tuple[Unit, ...]) -> list[tuple[Unit, ...]]:
    """*span* in consecutive pieces of about equal length."""
    count = len(span) if len(span) <= AT_ONCE else WAYS
    bounds = [len(span) * index // count for index in range(count + 1)]
    return [span[start:end] for start, end in itertools.pairwise(bounds)]


def _outcome(outcome: Outcome, index: int, places: range) -> Outcome:
    """The part of *outcome* that belongs to part *index*, whose inputs are those at *places*."""
    prefixes = tuple(f"[0][{place}]" for place in places)

    def own(path: str) -> bool:
        return path.startswith(prefixes) if prefixes else False

    return replace(
        outcome,
        outputs=outcome.outputs[index],
        inputs=tuple(outcome.inputs[0][place] for place in places),
        written=frozenset(path for path in outcome.written if own(path)),
        gradients={path: gradient for path, gradient in outcome.gradients.items() if own(path)},
    )


def _describe(unit: Unit) -> str:
    """The operator, and the innermost line of user code that called it."""
    node: Node = unit[0]
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    calls = [index for index, line in enumerate(lines) if line.startswith("File ")]
    if not calls:
        return f"{target} (node {node.name})"
    where, code = lines[calls[-1]], lines[calls[-1] + 1 :][:1]
    return f"{target} (node {node.name}), {where}: {' '.join(code)}"
