# SPDX-License-Identifier: Apache-2.0
"""Update docs/compatibility.json and the table of docs/compatibility.md: the results of each suite and torch release.

`nox -s compat` runs this script in the environment of the suites, with one JUnit report for each suite:
`python docs/_compatibility.py 2.15.0 magi-opschema.xml magi-passes.xml …`. The record has the commit of each result. If
only one suite is run again, its result is replaced and the others are kept, unless torch, Triton or Python changed.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any


HERE = Path(__file__).parent
RECORD = HERE / "compatibility.json"
PAGE = HERE / "compatibility.md"
BEGIN, END = "<!-- counts: begin -->\n", "<!-- counts: end -->\n"
OUTCOMES = ("passed", "skipped", "xfailed", "failed")


def counts(report: Path) -> dict[str, int]:
    """The number of tests with each outcome in a JUnit report. An error in a fixture or at collection is a failure."""
    found: Counter[str] = Counter(outcome(case) for case in ET.parse(report).iter("testcase"))
    return {name: found[name] for name in OUTCOMES}


def outcome(case: ET.Element) -> str:
    """The outcome of one test."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table with one row for each pair of torch and Python."""
    if not record:
        return "No results yet.\n"
    suites = list(dict.fromkeys(suite for row in record.values() for suite in row["suites"]))
    lines = [f"| torch | triton | Python | {' | '.join(suites)} |", f"|{'---|' * (3 + len(suites))}"]
    for row in record.values():
        cells = [_cell(row["suites"].get(suite)) for suite in suites]
        lines.append(f"| {row['torch']} | {row['triton']} | {row['python']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(suite: dict[str, int] | None) -> str:
    if suite is None:
        return "not run"
    return ", ".join(f"{suite[name]} {name}" for name in OUTCOMES if suite[name] or name == "passed")


def with_table(page: str, record: dict[str, Any]) -> str:
    """*page* with the table of *record* between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table(record)}{END}{after}"


def _release(name: str) -> tuple[tuple[int, ...], str]:
    return tuple(map(int, name.partition("-")[0].split("."))), name


def _packages_first(suite: tuple[str, Any]) -> tuple[bool, str]:
    return not suite[0].startswith("magi-"), suite[0]


def main(name: str, *reports: str) -> int:
    """Record the reports under *name*, such as `2.13.0-py3.13`, the name of a session of `nox -s compat`.

    Returns:
        The number of tests that failed.
    """
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    asked = ["git", "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(asked, cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()
    versions = {
        "torch": metadata.version("torch").partition("+")[0],
        "triton": metadata.version("triton"),
        "python": platform.python_version(),
    }
    earlier = record.get(name, {})
    kept = earlier["suites"] if versions.items() <= earlier.items() else {}
    found = {Path(report).stem: {**counts(Path(report)), "commit": commit} for report in reports}
    record[name] = {**versions, "suites": dict(sorted((kept | found).items(), key=_packages_first))}
    record = dict(sorted(record.items(), key=lambda item: _release(item[0])))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), record))
    return sum(suite["failed"] for suite in record[name]["suites"].values())


if __name__ == "__main__":
    failed = main(*sys.argv[1:])
    sys.exit(f"{failed} tests failed" if failed else 0)
