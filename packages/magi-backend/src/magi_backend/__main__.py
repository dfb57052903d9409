# SPDX-License-Identifier: Apache-2.0
"""``python -m magi_backend report FOLDER``: what a run compiled, of which MAGI_COMPILE_REPORT=FOLDER kept a record."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ._records.folder import Entry, entries
from ._report.calls import shown
from ._report.html import as_html
from ._report.text import as_index, as_renderable, as_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; the exit status is 1 where there is none."""
    parser = argparse.ArgumentParser(prog="python -m magi_backend", description=__doc__)
    report = parser.add_subparsers(required=True).add_parser("report", help="print what a run compiled")
    report.add_argument("folder", type=Path, help="what MAGI_COMPILE_REPORT was")
    report.add_argument("--html", type=Path, metavar="FILE", help="write a page in place of the text")
    report.add_argument("--width", type=int, default=120, help="columns of the text")
    asked = parser.parse_args(arguments)
    found = list(entries(asked.folder)) if asked.folder.is_dir() else []
    if not found:
        sys.stderr.write(
            f"{asked.folder} holds no compilation. Run the program with MAGI_COMPILE_REPORT={asked.folder}; only what "
            'backend="magi" compiles is kept.\n'
        )
        return 1
    compilations = tuple(replace(entry.compilation, index=index) for index, entry in enumerate(found))
    title, torch = f"{len(found)} compilations by magi", found[0].process.torch
    if asked.html:
        asked.html.write_text(as_html(title, torch, (), compilations))
        return 0
    sys.stdout.write(as_text(as_index(_row(index, entry) for index, entry in enumerate(found)), asked.width))
    sys.stdout.write(as_text(as_renderable(title, torch, (), compilations), asked.width))
    return 0


def _row(index: int, entry: Entry) -> tuple[str, ...]:
    compilation, process = entry.compilation, entry.process
    state = compilation.error or (shown(compilation.seconds) if entry.finished else "not finished")
    return (str(index), str(process.pid), process.rank, compilation.label, ", ".join(compilation.inputs[:3]), state)


if __name__ == "__main__":
    sys.exit(main())
