# SPDX-License-Identifier: Apache-2.0
"""``magi.check``: the first call of each compiled piece against eager, forward and backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from magi_backend.errors import MismatchError

from .compare import Difference
from .random import replayed_random_numbers
from .run import differences, run
from .trees import leaves_of


if TYPE_CHECKING:
    from torch.fx import GraphModule

Function = Callable[..., Any]


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
        found = differences_between(self._compiled, self._eager, args, names)
        self._report(self._title, found)
        wrong = next((difference for difference in found if not difference.agrees), None)
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
    with replayed_random_numbers() as rewind:
        expected = run(_listing(eager), args)
        rewind()
        actual = run(_listing(compiled), args)
    return differences(actual, expected, kind="input", names={f"[0][{i}]": name for i, name in enumerate(names)})


def _listing(fn: Function) -> Function:
    """*fn* with a list of what it returns: a piece returns a tuple, its compiled code a list."""
    return lambda *args: [leaf for _, leaf in leaves_of(fn(*args))]
