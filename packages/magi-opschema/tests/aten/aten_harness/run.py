# SPDX-License-Identifier: Apache-2.0
"""Runs of the harness: bases and slots in, rows out.

Each base runs in a separate forked process, so a kernel that crashes or hangs is a failed row.
"""

from __future__ import annotations

import functools as ft
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from magi_opschema.aten import slots
from magi_opschema.aten._dispatch.kernels import cells, check_number
from magi_opschema.aten._generate.schema import ATEN_SLOT, base_name

from . import known as _known
from .checks import FORMS, LIBRARY_CHECK, Call, Checker, Row, compile_whole
from .providers import captured_samples, op_infos, samples_for
from .subject import Sample, Subject, device_of, layouts, missing, on_device
from .workers import Death, Note, run_tasks


Task = tuple[str, int]
SECONDS_PER_CHECK = 20.0
_KERNEL_SAMPLES = 2
"""How many samples of each dtype a kernel gets in every layout."""
_LARGE = {"large": 1e4, "huge": 1e30}


@dataclass
class Report:
    rows: list[Row]

    @property
    def failures(self) -> list[Row]:
        return [row for row in self.rows if row.outcome == "fail"]

    @property
    def executed(self) -> set[str]:
        """Every overload that a check executed and whose result it compared."""
        return {row.ran for row in self.rows if row.ran}

    @property
    def skips(self) -> Counter[str]:
        """How many rows each declared reason skipped."""
        return Counter(row.detail for row in self.rows if row.outcome == "skip")

    def summary(self) -> str:
        counts = Counter(row.outcome for row in self.rows)
        return ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("pass", "fail", "xfail", "skip"))


def check(tasks: Iterable[Task], *, device: str | None = None) -> dict[Task, Report]:
    """The report of each of *tasks*, pairs of an operator and an active slot."""
    asked = {}
    for name, slot in tasks:
        slots(name)  # the surface is loaded, and has it
        base = base_name(name) if "." in name else name
        check_number(slot, base)
        cells[base].check_active(slot)
        asked[base, slot] = (name, slot)
    return {asked[task]: report for task, report in run(asked, device=device)}


def run(
    tasks: Iterable[Task], *, device: str | None = None, library_only: frozenset[str] = frozenset()
) -> Iterator[tuple[Task, Report]]:
    """Check bases in slots, and yield the rows of each when it ends.

    Slot 8 checks that the surface equals ATen bit for bit. The inputs are on *device*, by default on the CPU if the
    slot's kernels serve it. With *library_only*, only the library operators of these forms are checked.
    """
    # The children initialize CUDA themselves, which is impossible after their parent has queried its devices.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Done here, so that forked processes inherit what takes seconds to load: the database, its calls, the compiler.
    op_infos()
    captured_samples()
    compile_whole(torch.neg)(torch.ones(1))
    work = ft.partial(_work, forms=library_only, asked=device)
    for task, rows, deaths in run_tasks(list(tasks), work, seconds=SECONDS_PER_CHECK):
        found = [*(rows or ()), *(_death_row(task, death) for death in deaths)]
        yield task, Report([_expected(row) for row in found])


def _work(task: Task, note: Note, left_out: frozenset[str], *, forms: frozenset[str], asked: str | None) -> list[Row]:
    """The rows of one task; with *forms*, those about the library operators of these forms alone."""
    base, slot = task
    note.write(f"{base}|{slot}|inputs")
    cell = cells[base]
    kernels = [kernel for kernel in cell.kernels if kernel.slot == slot]
    served = {leading for kernel in kernels for leading in kernel.serves}
    subjects = [Subject(base, pair, slot) for pair in cell.pairs if slot == ATEN_SLOT or pair.leading in served]
    device = device_of(kernels) if asked is None else torch.device(asked)
    absent = missing(device)
    if absent is not None:
        return [_row(subject, "fail", absent) for subject in subjects]
    checker = Checker(note, left_out)
    rows: list[Row] = []
    for subject, samples in samples_for(subjects).items():
        if subject.label in _known.EXCLUDED:
            rows.append(_row(subject, "skip", _known.EXCLUDED[subject.label]))
            continue
        if not samples:
            rows.append(_row(subject, "fail", "no provider has inputs for it"))
        moved = [on_device(subject, sample, device) for sample in samples]
        if not forms:
            rows += _check_all(checker, subject, moved)
        if forms or not subject.aten:
            rows += _check_library(checker, subject, moved, forms or FORMS)
    return rows


def _row(subject: Subject, outcome: str, detail: str) -> Row:
    return Row(subject.label, subject.slot, "functional", "", "", "", outcome, detail)


def _check_all(checker: Checker, subject: Subject, samples: list[Sample]) -> list[Row]:
    rows: list[Row] = []
    dtypes: Counter[torch.dtype] = Counter()
    for number, sample in enumerate(samples):
        option = sample.origin.startswith("option")
        dtypes[sample.dtype] += not option
        edges = dtypes[sample.dtype] == 1 and not option
        wide = number == 0 if subject.aten else not option and dtypes[sample.dtype] <= _KERNEL_SAMPLES
        for layout, changed in _layouts(subject, sample) if wide else [("dense", sample)]:
            fullgraph = number == 0 and layout == "dense" and subject.pair is subject.cell.pairs[0]
            call = Call(subject, changed, layout, f"{sample.origin} {number}")
            rows += checker.check(call, edges=edges, fullgraph=fullgraph)
    if not any(row.ran for row in rows):
        rows.append(_row(subject, "fail", "ATen refuses every input" if subject.aten else "the kernel serves no input"))
    return rows


def _layouts(subject: Subject, sample: Sample) -> Iterator[tuple[str, Sample]]:
    yield from layouts(sample, elementwise=torch.Tag.pointwise in subject.leading.tags)
    if not subject.aten and (sample.dtype.is_floating_point or sample.dtype.is_complex):
        for name, factor in _LARGE.items():
            yield name, sample.map_tensors(lambda t, f=factor: t * f if t.dtype == sample.dtype else t)  # type: ignore[misc]


def _check_library(checker: Checker, subject: Subject, samples: list[Sample], forms: frozenset[str]) -> list[Row]:
    """Rows about the library operators on the first input that the kernel serves; none if it serves no input."""
    calls = [Call(subject, sample, "dense", f"{sample.origin} {number}") for number, sample in enumerate(samples)]

    def positive(t: torch.Tensor) -> torch.Tensor:
        return t.abs() if t.dtype.is_floating_point and t.layout is torch.strided else t

    # opcheck treats NaN as a difference, so inputs without NaN results come first, or positive ones if all have some.
    calls += [Call(subject, call.sample.map_tensors(positive), "positive", call.label) for call in calls]
    for plain_numbers in (True, False):
        for call in calls:
            rows = checker.check_library(call, forms, plain_numbers=plain_numbers)
            if rows:
                return rows
    return []


def _death_row(task: Task, death: Death) -> Row:
    parts = death.doing.split("|")
    if len(parts) == 6:
        overload, slot, check, dtype, layout, sample = parts
        return Row(overload, int(slot), check, dtype, layout, sample, "fail", death.how)
    return Row(task[0], task[1], death.doing, "", "", "", "fail", death.how)


def _expected(row: Row) -> Row:
    """*row*, marked as expected if it is a failure by a known divergence of torch."""
    reason = None
    if row.check.startswith(LIBRARY_CHECK):
        reason = _known.LIBRARY_DIVERGENCES.get(row.overload)
    elif row.slot == ATEN_SLOT:
        found = (d.reason for d in _known.DIVERGENCES if d.overload == row.overload and row.check in d.checks)
        reason = next(found, None)
    return row if reason is None or row.outcome != "fail" else replace(row, outcome="xfail", detail=reason)
