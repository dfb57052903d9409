# SPDX-License-Identifier: Apache-2.0
"""Keep docs/libraries.json and its table in docs/compatibility.md: what the search finds in libraries of kernels.

`nox -s libraries` runs it in the environment that has the libraries.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


HERE = Path(__file__).parent
RECORD = HERE / "libraries.json"
PAGE = HERE / "compatibility.md"
BEGIN, END = "<!-- libraries: begin -->\n", "<!-- libraries: end -->\n"
SCAN = HERE.parent / "tests" / "_library_scan.py"
LIBRARIES = ("liger-kernel", "fla-core", "flag_gems", "unsloth", "torchao", "xformers")


def read_record() -> dict[str, dict[str, Any]]:
    """The last record, a row for each library."""
    record: dict[str, dict[str, Any]] = json.loads(RECORD.read_text())
    return record


def row_of(scan: dict[str, Any]) -> dict[str, Any]:
    """A row of the record, from what the scan of a library printed."""
    return {
        "version": scan["version"],
        "functions": len(scan["missing"]),
        "found": sum(not missing for missing in scan["missing"].values()),
        "opaque": len(scan["opaque"]),
        "slowest": round(scan["slowest"], 2),
        "seconds": round(scan["seconds"], 1),
    }


def table(record: dict[str, dict[str, Any]]) -> str:
    """The record as a Markdown table."""
    lines = [
        "| library | functions that launch | all kernels found | stay opaque | slowest search, s | all searches, s |",
        "|---|---|---|---|---|---|",
    ]
    keys = ("functions", "found", "opaque", "slowest", "seconds")
    lines += [
        f"| {name} {row['version']} | {' | '.join(str(row[key]) for key in keys)} |" for name, row in record.items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Scan each library in a process of its own, and write the record and the table."""
    record = {}
    for name in LIBRARIES:
        done = subprocess.run([sys.executable, str(SCAN), name], capture_output=True, text=True, check=True)
        record[name] = row_of(json.loads(done.stdout))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table(record)}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
