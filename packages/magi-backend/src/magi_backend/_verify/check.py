# SPDX-License-Identifier: Apache-2.0
"""``magi.check``: the first call of each compiled piece against eager, forward and backward."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from magi_backend import _torch_compat
from magi_backend.errors import MismatchError

from .blame import cost
from .compare import Difference, leaves_of
from .run import differences, replayed_random_numbers, run, run_eager


_ROOT = re.compile(r"[LG]\['(\w+)'\]")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


def input_names(gm: GraphModule) -> dict[str, str]:
    """The name of each input of *gm* by its placeholder: the name of a parameter in its module, or that of an argument.

    Inputs whose source Dynamo does not give are left out.
    """
    return {
        str(node.target): name
        for node in gm.graph.find_nodes(op="placeholder")
        if (name := readable(_torch_compat.nodes.source_name(node)))
    }


def readable(source: str) -> str:
    """*source*, Dynamo's Python expression for a value, as its owner would write it; empty if it cannot be parsed.

    Example:
        >>> readable("L['self']._modules['blocks']._modules['0']._parameters['weight']")
        'blocks.0.weight'
        >>> readable("L['cfg'].scale")
        'cfg.scale'
    """
    root = _ROOT.match(source)
    if root is None:
        return ""
    path = _MEMBER.sub(r".\1", source[root.end() :])
    return path.removeprefix(".") if root[1] == "self" and path else root[1] + path


logger = logging.getLogger("magi_backend")


@dataclass(eq=False)
class CheckedPiece:
    """A compiled piece that compares its first call with *eager*, the graph that it was compiled from."""

    compiled: Callable[..., Any]
    eager: GraphModule
    title: str
    names: Mapping[str, str]
    """The names of inputs, by placeholder, of those that have a name."""
    blame: Callable[[tuple[Any, ...], bool], str]
    """Finds the first operator that differs, given the inputs and whether a gradient differs."""
    report: Callable[[str, tuple[Difference, ...]], None]
    seconds: float
    """How long compiling the piece took so far; a backward is compiled in the first call."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _checked: bool = False

    def __call__(self, *args: Any) -> Any:
        """Call the compiled piece; before that, check it, until one check has succeeded."""
        with self._lock:
            first, self._checked = not self._checked, True
        if first:
            try:
                self._check(args)
            except BaseException:
                self._checked = False  # after a wrong or unfinished check, the next call is checked again
                raise
        return self.compiled(*args)

    def _check(self, args: tuple[Any, ...]) -> None:
        placeholders = [str(node.target) for node in self.eager.graph.find_nodes(op="placeholder")]
        names = {f"[0][{place}]": self.names.get(name, name) for place, name in enumerate(placeholders)}
        with replayed_random_numbers() as numbers:
            expected = run_eager(self.eager, args, numbers.rewind, _listed)
            numbers.rewind()
            actual = expected.settle(run(lambda *args: _listed(self.compiled(*args)), args))
        dtypes = _torch_compat.nodes.dtypes_in(self.eager)
        found = differences(actual, expected.outcome, kind="input", names=names, computed_in=dtypes)
        self.report(self.title, found)
        wrong = next((difference for difference in found if not difference.agrees), None)
        if wrong is not None:
            size = f"by {wrong.largest:.3g}" if not wrong.note else f": {wrong.note}"
            msg = (
                f"magi.check: {self.title}: {wrong.name} of the compiled code differs from eager {size} "
                f"(allowed: {wrong.tolerance.atol:.1g} + {wrong.tolerance.rtol:.1g} x the value)."
            )
            logger.warning("%s Searching for the operator, which takes %s.", msg, cost(self.seconds + actual.seconds))
            try:
                culprit = self.blame(args, wrong.name.startswith("gradient"))
            except Exception as error:
                logger.warning("The search failed.", exc_info=True)
                culprit = f"The search for the operator failed with {type(error).__name__}: {error}"
            raise MismatchError(f"{msg} {culprit}")


def _listed(outputs: Any) -> list[Any]:
    """The leaves of *outputs*, because a piece returns a tuple and its compiled code a list."""
    return [leaf for _, leaf in leaves_of(outputs)]
