# SPDX-License-Identifier: Apache-2.0
"""``magi.check``: the first call of each compiled piece against eager, forward and backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from magi_backend.errors import MismatchError

from .compare import Difference, compare, compare_trees, magnitude
from .copies import copy_inputs
from .random import replayed_random_numbers


if TYPE_CHECKING:
    from torch.fx import GraphModule

Function = Callable[..., Any]


@dataclass(frozen=True)
class Outcome:
    """What a function computed from inputs of its own.

    Attributes:
        outputs: The leaves of its result.
        inputs: The inputs after the call, which may have written to them.
        gradients: The gradient of each input that requires one, for fixed cotangents; None for the others.
    """

    outputs: Any
    inputs: tuple[Any, ...]
    gradients: tuple[torch.Tensor | None, ...]


class CheckedPiece:
    """A compiled piece that compares its first call with eager.

    Args:
        compiled: The piece.
        eager: The graph that it was compiled from.
        title: How to call it in an error.
        blame: Finds the first operator that differs, given the inputs and whether it is a gradient that differs.
        report: Is told what was compared.
    """

    def __init__(
        self,
        compiled: Function,
        eager: GraphModule,
        title: str,
        *,
        blame: Callable[[tuple[Any, ...], bool], str],
        report: Callable[[str, tuple[Difference, ...]], None],
    ) -> None:
        self._compiled = compiled
        self._eager = eager
        self._title = title
        self._blame = blame
        self._report = report
        self._lock = threading.Lock()
        self._checked = False

    def __call__(self, *args: Any) -> Any:
        """Call the compiled piece; check it before, until it was found right once."""
        with self._lock:
            first, self._checked = not self._checked, True
        if first:
            try:
                self._check(args)
            except BaseException:
                self._checked = False  # what was found wrong, or not looked at to the end, is looked at again
                raise
        return self._compiled(*args)

    def _check(self, args: tuple[Any, ...]) -> None:
        names = [str(node.target) for node in self._eager.graph.find_nodes(op="placeholder")]
        differences = differences_between(self._compiled, self._eager, args, names)
        self._report(self._title, differences)
        wrong = next((difference for difference in differences if not difference.agrees), None)
        if wrong is not None:
            culprit = self._blame(args, wrong.name.startswith("gradient"))
            size = f"by {wrong.largest:.3g}" if not wrong.note else f": {wrong.note}"
            msg = (
                f"magi.check: {self._title}: {wrong.name} of the compiled code differs from eager {size} "
                f"(allowed: {wrong.tolerance.atol:.1g} + {wrong.tolerance.rtol:.1g} x the value). {culprit}"
            )
            raise MismatchError(msg)


def differences_between(
    compiled: Function, eager: Function, args: tuple[Any, ...], names: Sequence[str] = ()
) -> tuple[Difference, ...]:
    """Every output, written input and gradient of *compiled* against *eager*, each run on copies of *args*.

    *names* are those of the inputs, where they have any.
    """
    names = names or [f"input {index}" for index in range(len(args))]
    with replayed_random_numbers() as rewind:
        expected = outcome(eager, args)
        rewind()
        actual = outcome(compiled, args)
    size = max((magnitude(g) for g in expected.gradients if g is not None), default=1.0)
    gradients = (
        compare(f"gradient of {name}", ours, theirs, scale=min(1.0, size))
        for name, ours, theirs in zip(names, actual.gradients, expected.gradients, strict=True)
        if theirs is not None or ours is not None
    )
    return (
        *compare_trees("output", actual.outputs, expected.outputs),
        *compare_trees("input after the call", actual.inputs, expected.inputs),
        *gradients,
    )


def outcome(fn: Function, args: tuple[Any, ...]) -> Outcome:
    """Run *fn* on copies of *args* and differentiate its outputs."""
    copies = copy_inputs(args)
    outputs = fn(*copies.values)
    found = iter(_gradients(pytree.tree_leaves(outputs), [leaf for leaf in copies.leaves if leaf is not None]))
    gradients = tuple(next(found) if leaf is not None else None for leaf in copies.leaves)
    return Outcome(
        _detached(pytree.tree_leaves(outputs)), tuple(_detached(value) for value in copies.values), gradients
    )


def _gradients(leaves: Sequence[Any], wanted: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    roots = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not roots or not wanted:
        return [None] * len(wanted)
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(root.shape, generator=generator, dtype=root.dtype).to(root.device) for root in roots]
    return torch.autograd.grad(roots, wanted, cotangents, allow_unused=True)


def _detached(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tree)
