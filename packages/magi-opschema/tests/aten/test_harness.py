# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: T201  # the counts belong into the log of a run
"""Every operator of the allowlist in every slot, and of the library; `nox -s aten` runs this."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from aten_harness import known as _known
from aten_harness import run as _run
from aten_harness.checks import Row
from aten_harness.known import EXCLUDED, LIBRARY_DIVERGENCES
from aten_harness.run import Report, check
from aten_harness.subject import dotted
from magi_opschema import aten
from magi_opschema.aten._dispatch.kernels import Cell, cells
from magi_opschema.aten._dispatch.slots import default_folder, default_surface
from magi_opschema.aten._generate.schema import METADATA_FILE as FILE_NAME
from magi_opschema.aten._generate.schema import python_name


pytestmark = pytest.mark.slow

OPS = json.loads((default_folder() / FILE_NAME).read_text())["ops"]
TASKS = sorted({(op["aten_name"], slot) for op in OPS for slot in op["slots"]})
OVERLOADS = [f"{op['aten_name']}.{op['overload']}" if op["overload"] else op["aten_name"] for op in OPS]


class Runs:
    """The reports of all tasks, in the order in which they are asked for; the work goes on ahead in other processes."""

    def __init__(self, tasks: list[tuple[str, int]]) -> None:
        default_surface()
        self._coming = _run.run(tasks)
        self.reports: dict[tuple[str, int], Report] = {}

    def report(self, task: tuple[str, int]) -> Report:
        while task not in self.reports:
            done, report = next(self._coming)
            self.reports[done] = report
        return self.reports[task]

    def rows(self) -> list[Row]:
        return [row for report in self.reports.values() for row in report.rows]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Runs:
    calls: list[Any] = [getattr(item, "callspec", None) for item in request.session.items]
    return Runs([call.params["task"] for call in calls if call is not None and "task" in call.params])


@pytest.mark.parametrize("task", TASKS, ids=[f"{base}-{slot}" for base, slot in TASKS])
def test_operator(task: tuple[str, int], runs: Runs) -> None:
    report = runs.report(task)

    assert report.rows
    assert [str(row) for row in report.failures if row.check != "fullgraph"] == []


def _whole(runs: Runs) -> list[Row]:
    if len(runs.reports) < len(TASKS):
        pytest.skip("only some operators were chosen")
    return runs.rows()


def test_nearly_all_of_the_surface_executes(runs: Runs) -> None:
    executed = Report(_whole(runs)).executed
    bases = {op["aten_name"] for op in OPS}
    reached = {name.partition(".")[0] for name in executed}
    print(
        f"bases {len(bases & reached)} of {len(bases)}, overloads {len(executed & set(OVERLOADS))} of {len(OVERLOADS)}"
    )

    assert len(bases) >= 525
    assert len(bases & reached) >= 0.95 * len(bases)
    assert len(executed & set(OVERLOADS)) >= 0.85 * len(OVERLOADS)
    # What is not reached is declared, by name and with a reason.
    missing = set(OVERLOADS) - executed
    declared = {f"{label}{suffix}" for label in EXCLUDED for suffix in ("", "_out", ".out")}
    declared |= {d.overload for d in _known.DIVERGENCES if d.crashes}
    assert missing <= declared, sorted(missing - declared)


def test_nothing_else_is_skipped(runs: Runs) -> None:
    assert Report(_whole(runs)).skips == Counter(EXCLUDED.values())


def test_known_divergences_still_diverge(runs: Runs) -> None:
    shown = {(row.overload, row.check) for row in _whole(runs) if row.outcome == "xfail"}
    mended = [d for d in _known.DIVERGENCES if not any((d.overload, check) in shown for check in d.checks)]

    assert mended == [], "torch has mended these; take them out of known.py"


def test_nearly_all_compile_without_a_graph_break(runs: Runs) -> None:
    compiled = [row for row in _whole(runs) if row.check == "fullgraph"]
    broken = [row for row in compiled if row.outcome == "fail"]
    print(f"fullgraph {len(compiled) - len(broken)} of {len(compiled)}: {[row.overload for row in broken]}")

    assert len(compiled) >= 0.95 * len({op["aten_name"] for op in OPS})
    assert len(broken) <= 0.02 * len(compiled), [str(row) for row in broken]


on_213 = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the list of exceptions is torch 2.13's")


@pytest.fixture
def surface_of_kernels(delegate: Callable[..., Any]) -> Iterator[dict[str, Cell]]:
    """A kernel in slot 7 of every variant: every operator of the surface is one of the library."""
    aten.slots("add")  # the surface is loaded
    for base, cell in cells.items():
        for pair in cell.pairs:
            aten.register_slot(f"{base}.{pair.leading}", 7, delegate(base, pair.leading))
    yield cells
    for base in cells:
        aten.unregister_slot(base, 7)


@on_213
@pytest.mark.timeout(1800)  # one test does the work of fifteen hundred
@pytest.mark.parametrize(("form", "suffix"), [("lowest", ""), ("preferred", "__use7")])
def test_opcheck_passes_on_every_library_operator(form: str, suffix: str, surface_of_kernels: dict[str, Cell]) -> None:
    tasks = [(base, 7) for base in sorted(surface_of_kernels)]
    rows = [row for _, report in _run.run(tasks, library_only=frozenset({form})) for row in report.rows]
    checked = {row.check.partition(" ")[2]: row for row in rows if row.check.startswith("opcheck ")}
    wanted = {
        f"{base}__{python_name(overload)}{suffix}"
        for base, cell in surface_of_kernels.items()
        for pair in cell.pairs
        for overload in pair.names
        if dotted(base, pair.leading) not in EXCLUDED
    }
    print(f"library operators: {Counter(row.outcome for row in checked.values())}, wanted {len(wanted)}")

    assert [str(row) for row in rows if row.outcome == "fail"] == []
    assert checked.keys() == wanted
    assert {row.overload for row in rows if row.outcome == "skip"} == EXCLUDED.keys()
    # Strict: what torch mends must leave the list.
    assert {row.overload for row in checked.values() if row.outcome == "xfail"} == LIBRARY_DIVERGENCES.keys()


DIFFERENTIABLE = ["sin", "exp", "tanh", "sigmoid", "relu", "mul", "sub", "atan2", "softmax", "addmm", "sum", "sort"]


@pytest.mark.parametrize("base", DIFFERENTIABLE)
def test_opcheck_passes_on_operators_with_a_backward(base: str, delegate: Callable[..., Any]) -> None:
    aten.slots(base)
    names = [pair.leading for pair in cells[base].pairs]
    leading = next(name for name in ("Tensor", "int", "dim_IntList", "default") if name in names)
    kernel = delegate(base, leading)

    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: dict[str, Any] | None = None
    ) -> None:
        ctx.options = {name: value for name, value in (keyword_only_inputs or {}).items() if value is not None}
        ctx.tensors = [position for position, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in inputs]
        ctx.save_for_backward(*(inputs[position] for position in ctx.tensors))

    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            args = list(ctx.others)
            for position, leaf in zip(ctx.tensors, leaves, strict=True):
                args[position] = leaf
            results = ATEN[base](*args, **ctx.options)
            first = results[0] if isinstance(results, tuple) else results
            found = torch.autograd.grad(first, leaves, grads[0])
        gradients: list[Any] = [None] * len(args)
        for position, gradient in zip(ctx.tensors, found, strict=True):
            gradients[position] = gradient
        return tuple(gradients)

    aten.register_slot(f"{base}.{leading}", 3, kernel, backward=backward, setup_context=setup_context)
    try:
        report = check([(base, 3)])[base, 3]
    finally:
        aten.unregister_slot(base, 3)

    assert [str(row) for row in report.failures] == []
    assert f"opcheck {base}__{python_name(leading)}__slot3" in {row.check for row in report.rows}


ATEN: dict[str, Callable[..., Any]] = {base: getattr(torch, base) for base in DIFFERENTIABLE}
