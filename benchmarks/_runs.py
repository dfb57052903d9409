# SPDX-License-Identifier: Apache-2.0
"""A run of many cases: its options, its files, and what is left of an earlier one."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from _case import Plan
from _ratios import ratios
from _results import commit, device_name, version_of
from _rows import append, joined, publish, read
from _workers import Job, Limits, Row, Worker, measured


split = functools.partial(str.split, sep=",")


def parser_of(name: str, description: str | None, arms: Sequence[str]) -> argparse.ArgumentParser:
    """A parser with the options that every run of cases has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("OUT") or str(Path(tempfile.gettempdir()) / name)
    parser.add_argument("--arms", type=split, default=list(arms), help="comma-separated, see _arms.arm_named")
    parser.add_argument("--out", type=Path, default=Path(default), help="folder for the rows; $OUT where that is set")
    parser.add_argument(
        "--rows", type=Path, nargs="*", default=[], help="rows of earlier runs, which are not run again"
    )
    parser.add_argument("--merge", type=Path, nargs="+", metavar="ROWS", help="join files of rows into results/")
    parser.add_argument("--tiny", action="store_true", help="few channels, small sizes, on the CPU")
    parser.add_argument("--kernels", action="store_true", help="record the time of each kernel by its name")
    parser.add_argument("--code", action="store_true", help="keep the generated code, in a zip file beside the rows")
    parser.add_argument("--compiling", type=int, default=os.cpu_count() or 1, help="processes that compile at once")
    parser.add_argument("--living", type=int, default=48, help="processes that hold memory of the GPU at once")
    parser.add_argument("--repeats", type=int, default=10, help="rounds, of which every second goes backwards")
    parser.add_argument("--compile-seconds", type=float, default=240.0, help="of one case, before it is given up")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of all compilations, before the rest is left")
    parser.add_argument("--step-seconds", type=float, default=60.0, help="of one measurement, before it is given up")
    return parser


def lock_file() -> str:
    """The file that processes lock which this one starts and which compile at the same time."""
    return str(Path(tempfile.gettempdir()) / f"magi-benchmarks-{os.getpid()}.lock")


def plan_of(options: argparse.Namespace, **rest: Any) -> Plan:
    """What is measured of each case; processes that compile at the same time share a lock."""
    return Plan(lock_file=lock_file() if options.compiling > 1 else "", **rest)


def place_of_arm(arm: str, arms: Sequence[str]) -> tuple[int, str]:
    """Where rows of *arm* stand: as in *arms*, and then the others by name."""
    return (arms.index(arm) if arm in arms else len(arms)), arm


def refuse_unknown(parser: argparse.ArgumentParser, what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """End the program where a name that was *given* is not *known*."""
    if unknown := set(given) - set(known):
        parser.error(f"no {what} {', '.join(sorted(unknown))}; there are {', '.join(known)}")


def run(
    name: str,
    groups: Iterable[Sequence[Job]],
    options: argparse.Namespace,
    preload: Sequence[str],
    place: Callable[[Row], Any],
    table: Callable[[Sequence[Row]], list[str]],
) -> None:
    """Measure the jobs of benchmark *name* that no earlier rows have, or with ``--merge`` publish rows that there are.

    Rows are written as they come; in the end all are printed in order of their *place*, with their ratios.
    """
    if options.merge:
        publish(name, options.merge, place, table)
        return
    earlier = joined(read(options.rows))
    have = {(row["case"], row["arm"]) for row in earlier if row["seconds"] and row["torch"] == torch.__version__}
    todo = [[job for job in group if (job.case, job.arm) not in have] for group in groups]
    options.out.mkdir(parents=True, exist_ok=True)
    # Before the server of the processes starts and reads it.
    threads = max(1, (os.cpu_count() or 1) // min(options.compiling, max(1, sum(map(len, todo)))))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    file = options.out / "rows.jsonl"
    append(file, earlier)
    base = {"torch": torch.__version__, "triton": version_of("triton"), "commit": commit(), "device": device_name()}
    rows = list(earlier)
    each = options.compiling, options.living, options.compile_seconds, options.step_seconds, options.repeats
    limits = Limits(*each, options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        for worker, found in measured(filter(None, todo), limits, Path(folder), preload):
            complete = [base | row for row in found]
            append(file, complete)
            rows += complete
            print(*table(complete)[2:], sep="\n", flush=True)
            _keep_files(worker, options)
    rows = sorted(joined(rows), key=place)
    print("", *table(rows), "", json.dumps(ratios(name, rows), indent=1), sep="\n")


def _keep_files(worker: Worker, options: argparse.Namespace) -> None:
    """Add the log of a case that failed, and the code of any, to zip files."""
    if worker.reason and worker.log.exists():
        with zipfile.ZipFile(options.out / "logs.zip", "a", zipfile.ZIP_DEFLATED) as archive:
            archive.write(worker.log, worker.log.name)
    if options.code:
        with zipfile.ZipFile(options.out / "code.zip", "a", zipfile.ZIP_DEFLATED) as archive:
            for place, path in enumerate(generated_code(worker.caches)):
                archive.write(path, f"{worker.job.file_name}-{place}.py")


def generated_code(caches: Path) -> list[Path]:
    """The modules of graphs below the folder *caches*, the oldest first; kernels have files of their own there."""
    modules = [path for path in caches.rglob("*.py") if "async_compile = AsyncCompile()" in path.read_text()]
    return sorted(modules, key=lambda path: path.stat().st_mtime)
