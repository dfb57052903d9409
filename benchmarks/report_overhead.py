# SPDX-License-Identifier: Apache-2.0
"""What it costs to be told which operator is compiled wrong, beside the compilation itself, on six real models.

The arm ``compile`` compiles a forward and its backward with caches that are empty, and runs them. The arm ``check``
does the same under ``magi.check``, finds that a gradient or an output differs, because the compiler gets one operator
in the middle of the model wrong, and searches for it. The models and the operator are those of the tests.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _results import Row, rows_of, rows_written, write


sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import _planted  # the models of the end-to-end tests


REPEATS = 3
NOTE = (
    "The ratio is the median over the models of the time of the check, with its search, over that of the compilation."
)


def compile_and_run(case: str) -> None:
    """A forward and a backward by the wrong compiler, unchecked."""
    model, inputs = _planted.planted(case, "middle")
    options: dict[str, Any] = {"post_grad_custom_pre_pass": _planted.WrongLowering(_planted.WRONG["forward"])}
    torch.compile(model, backend="magi", dynamic=False, options=options)(*inputs).sum().backward()


def check(case: str) -> None:
    """The same, checked."""
    text = _planted.blamed(*_planted.planted(case, "middle"), "forward")
    assert _planted.names_it(text), text


ARMS = {"compile": compile_and_run, "check": check}


def seconds(arm: str, case: str) -> float:
    """The time of *arm* where nothing is in any cache."""
    torch.compiler.reset()
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=folder):
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
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {title} {arm} {found[arm][-1]:.1f} s\n")
    return rows_of(title, found)


def main() -> None:
    """Measure the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(_planted.MODELS), help="again for several")
    parser.add_argument("--merge", action="store_true", help="keep the rows of the other models as they are published")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    chosen = parser.parse_args()
    titles = chosen.model or list(_planted.MODELS)
    rows = [row for row in rows_written("report_overhead") if row.case not in titles] if chosen.merge else []
    for title in titles:
        rows += measure(title, chosen.repeats)
    write("report_overhead", rows, note=NOTE)


if __name__ == "__main__":
    main()
