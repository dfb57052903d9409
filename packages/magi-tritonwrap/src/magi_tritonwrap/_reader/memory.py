# SPDX-License-Identifier: Apache-2.0
"""What expressions can stand for in a scope, each found once, in time linear in the code that is read.

A name can stand for what it was bound to before, as in `x = x.reshape(n)`, so the answer to a question can depend on
itself. Inside such a cycle, a question is answered with what is known so far, and the outermost question of the cycle
is asked again until nothing new is found. Then the answers to the other questions of the cycle are final too.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .values import Scope, Unknown, Value, identity_of


_MAX_DEPTH = 60
_MAX_ROUNDS = 4
_MAX_VALUES = 64
Values = tuple[Value, ...]


@dataclass
class _Question:
    """An expression in a scope, with the answer so far. Both are kept alive, so that their ids are not used again."""

    expression: ast.expr
    scope: Scope
    depth: int
    values: Values = ()


class Memory:
    """Answers of one `find_kernels` call.

    Args:
        seconds: the limit in seconds of this thread's processor time. After it, every further answer is an `Unknown`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.thread_time() + seconds
        self._final: dict[tuple[int, int], _Question] = {}
        self._drafts: dict[tuple[int, int], _Question] = {}
        self._open: dict[tuple[int, int], _Question] = {}
        self._reaches_up_to = 0  # the least depth of an open question that the current one has asked

    @property
    def is_out_of_time(self) -> bool:
        """Whether the time limit is reached."""
        return time.thread_time() > self._deadline

    @property
    def out_of_time(self) -> str:
        """The reason of each `Unknown` that the time limit causes."""
        return f"the search took more than {self._seconds:g} s and left it unread"

    def values(self, expression: ast.expr, scope: Scope, evaluate: Callable[[], Iterable[Value]]) -> Values:
        """What *expression* can stand for in *scope*; *evaluate* finds it if it is asked for the first time."""
        key = (id(expression), id(scope))
        known = self._final.get(key) or self._drafts.get(key)
        if known is not None:
            self._reaches_up_to = min(self._reaches_up_to, known.depth)
            return known.values
        if key in self._open:
            self._reaches_up_to = min(self._reaches_up_to, self._open[key].depth)
            return self._open[key].values
        if len(self._open) >= _MAX_DEPTH:
            return (Unknown("the way to it is longer than the search goes", unread=True),)
        if self.is_out_of_time:
            return (Unknown(self.out_of_time, unread=True),)
        question = _Question(expression, scope, len(self._open))
        before = self._reaches_up_to
        self._open[key] = question
        try:
            self._reaches_up_to = self._answer(question, evaluate)
        finally:
            del self._open[key]
        self._keep(key, question)
        self._reaches_up_to = min(before, self._reaches_up_to)
        return question.values

    def _answer(self, question: _Question, evaluate: Callable[[], Iterable[Value]]) -> int:
        """Find the answer. Returns the depth of the outermost question of the cycle that this one is part of."""
        first_draft = len(self._drafts)
        for _ in range(_MAX_ROUNDS):
            self._reaches_up_to = question.depth + 1
            found = distinct((*question.values, *evaluate()))
            is_settled = len(found) == len(question.values)
            question.values = found
            # It is part of a larger cycle or of none, or nothing new was found in its cycle.
            if self._reaches_up_to != question.depth or is_settled:
                break
            for draft in list(self._drafts)[first_draft:]:
                del self._drafts[draft]
        return self._reaches_up_to

    def _keep(self, key: tuple[int, int], question: _Question) -> None:
        if self._reaches_up_to < question.depth:
            question.depth = self._reaches_up_to
            self._drafts[key] = question
            return
        inner = [one for one, draft in self._drafts.items() if draft.depth >= question.depth]
        for one in inner:
            self._settle(one, self._drafts.pop(one))
        self._settle(key, question)

    def _settle(self, key: tuple[int, int], question: _Question) -> None:
        question.depth = _MAX_DEPTH + 1
        self._final[key] = question


def distinct(values: Iterable[Value]) -> Values:
    """*values* without duplicates.

    Of the `Unknown` ones, the first is kept, and the first that may lead to unread code.
    """
    found: dict[object, Value] = {}
    for value in values:
        if len(found) < _MAX_VALUES:
            found.setdefault(identity_of(value), value)
    return tuple(found.values())
