# SPDX-License-Identifier: Apache-2.0
"""Runs of the harness: bases and slots in, rows out."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from typing import TYPE_CHECKING

import torch

from magi_opschema.aten._cells import cell_of
from magi_opschema.aten._metadata import ATEN_SLOT
from magi_opschema.aten._slots import kernels_of
from magi_opschema.aten._torch_compat import compile_whole

from ._checks import Call, Checker
from ._divergences import DIVERGENCES, Divergence
from ._layouts import layouts
from ._op_db import captured_samples, op_infos
from ._providers import samples_for
from ._reasons import EXCLUDED
from ._rows import Report, Row
from ._subject import Subject
from ._workers import Note, run_tasks


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ._samples import Sample
    from ._workers import Death


Task = tuple[str, int]
SECONDS_PER_CHECK = 20.0
_KERNEL_SAMPLES = 2
"""How many samples of a dtype a kernel gets in every layout."""
_LARGE = {"large": 1e4, "huge": 1e30}


def run(tasks: Iterable[Task], *, jobs: int | None = None) -> Iterator[tuple[Task, Report]]:
    """Check bases in slots, each in a process of its own, and yield each one's rows as it ends.

    Args:
        tasks: Pairs of an ATen base and a slot.
        jobs: How many processes work at a time; as many as there are processors without it.
    """
    listed = list(tasks)
    # Here, so that the forked processes inherit what takes seconds: the database, its calls, the compiler.
    op_infos()
    captured_samples()
    compile_whole(torch.neg)(torch.ones(1))
    jobs = jobs or len(os.sched_getaffinity(0))
    for task, rows, deaths in run_tasks(listed, _work, jobs=jobs, seconds=SECONDS_PER_CHECK):
        found = [*(rows or ()), *(_death_row(task, death) for death in deaths)]
        yield task, Report([_expected(row) for row in found])


def active_tasks(bases: Iterable[str]) -> list[Task]:
    """Every active slot of *bases*."""
    tasks = []
    for base in bases:
        lower = sorted({kernel.slot for kernel in kernels_of(cell_of(base))})
        tasks += [(base, slot) for slot in [*lower, ATEN_SLOT]]
    return tasks


def _work(task: Task, note: Note, left_out: frozenset[str]) -> list[Row]:
    base, slot = task
    note.write(f"{base}|{slot}|inputs")
    cell = cell_of(base)
    served = {leading for kernel in kernels_of(cell) if kernel.slot == slot for leading in kernel.serves}
    subjects = [Subject(base, pair, slot) for pair in cell.pairs if slot == ATEN_SLOT or pair.leading in served]
    checker = Checker(note, left_out)
    rows: list[Row] = []
    for subject, samples in samples_for(subjects).items():
        rows += _check_subject(checker, subject, samples)
    return rows


def _check_subject(checker: Checker, subject: Subject, samples: list[Sample]) -> list[Row]:
    if subject.label in EXCLUDED:
        return [Row(subject.label, subject.slot, "functional", "", "", "", "skip", EXCLUDED[subject.label])]
    if not samples:
        return [Row(subject.label, subject.slot, "functional", "", "", "", "fail", "no provider has inputs for it")]
    rows: list[Row] = []
    dtypes: Counter[torch.dtype] = Counter()
    elementwise = _is_elementwise(subject)
    for number, sample in enumerate(samples):
        option = sample.origin.startswith("option")
        dtypes[sample.dtype] += not option
        first = dtypes[sample.dtype] == 1 and not option
        label = f"{sample.origin} {number}"
        wide = number == 0 if subject.aten else not option and dtypes[sample.dtype] <= _KERNEL_SAMPLES
        for layout, changed in _layouts(subject, sample, elementwise=elementwise, wide=wide):
            call = Call(subject, changed, layout, label)
            edges = first
            fullgraph = number == 0 and layout == "dense" and subject.pair is subject.cell.pairs[0]
            rows += checker.check(call, edges=edges, fullgraph=fullgraph)
    if not any(row.ran for row in rows):
        rows.append(Row(subject.label, subject.slot, "functional", "", "", "", "fail", "ATen refuses every input"))
    return rows


def _layouts(subject: Subject, sample: Sample, *, elementwise: bool, wide: bool) -> Iterator[tuple[str, Sample]]:
    if not wide:
        yield "dense", sample
        return
    yield from layouts(sample, elementwise=elementwise)
    if not subject.aten and (sample.dtype.is_floating_point or sample.dtype.is_complex):
        for name, factor in _LARGE.items():
            yield name, sample.map_tensors(lambda t, f=factor: t * f if t.dtype == sample.dtype else t)  # type: ignore[misc]


def _is_elementwise(subject: Subject) -> bool:
    return torch.Tag.pointwise in subject.leading.tags


def _death_row(task: Task, death: Death) -> Row:
    parts = death.doing.split("|")
    if len(parts) == 6:
        overload, slot, check, dtype, layout, sample = parts
        return Row(overload, int(slot), check, dtype, layout, sample, "fail", death.how)
    return Row(task[0], task[1], death.doing, "", "", "", "fail", death.how)


def _expected(row: Row) -> Row:
    """A failure that is a known divergence of torch is expected; `mended` looks in the other direction."""
    known = next((d for d in DIVERGENCES if d.overload == row.overload and row.check in d.checks), None)
    if known is None or row.slot != ATEN_SLOT or row.outcome != "fail":
        return row
    return dataclasses.replace(row, outcome="xfail", detail=known.reason)


def mended(rows: Iterable[Row]) -> list[Divergence]:
    """The known divergences that ran and did not show: torch has mended them, and the entries must go."""
    listed = [row for row in rows if row.slot == ATEN_SLOT]
    shown = {(row.overload, row.check) for row in listed if row.outcome == "xfail"}
    ran = {row.overload for row in listed}
    return [d for d in DIVERGENCES if d.overload in ran and not any((d.overload, check) in shown for check in d.checks)]
