# SPDX-License-Identifier: Apache-2.0
"""Runs of the harness: bases and slots in, rows out."""

from __future__ import annotations

import dataclasses
import functools as ft
import os
from collections import Counter
from typing import TYPE_CHECKING

import torch
from magi_opschema.aten._dispatch.cells import cell_of
from magi_opschema.aten._generate.schema import ATEN_SLOT

from .checks import LIBRARY_CHECK, Call, Checker
from .devices import device_of, missing, on_device
from .divergences import DIVERGENCES, LIBRARY_DIVERGENCES, Divergence
from .layouts import layouts
from .library_checks import FORMS
from .op_db import captured_samples, op_infos
from .providers import samples_for
from .reasons import EXCLUDED
from .rows import Report, Row
from .subject import Subject
from .torch_names import compile_whole
from .workers import Note, run_tasks


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .samples import Sample
    from .workers import Death


Task = tuple[str, int]
SECONDS_PER_CHECK = 20.0
NOTHING: frozenset[str] = frozenset()
_KERNEL_SAMPLES = 2
"""How many samples of each dtype a kernel gets in every layout."""
_LARGE = {"large": 1e4, "huge": 1e30}


def run(
    tasks: Iterable[Task], *, jobs: int | None = None, device: str | None = None, library_only: frozenset[str] = NOTHING
) -> Iterator[tuple[Task, Report]]:
    """Check bases in slots, each kernel in a separate process, and yield the rows of each when it ends.

    Args:
        tasks: Pairs of an ATen base and a slot.
        jobs: How many processes work at a time; by default, as many as there are processors.
        device: The device of the inputs; by default, the CPU if the slot's kernels serve it, otherwise one of their
            devices.
        library_only: Check the library operators of these forms, and nothing else.
    """
    listed = list(tasks)
    # The children initialize CUDA themselves, which is impossible after their parent has queried its devices.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Done here, so that forked processes inherit what takes seconds to load: the database, its calls, the compiler.
    op_infos()
    captured_samples()
    compile_whole(torch.neg)(torch.ones(1))
    jobs = jobs or len(os.sched_getaffinity(0))
    work = ft.partial(
        _work, check=ft.partial(_check_library, forms=library_only) if library_only else _check_all, asked=device
    )
    alone = ft.partial(_alone, library_only=bool(library_only))
    for task, rows, deaths in run_tasks(listed, work, jobs=jobs, seconds=SECONDS_PER_CHECK, alone=alone):
        found = [*(rows or ()), *(_death_row(task, death) for death in deaths)]
        yield task, Report([_expected(row) for row in found])


def active_tasks(bases: Iterable[str]) -> list[Task]:
    """Every active slot of *bases*."""
    tasks = []
    for base in bases:
        lower = sorted({kernel.slot for kernel in cell_of(base).kernels})
        tasks += [(base, slot) for slot in [*lower, ATEN_SLOT]]
    return tasks


def _alone(task: Task, *, library_only: bool) -> bool:
    """Whether a task gets a separate process: a user's kernel, and operators known to write out of bounds."""
    base, slot = task
    crashes = any(d.crashes and d.overload.partition(".")[0] == base for d in DIVERGENCES)
    return crashes or not (library_only or slot == ATEN_SLOT)


def _work(
    task: Task,
    note: Note,
    left_out: frozenset[str],
    check: Callable[[Checker, Subject, list[Sample]], list[Row]],
    asked: str | None = None,
) -> list[Row]:
    base, slot = task
    note.write(f"{base}|{slot}|inputs")
    cell = cell_of(base)
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
        if subject.label in EXCLUDED:
            rows.append(_row(subject, "skip", EXCLUDED[subject.label]))
        elif not samples:
            rows.append(_row(subject, "fail", "no provider has inputs for it"))
        else:
            rows += check(checker, subject, [on_device(subject, sample, device) for sample in samples])
    return rows


def _row(subject: Subject, outcome: str, detail: str) -> Row:
    return Row(subject.label, subject.slot, "functional", "", "", "", outcome, detail)


def _check_all(checker: Checker, subject: Subject, samples: list[Sample]) -> list[Row]:
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
        rows.append(_row(subject, "fail", "ATen refuses every input" if subject.aten else "the kernel serves no input"))
    return rows if subject.aten else rows + _check_library(checker, subject, samples)


def _check_library(
    checker: Checker, subject: Subject, samples: list[Sample], forms: frozenset[str] = FORMS
) -> list[Row]:
    """Rows about the library operators on the first input that the kernel serves; none if it serves no input."""
    calls = [Call(subject, sample, "dense", f"{sample.origin} {number}") for number, sample in enumerate(samples)]
    # opcheck treats NaN as a difference, so inputs without NaN results come first, or positive ones if all have some.
    calls += [Call(subject, c.sample.map_tensors(_positive), "positive", c.label) for c in calls]
    for plain_numbers in (True, False):
        for call in calls:
            rows = checker.check_library(call, forms, plain_numbers=plain_numbers)
            if rows:
                return rows
    return []


def _positive(t: torch.Tensor) -> torch.Tensor:
    return t.abs() if t.dtype.is_floating_point and t.layout is torch.strided else t


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
    """*row*, marked as expected if it is a failure by a known divergence of torch; `mended` finds the opposite."""
    if row.check.startswith(LIBRARY_CHECK) and row.outcome == "fail" and row.overload in LIBRARY_DIVERGENCES:
        return dataclasses.replace(row, outcome="xfail", detail=LIBRARY_DIVERGENCES[row.overload])
    known = next((d for d in DIVERGENCES if d.overload == row.overload and row.check in d.checks), None)
    if known is None or row.slot != ATEN_SLOT or row.outcome != "fail":
        return row
    return dataclasses.replace(row, outcome="xfail", detail=known.reason)


def mended(rows: Iterable[Row]) -> list[Divergence]:
    """The known divergences that ran but did not occur: torch has fixed them, and the entries must be removed."""
    listed = [row for row in rows if row.slot == ATEN_SLOT]
    shown = {(row.overload, row.check) for row in listed if row.outcome == "xfail"}
    ran = {row.overload for row in listed}
    return [d for d in DIVERGENCES if d.overload in ran and not any((d.overload, check) in shown for check in d.checks)]
