# SPDX-License-Identifier: Apache-2.0
"""A tensor compared with what is not a tensor does not break the graph, and answers what it answers in eager code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from magi_backend import explain, magi_compile
from torch import Tensor
from torch._dynamo.utils import counters


WORDS = {"rep": "Rep"}


def compared(x: Tensor, entries: list[object]) -> Tensor:
    """Ones and zeros for the answers, as the caches of WAN's decoder are asked for ``"Rep"``."""
    answers = [
        *(x == "Rep", x != "Rep", "Rep" == x, "Rep" != x),  # noqa: SIM300
        *(entries[0] == "Rep", entries[0] != WORDS["rep"], entries[1] == "Rep"),
        *(x == None, x != None, x == ..., x == torch.float32),  # noqa: E711
        *(x == (1, 2), x == ["a"], x == {}, x != (1, 2)),
    ]
    assert all(isinstance(answer, bool) for answer in answers)
    return x * 0 + torch.tensor(sum(2**place for place, answer in enumerate(answers) if answer))


@pytest.mark.parametrize("route", ["torch.compile", "options", "magi_compile"])
def test_answers_are_those_of_eager_code(route: str) -> None:
    torch._dynamo.reset()
    if route == "magi_compile":
        run = magi_compile(compared)
    else:
        options: Any = {"magi.progress": False} if route == "options" else None
        run = torch.compile(compared, backend="magi", fullgraph=True, dynamic=True, options=options)
    counters.clear()
    x = torch.ones(2)
    assert torch.equal(run(x, [x, "Rep"]), compared(x, [x, "Rep"]))
    assert not counters["graph_break"]


def test_numbers_and_tensors_are_still_compared_by_element() -> None:
    torch._dynamo.reset()

    def fn(x: Tensor, y: Tensor) -> list[Any]:
        return [x == 1, x == 1.0, x == True, x != 1, x == y, 1 == x]  # noqa: E712, SIM300

    x, y = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0])
    for found, wanted in zip(torch.compile(fn, backend="magi", fullgraph=True)(x, y), fn(x, y), strict=True):
        assert torch.equal(found, wanted)


def test_the_report_names_the_repair_where_torch_would_break_the_graph() -> None:
    torch._dynamo.reset()

    @magi_compile
    def compiled(x: Tensor, word: str) -> Tensor:
        return x + 1 if x == word else x - 1

    def names(word: str) -> list[str]:
        return [
            r.name for c in explain(compiled)(torch.ones(2), word).compilations for n in c.graphs for r in n.repairs
        ]

    expected = ["compare_with_constants"] if torch.__version__ < "2.13" else []
    assert names("Rep") == expected


@pytest.mark.skipif(torch.__version__ >= "2.13", reason="torch traces the comparison itself")
def test_other_backends_are_left_alone() -> None:
    torch._dynamo.reset()
    torch.compile(lambda x: x + (x == "Rep"), backend="magi")(torch.ones(2))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="returned non-Tensor"):
        torch.compile(lambda x: x + (x == "Rep"), backend="eager", fullgraph=True)(torch.ones(2))
