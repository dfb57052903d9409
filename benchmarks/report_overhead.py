# SPDX-License-Identifier: Apache-2.0
"""What it costs to be told: which operator is compiled wrong, and what a run compiled.

The arm ``compile`` compiles a forward and its backward with caches that are empty, and runs them. The arm ``check``
does the same under ``magi.check``, finds that a gradient or an output differs, because the compiler gets one operator
in the middle of the model wrong, and searches for it. The models and the operator are those of the tests.

The arm ``cold, report`` is the part of the arm ``cold, with report`` in which ``magi.report`` writes its record, and so
for ``warm``, where caches have the code: two measurements of one compilation, since two compilations of a model differ
by more than the record takes.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _results import Row, empty_caches, rows_of, rows_written, say, write
from magi_backend import read_report


sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import _planted  # the models of the end-to-end tests
import _wrong


REPEATS = 3
NOTE = (
    "`check_vs_compile` is the median over the models of the time of the check, with its search, over that of the "
    "compilation. `report_compile_overhead` is the time that the record of a run takes of a compilation with empty "
    "caches over the rest of that compilation, the largest over the models, and `report_warm_ms` what it takes where "
    "caches have the code."
)
RECORDED = ", recorded"
REPORTED = ("Qwen2", "VAE decoder")
"""The models whose compilations are recorded: they take 20 s or more."""


def compile_and_run(case: str) -> None:
    """A forward and a backward by the wrong compiler, unchecked."""
    model, inputs = _planted.planted(case, "middle")
    options: dict[str, Any] = {"post_grad_custom_pre_pass": _wrong.Becomes(_planted.WRONG["forward"])}
    torch.compile(model, backend="magi", dynamic=False, options=options)(*inputs).sum().backward()


def check(case: str) -> None:
    """The same, checked."""
    text = _planted.blamed(*_planted.planted(case, "middle"), "forward")
    assert _planted.names_it(text), text


ARMS = {"compile": compile_and_run, "check": check}


def seconds(arm: str, case: str) -> float:
    """The time of *arm* where nothing is in any cache."""
    torch.compiler.reset()
    with empty_caches():
        torch.compile(torch.relu)(torch.ones(8))  # the header of all kernels is compiled once for a folder
        start = time.perf_counter()
        ARMS[arm](case)
        return time.perf_counter() - start


def measure(title: str, repeats: int) -> list[Row]:
    """Both arms of one model, in turn."""
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for repeat in range(repeats):
        for arm in ARMS if repeat % 2 == 0 else reversed(ARMS):
            found[arm].append(seconds(arm, _planted.MODELS[title]))
            say(f"{title} {arm} {found[arm][-1]:.1f} s")
    return rows_of(title, found)


def compile_and_report(case: str) -> dict[str, float]:
    """A forward and its backward of *case*, compiled with empty caches and again from them; with the report's part."""
    found: dict[str, float] = {}
    with empty_caches() as caches:
        torch.compile(torch.relu)(torch.ones(8))  # the header of all kernels is compiled once for a folder
        for state in ("cold", "warm"):
            torch.compiler.reset()
            model, inputs = _planted.planted(case, "middle")
            options: dict[str, Any] = {"magi.report": str(caches / f"report-{state}")}
            start = time.perf_counter()
            torch.compile(model, backend="magi", dynamic=False, options=options)(*inputs).sum().backward()
            found[f"{state}, with report"] = time.perf_counter() - start
            entries = read_report(options["magi.report"]).entries
            found[f"{state}, report"] = sum(entry.compilation.report_seconds for entry in entries)
    return found


def measure_report(title: str, repeats: int) -> list[Row]:
    """The record of the compilations of one model, with empty caches and from them."""
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        for arm, spent in compile_and_report(_planted.MODELS[title]).items():
            found.setdefault(arm, []).append(spent)
            say(f"{title} {arm} {spent:.3f} s")
    return rows_of(f"{title}{RECORDED}", found)


def main() -> None:
    """Measure the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(_planted.MODELS), help="again for several")
    parser.add_argument("--merge", action="store_true", help="keep the rows of the other models as they are published")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--part", choices=["check", "report"], help="one of them alone")
    chosen = parser.parse_args()
    titles = chosen.model or list(_planted.MODELS)
    parts = [chosen.part] if chosen.part else ["check", "report"]
    measured = {f"{title}{RECORDED * (part == 'report')}" for title in titles for part in parts}
    kept = rows_written("report_overhead") if chosen.merge else []
    rows = [row for row in kept if row.case not in measured]
    for title in titles:
        rows += measure(title, chosen.repeats) if "check" in parts else []
        rows += measure_report(title, chosen.repeats) if "report" in parts and title in REPORTED else []
    write("report_overhead", rows, note=NOTE)


if __name__ == "__main__":
    main()
