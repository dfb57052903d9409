# SPDX-License-Identifier: Apache-2.0
"""Programs of views, copies and mutations do under ``backend="magi"`` what they do under ``aot_eager``.

Compared are results, arguments after the call, and which of these tensors share memory. Eight programs are one compiled
function, because g++ starts once for each. Half of the functions have symbolic sizes. ``MAGI_FUZZ_PROGRAMS`` sets the
number of programs of the slow tests; with ``MAGI_FUZZ_SECONDS`` each of them begins no others after that time.

It does not show what happens on a GPU. Not compared is whether two results in the same memory are one Python object:
Inductor returns one for ``y`` and ``y[0:]``, ``aot_eager`` returns two. Left out are programs that eager refuses, and
calls of an operator that mutates a tensor with another that overlaps it: for these eager and ``aot_eager`` differ.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from _alias_programs import Outcome, Program, arguments, function_of, outcome, programs, registered
from hypothesis import HealthCheck, Phase, given, seed, settings


pytestmark = pytest.mark.kernels

TOGETHER = 8
PROGRAMS = int(os.environ.get("MAGI_FUZZ_PROGRAMS", "2000"))
SECONDS = float(os.environ.get("MAGI_FUZZ_SECONDS", "inf"))
# Each is a test of its own, so that they run side by side.
PARTS = 30

FOUND = (
    # Wrong under stock, each by another of the two repairs.
    Program(1, ("v0 = x0.clone()", "ops.both(v0, x0)"), ("v0",)),
    Program(2, ("ops.rotate(x0.clone(), x0)", "v1 = x0 * 2"), ("v1",)),
    Program(2, ("v0 = torch.slice_scatter(x0, x1[:2], 0, 1, 3)", "x0.zero_()"), ("v0",)),
    Program(1, ("v0 = torch.diagonal_scatter(x0, x0.diagonal())", "x0.fill_(2)"), ("v0",)),
    Program(1, ("x0.index_fill_(0, i, 9.0)", "v1 = x0.clone()", "x0.clamp_(0, 3)"), ("v1",)),
    Program(2, ("x0[0:, :] = x1[0:, :]", "x1.add_(1)"), ("x1",)),
    Program(2, ("v0 = torch.slice_scatter(x0, x1[:2], 0, 1, 3)", "x0.copy_(v0)"), ("v0",)),
    Program(1, ("x0[1:] = x0[:-1].clone()",), ("x0",)),
    # Found by the drawn programs: the second write of a kernel that reads elsewhere, fused with the read.
    Program(2, ("ops.rotate(x1, x0)", "x0[1:] = x0[:-1].clone()"), ("x0",)),
)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return registered("magi_alias_programs")


def runs_in_eager(program: Program, names: dict[str, Any]) -> bool:
    """Whether eager runs *program*, and no operator gets tensors that overlap."""
    try:
        outcome(function_of(program.text(), names), arguments(program.inputs, 4))
    except (RuntimeError, AssertionError):
        return False
    return True


def outcomes(
    together: Sequence[Program], names: dict[str, Any], size: int, backend: str, dynamic: bool
) -> list[Outcome]:
    """What each program does in one function of all of them."""
    texts = [program.text(f"program{index}") for index, program in enumerate(together)]
    calls = ", ".join(f"program{index}(*given[{index}])" for index in range(len(together)))
    function = function_of("\n".join([*texts, f"def program(given):\n    return [{calls}]\n"]), names)
    torch.compiler.reset()
    given = [arguments(program.inputs, size) for program in together]
    results = torch.compile(function, backend=backend, dynamic=dynamic)(given)
    return [outcome(lambda *_, its=its: its, mine) for mine, its in zip(given, results, strict=True)]


def differences(drawn: Sequence[Program], names: dict[str, Any], dynamic: bool) -> list[str]:
    """For each program that differs, its text and how."""
    size = 5 if dynamic else 4
    expected = outcomes(drawn, names, size, "aot_eager", dynamic)
    try:
        actual = outcomes(drawn, names, size, "magi", dynamic)
    except Exception as error:  # noqa: BLE001 (whatever the compiler raises is a difference)
        if len(drawn) > 1:
            return [line for program in drawn for line in differences([program], names, dynamic)]
        return [f"{drawn[0].text()}\n{type(error).__name__}: {error}"]
    compared = [(program, mine.differs_from(its)) for program, mine, its in zip(drawn, actual, expected, strict=True)]
    return [f"{program.text()}\nsymbolic sizes: {dynamic}\n{how}" for program, how in compared if how]


def drawn_programs(count: int, names: dict[str, Any], start: int) -> Iterator[list[Program]]:
    """*count* programs that eager runs, *TOGETHER* at a time."""
    kept: list[Program] = []

    @seed(start)
    @settings(
        # Some are refused by eager, or drawn twice.
        max_examples=2 * count + 50,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def draw(program: Program) -> None:
        if len(kept) < count and program not in kept and runs_in_eager(program, names):
            kept.append(program)

    draw()
    assert len(kept) == count
    yield from (kept[at : at + TOGETHER] for at in range(0, count, TOGETHER))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_programs_that_stock_gets_wrong(dynamic: bool, names: dict[str, Any]) -> None:
    assert differences(FOUND, names, dynamic) == []


def test_a_few_programs(names: dict[str, Any]) -> None:
    found = [
        line
        for index, together in enumerate(drawn_programs(24, names, start=1))
        for line in differences(together, names, dynamic=index % 2 == 1)
    ]

    assert found == [], "\n".join(found)


def test_a_lost_value_is_a_difference(names: dict[str, Any]) -> None:
    (expected,) = outcomes([FOUND[2]], names, 4, "aot_eager", dynamic=False)
    (stock,) = outcomes([FOUND[2]], names, 4, "inductor", dynamic=False)

    assert stock.differs_from(expected).startswith("tensor 3:")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
def test_many_programs(
    part: int,
    names: dict[str, Any],
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    found: list[str] = []
    compared, end = 0, time.monotonic() + SECONDS
    for index, together in enumerate(drawn_programs(-(-PROGRAMS // PARTS), names, start=2 + part)):
        if time.monotonic() >= end:
            break
        found += differences(together, names, dynamic=index % 2 == 1)
        compared += len(together)
    with capsys.disabled():
        sys.stderr.write(f"\n{compared} programs compared, {len(found)} differ\n")

    record_property("alias programs compared with aot_eager", compared)
    assert found == [], "\n".join(found)
