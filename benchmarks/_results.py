# SPDX-License-Identifier: Apache-2.0
"""Rows of a benchmark: how they are timed in pairs, and how they are written as JSON and Markdown."""

from __future__ import annotations

import gc
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from unittest import mock

import torch
from _ratios import ratios


RESULTS = Path(__file__).parent / "results"
# What stock Inductor compiled, because our passes failed, is not measured as ours.
os.environ.setdefault("MAGI_COMPILE_STRICT", "1")


@dataclass(frozen=True)
class Row:
    """All repeats of one arm in one case, in seconds a call; and the peak of its memory, where that is measured."""

    arm: str
    case: str
    seconds: tuple[float, ...]
    torch: str
    triton: str
    device: str
    commit: str
    bytes: tuple[int, ...] = ()

    @property
    def source(self) -> str:
        """What the row was measured with, for a table."""
        return f"torch {self.torch}, triton {self.triton}, {self.device}, commit {self.commit[:12]}."


def measure_paired(
    arms: Mapping[str, Callable[[], object]], *, number: int, repeats: int = 11
) -> dict[str, tuple[float, ...]]:
    """Seconds a call for each arm, the arms in turn in each repeat, so that a slow moment of the machine hits all."""
    for call in arms.values():
        _time(call, max(number // 10, 1))
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    names = list(arms)
    # A collection walks over everything that torch has loaded, which takes longer than a short measurement.
    gc.collect()
    gc.freeze()
    try:
        for repeat in range(repeats):
            for arm in names if repeat % 2 == 0 else reversed(names):
                seconds[arm].append(_time(arms[arm], number))
    finally:
        gc.unfreeze()
    return {arm: tuple(values) for arm, values in seconds.items()}


def _time(call: Callable[[], object], number: int) -> float:
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(number):
            call()
        return (time.perf_counter() - start) / number
    finally:
        gc.enable()


def rows_of(case: str, seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    """The rows of one case measured now, on this machine."""
    here = (torch.__version__, version_of("triton"), device_name(), commit())
    return [Row(arm, case, tuple(values), *here) for arm, values in seconds.items()]


def rows_written(name: str) -> list[Row]:
    """The rows that are published of benchmark *name*; none if there are none."""
    path = RESULTS / f"{name}.json"
    published = json.loads(path.read_text())["rows"] if path.exists() else []
    return [Row(**{**row, "seconds": tuple(row["seconds"])}) for row in published]


def write(name: str, rows: Sequence[Row], *, note: str = "") -> dict[str, float]:
    """Write results/NAME.json and results/NAME.md; return the ratios."""
    computed = ratios(name, [asdict(row) for row in rows])
    document = {
        "name": name,
        "commit": commit(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": version_of("triton")},
        "machine": {"device": device_name(), "cores": os.cpu_count(), "system": platform.system()},
        "rows": [asdict(row) for row in rows],
        "ratios": computed,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    text = _markdown(name, rows, computed, note)
    (RESULTS / f"{name}.md").write_text(text)
    sys.stdout.write(text)
    return computed


def say(text: str) -> None:
    """Write *text* and the time of day to the standard error."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


@contextmanager
def empty_caches() -> Iterator[Path]:
    """A context in which Inductor's caches are in a new folder, which is yielded."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=folder):
        yield Path(folder)


def commit() -> str:
    """The commit that the measured sources stand at; MAGI_BENCHMARK_COMMIT says it where there is no repository."""
    if told := os.environ.get("MAGI_BENCHMARK_COMMIT"):
        return told
    asked = ["git", "rev-parse", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=True, cwd=RESULTS.parent).stdout.strip()


def version_of(distribution: str) -> str:
    """The installed version of *distribution*, or `absent`."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def device_name() -> str:
    """The name of the GPU, else of the processor."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else processor_name()


def processor_name() -> str:
    """The name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _markdown(name: str, rows: Sequence[Row], computed: Mapping[str, float], note: str) -> str:
    lines = [f"# {name}", ""]
    if note:
        lines += [note, ""]
    for source, measured in itertools.groupby(rows, lambda row: row.source):
        lines += [source, "", "| case | arm | median | spread (min to max) |", "|---|---|---|---|"]
        for row in measured:
            spread = f"{_show(min(row.seconds))} to {_show(max(row.seconds))}"
            lines.append(f"| {row.case} | {row.arm} | {_show(statistics.median(row.seconds))} | {spread} |")
        lines.append("")
    if any(row.bytes for row in rows):
        lines += ["| case | arm | median of the peak memory |", "|---|---|---|"]
        peaks = [(row, statistics.median(row.bytes) / 2**20) for row in rows if row.bytes]
        lines += [*(f"| {row.case} | {row.arm} | {peak:.1f} MiB |" for row, peak in peaks), ""]
    lines += ["| ratio | value |", "|---|---|"]
    lines += [f"| {key} | {value:.3f} |" for key, value in computed.items()]
    return "\n".join(lines) + "\n"


def _show(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e9:.0f} ns"
