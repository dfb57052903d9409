# SPDX-License-Identifier: Apache-2.0
"""A pattern that lacks one of its own inputs matches nothing (torch 2.10 and newer).

Inductor searches for ``x[torch.randperm(n)[:k]]``. It traces the pattern with a *k* above *n*, for which the slice is
not a call. So the pattern matches ``x[torch.randperm(n)]`` without a *k*, and the check of every match raises an error.
By default, Inductor replaces the random number operators before the search; under ``fallback_random``, which `explain`
and ``magi.check`` use, it does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ._defect import Defect
from ._scope import is_active, replace, report


if TYPE_CHECKING:
    from collections.abc import Callable


NAME = "match_whole_permutations"


def patch() -> None:
    """Make the check of a match return False if the pattern lacks one of its inputs."""
    from torch._inductor.pattern_matcher import PatternMatcherPass

    def make(original: Callable[..., int]) -> Callable[..., int]:
        def apply(self: Any, *args: Any, **kwargs: Any) -> int:
            if is_active(NAME):
                for entries in (
                    self.patterns[key] for key in list(self.patterns) if torch.ops.aten.index.Tensor in key
                ):
                    for entry in entries:
                        replace(entry, "extra_check", _no_where_it_lacks_inputs)
            return original(self, *args, **kwargs)

        return apply

    replace(PatternMatcherPass, "apply", make)


def _no_where_it_lacks_inputs(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def extra_check(match: Any) -> Any:
        if not is_active(NAME):
            return original(match)
        try:
            return original(match)
        except RuntimeError as error:
            if "Not all inputs to pattern found" not in str(error):
                raise
            report(NAME)
            return False

    return extra_check


DEFECT = Defect(
    name=NAME,
    effect="a tensor that is indexed by a whole torch.randperm does not compile under fallback_random: "
    "'Not all inputs to pattern found'",
    severity="no code",
    since=(2, 10, 0),
    fixed=None,
    repair="the pattern, which lacks one of its inputs, matches nothing",
    patch=patch,
    is_of_joint_graphs=True,
)
