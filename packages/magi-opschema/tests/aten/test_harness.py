# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: T201  # the counts belong into the log of a run
"""Every operator of the shipped allowlist in every active slot; `nox -s aten` runs this."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aten_harness import known as _divergences
from aten_harness import run as _run
from aten_harness.checks import Row
from aten_harness.known import EXCLUDED
from aten_harness.run import Report
from magi_opschema.aten._dispatch.load import default_folder, default_surface
from magi_opschema.aten._generate.schema import METADATA_FILE as FILE_NAME


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
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    calls: list[Any] = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = [call.params["task"] for call in calls if call is not None and "task" in call.params]
    runs = Runs(chosen)
    yield runs
    folder = os.environ.get("MAGI_ATEN_REPORT")
    if folder:
        Path(folder).write_text("".join(f"{row}\n" for row in runs.rows()))


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
    declared |= {d.overload for d in _divergences.DIVERGENCES if d.crashes}
    assert missing <= declared, sorted(missing - declared)


def test_nothing_else_is_skipped(runs: Runs) -> None:
    assert Report(_whole(runs)).skips == Counter(EXCLUDED.values())


def test_known_divergences_still_diverge(runs: Runs) -> None:
    mended = _run.mended(_whole(runs))

    assert mended == [], "torch has mended these; take them out of _divergences.py"
    ran = {row.overload for row in runs.rows()}
    assert {d.overload for d in _divergences.DIVERGENCES} <= ran


def test_nearly_all_compile_without_a_graph_break(runs: Runs) -> None:
    compiled = [row for row in _whole(runs) if row.check == "fullgraph"]
    broken = [row for row in compiled if row.outcome == "fail"]
    print(f"fullgraph {len(compiled) - len(broken)} of {len(compiled)}: {[row.overload for row in broken]}")

    assert len(compiled) >= 0.95 * len({op["aten_name"] for op in OPS})
    assert len(broken) <= 0.02 * len(compiled), [str(row) for row in broken]
