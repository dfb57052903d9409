# SPDX-License-Identifier: Apache-2.0
"""``python -m magi_backend report FOLDER``: what a run compiled, as recorded with MAGI_COMPILE_REPORT=FOLDER."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ._report.run import Comparison, RunReport, read_report
from .errors import ReportError


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report. Returns the exit status, which is 1 if there is no report."""
    asked = _parser().parse_args(arguments)
    try:
        run = read_report(asked.folder)
        shown: RunReport | Comparison = run.compared_with(read_report(asked.compare)) if asked.compare else run
    except ReportError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if not asked.html:
        sys.stdout.write(shown.to_text(asked.width))
        return 0
    file = asked.folder / "report.html" if asked.html is True else asked.html
    file.write_text(shown.to_html())
    sys.stdout.write(f"{file}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m magi_backend", description=__doc__)
    report = parser.add_subparsers(required=True).add_parser("report", help="print what a run compiled")
    report.add_argument("folder", type=Path, help="what MAGI_COMPILE_REPORT was")
    report.add_argument(
        "--html", type=Path, nargs="?", const=True, metavar="FILE", help="write a page instead; to FOLDER/report.html"
    )
    report.add_argument("--compare", type=Path, metavar="OTHER", help="what changed from FOLDER to another run")
    report.add_argument("--width", type=int, default=120, help="columns of the text")
    return parser


if __name__ == "__main__":
    sys.exit(main())
