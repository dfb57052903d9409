# SPDX-License-Identifier: Apache-2.0
"""Decoders with dynamic height and width: eager, stock torch.compile and magi_passes.

    python benchmarks/dynamic_decode.py --model wan --size 540p --arms stock_dynamic,magi --out DIR
    python benchmarks/dynamic_decode.py --merge DIR

Each (model, size, arm) is one process with caches of its own. They compile and measure one after the other. With
``--together`` they compile at the same time, and the rows of compile times say beside how many others; then the arms of
each case measure in turn, once each a round, on one and the same core. The tuned arm measures its candidates while it
compiles; ConvChooser sees to it that no two processes do so at once. ``--merge`` joins the parts into
results/dynamic_decode.json and .md. ``--smoke`` runs tiny models on the CPU.
A time is that of a call among enough queued ones to fill a quarter of a second, at most 20, as a decoder of many chunks
runs them: the device waits for no launch. The time of a call on an idle device stands beside it as ``alone_seconds``.

An arm ``passes:padding+temporal+layout+moments+nd2`` compiles with just those passes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from _decode_case import ARMS, READY, REPEAT, REPEATS, Row, measure
from _decoders import MODELS, SIZES
from _ratios import ratios
from _results import RESULTS, commit


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


NAME = "dynamic_decode"
COLUMNS = (
    *("case", "arm", "torch", "median ms", "alone ms", "over floor", "compile s"),
    *("triton / conv / copies ms", "launches", "peak GiB", "error"),
)


def start(case: Sequence[str], arguments: argparse.Namespace, beside: int) -> subprocess.Popen[str]:
    """Start the process of one case, with empty caches of its own; it compiles, then waits for a line."""
    folder = Path(arguments.out) / "caches" / file_name(case)
    shutil.rmtree(folder, ignore_errors=True)  # an earlier run's
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    command = [sys.executable, __file__, "--child", *case, "--beside", str(beside), *["--smoke"] * arguments.smoke]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def file_name(case: Sequence[str]) -> str:
    """The name of the files of *case*."""
    return "_".join(case).replace(":", "_")


def until_ready(process: subprocess.Popen[str]) -> str:
    """What the process says until it waits, or ends."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        if line.strip() == READY:
            break
        said.append(line)
    return "".join(said)


def repeat(process: subprocess.Popen[str]) -> str:
    """Have the process measure once more, and return what it says meanwhile; nothing when it has ended."""
    assert process.stdin is not None
    try:
        # Past Python's buffer, which would complain again when it is closed.
        os.write(process.stdin.fileno(), f"{REPEAT}\n".encode())
    except BrokenPipeError:
        return ""
    return until_ready(process)


def finish(process: subprocess.Popen[str], said: str, case: Sequence[str]) -> list[Row]:
    """The rows of a process; a row with the reason when it failed, for example for want of memory."""
    model, size, arm = case
    said += process.communicate("report\n")[0]
    lines = [line for line in said.splitlines() if line.startswith("ROWS ")]
    if process.returncode == 0 and lines:
        return list(json.loads(lines[-1].removeprefix("ROWS ")))
    reasons = [line for line in said.splitlines() if "Error" in line] or said.splitlines() or ["no output"]
    print(said[-4000:])
    return [
        {"arm": arm, "case": f"{model}_{size}", "seconds": [], "reason": reasons[-1][:400], "torch": torch.__version__}
    ]


def run_all(arguments: argparse.Namespace) -> None:
    """Measure every case asked for, write one part per case, print a table."""
    cases = [(m, s, a) for m in arguments.model for s in arguments.size for a in arguments.arms]
    Path(arguments.out).mkdir(parents=True, exist_ok=True)
    measured_at = arguments.commit or commit()
    rows: list[Row] = []
    for batch in [cases] if arguments.together else [[case] for case in cases]:
        started = [(case, start(case, arguments, len(batch) - 1)) for case in batch]
        said = {case: until_ready(process) for case, process in started}
        for _, arms in itertools.groupby(started, key=lambda pair: pair[0][:2]):
            in_turn = list(arms)
            # The first command makes a process ready to measure.
            for _, (case, process) in itertools.product(range(1 + REPEATS), in_turn):
                said[case] += repeat(process)
            for case, process in in_turn:
                found = [row | {"commit": measured_at} for row in finish(process, said[case], case)]
                (Path(arguments.out) / f"{file_name(case)}.json").write_text(json.dumps(found, indent=1))
                print(*table(found)[2:], sep="\n", flush=True)
                rows += found
    print("", *table(rows), "", json.dumps(ratios(NAME, rows), indent=1), sep="\n")


def table(rows: Iterable[Row]) -> list[str]:
    """A Markdown table, one line per row."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    rows = list(rows)
    # A compilation alone says more than one beside others, so it comes last and wins.
    compilations = sorted((row for row in rows if "_compile" in row["case"]), key=lambda row: -row["compiled_beside"])
    compiled = {(row["case"].partition("_compile")[0], row["arm"], row["torch"]): row for row in compilations}
    floors = {row["case"]: row["floor_seconds"] for row in rows if row.get("floor_seconds")}
    for row in rows:
        if "_compile" not in row["case"]:
            key = row["case"], row["arm"], row["torch"]
            cells = [*key, *_measured(row, floors.get(row["case"]), compiled.get(key))]
            lines.append("| " + " | ".join(cells) + " |")
            lines += [f"|  | {line} |" + " |" * 9 for line in row.get("passes", ()) if row["arm"].startswith("magi")]
    return lines


def _measured(row: Row, floor: float | None, compilation: Row | None) -> list[str]:
    if not row["seconds"]:
        return [row["reason"], *[""] * 7]
    median = statistics.median(row["seconds"])
    alone = row.get("alone_seconds")  # rows of before 2026-11-21 are of calls alone
    kinds = [1e3 * row["seconds_by_kind"].get(kind, 0.0) for kind in ("triton", "convolution", "layout_copies")]
    return [
        f"{1e3 * median:.3f}",
        f"{1e3 * statistics.median(alone):.3f}" if alone else "",
        f"{median / floor:.2f}" if floor else "",
        f"{compilation['seconds'][0]:.1f}{' together' * bool(compilation['compiled_beside'])}" if compilation else "",
        " / ".join(f"{ms:.2f}" for ms in kinds) if row["seconds_by_kind"] else "",
        str(sum(row["launches"].values())) if row["launches"] else "",
        f"{row['peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else "",
        f"{row['relative_error']:.2e}",
    ]


def merge(folder: Path) -> None:
    """Join the parts in *folder* and the rows already in the results; a part replaces the rows of its case and arm."""
    target = RESULTS / f"{NAME}.json"
    rows: dict[tuple[str, str, str], Row] = {}
    earlier = json.loads(target.read_text())["rows"] if target.exists() else []
    parts = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    for row in (*earlier, *(row for part in parts for row in part)):
        rows[row["case"], row["arm"], row["torch"]] = row
    merged = sorted(rows.values(), key=_place)
    result = {
        "name": NAME,
        "commit": Counter(row["commit"] for row in merged).most_common(1)[0][0],
        "versions": {"torch": sorted({row["torch"] for row in merged})},
        "machine": sorted({row["device"] for row in merged if "device" in row}),
        "rows": merged,
        "ratios": ratios(NAME, merged),
    }
    RESULTS.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    lines = [f"# {NAME}", "", *table(merged), "", "| ratio | value |", "|---|---|"]
    lines += [f"| {key} | {value:.3f} |" for key, value in result["ratios"].items()]
    (RESULTS / f"{NAME}.md").write_text("\n".join(lines) + "\n")
    print(*lines, sep="\n")


def _place(row: Row) -> tuple[Any, ...]:
    """Where a row stands in the results: by model, size, what is measured, release and arm."""
    model, size, *compiled = row["case"].split("_")
    return MODELS.index(model), list(SIZES).index(size), compiled, row["torch"], ARMS.index(row["arm"])


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    split = functools.partial(str.split, sep=",")
    parser.add_argument("--model", type=split, default=list(MODELS), help="comma-separated: wan, groupnorm, kl, plain")
    parser.add_argument("--size", type=split, default=["540p"], help="comma-separated: 480p, 540p, 720p, 1080p")
    parser.add_argument("--arms", type=split, default=list(ARMS), help="comma-separated")
    parser.add_argument("--out", default=str(Path(tempfile.gettempdir()) / NAME), help="folder for parts and caches")
    parser.add_argument("--together", action="store_true", help="compile all cases at once, then measure each alone")
    parser.add_argument("--merge", metavar="DIR", help="join the parts in DIR into results/")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--commit", help="the commit to record, where there is no git")
    parser.add_argument("--child", nargs=3, metavar=("MODEL", "SIZE", "ARM"), help=argparse.SUPPRESS)
    parser.add_argument("--beside", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.merge:
        merge(Path(arguments.merge))
    elif arguments.child:
        rows = measure(*arguments.child, smoke=arguments.smoke, beside=arguments.beside)
        print("ROWS " + json.dumps(rows))
    else:
        run_all(arguments)


if __name__ == "__main__":
    main()
