# SPDX-License-Identifier: Apache-2.0
"""The compatibility page shows what `nox -s compat` counted."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest


ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
FUZZ: dict[str, Any] = json.loads((ROOT / "packages" / "magi-opschema" / "tests" / "fuzz.json").read_text())
RECORD: dict[str, Any] = json.loads((ROOT / "docs" / "compatibility.json").read_text())

EXAMPLE = {"torch": "2.13.0", "triton": "3.7.1", "python": "3.11.7", "suites": {}}

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest">
<testcase classname="a" name="test_good" />
<testcase classname="a" name="test_good_too"><properties /></testcase>
<testcase classname="a" name="test_bad"><failure message="assert 1 == 2">...</failure></testcase>
<testcase classname="a" name="test_fixture"><error message="failed on setup">...</error></testcase>
<testcase classname="a" name="test_not_here"><skipped type="pytest.skip" message="no GPU">...</skipped></testcase>
<testcase classname="a" name="test_broken_torch"><skipped type="pytest.xfail" message="torch">...</skipped></testcase>
</testsuite></testsuites>
"""


@pytest.fixture(scope="module")
def compatibility() -> Any:
    spec = importlib.util.spec_from_file_location("compatibility", ROOT / "docs" / "_compatibility.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sessions() -> dict[str, str]:
    """The sessions of `nox -s compat`, read from the noxfile without nox."""
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="COMPAT")], value=value):
                return ast.literal_eval(value)  # type: ignore[no-any-return]
    pytest.fail("noxfile.py has no COMPAT")


def test_reports_are_counted_by_outcome(compatibility: Any, tmp_path: Path) -> None:
    report = tmp_path / "magi-passes.xml"
    report.write_text(REPORT)

    assert compatibility.counts(report) == {"passed": 2, "skipped": 1, "xfailed": 1, "failed": 2}


def test_a_report_is_noted_in_the_record_and_on_the_page(
    compatibility: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, record, page = tmp_path / "magi-passes.xml", tmp_path / "record.json", tmp_path / "page.md"
    report.write_text(REPORT)
    page.write_text(f"before\n{compatibility.BEGIN}old\n{compatibility.END}after\n")
    monkeypatch.setattr(compatibility, "RECORD", record)
    monkeypatch.setattr(compatibility, "PAGE", page)
    for name in ("2.13.0-py3.13", "2.9.0", "2.13.0"):
        assert compatibility.main(name, str(report)) == 2

    noted = json.loads(record.read_text())
    assert list(noted) == ["2.9.0", "2.13.0", "2.13.0-py3.13"]
    (suite,) = noted["2.9.0"]["suites"].items()
    assert suite[0] == "magi-passes"
    assert len(suite[1].pop("commit")) == 12
    assert suite[1] == {"passed": 2, "skipped": 1, "xfailed": 1, "failed": 2}
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert text.count("2 passed, 1 skipped, 1 xfailed, 2 failed") == 3


def test_a_suite_that_is_run_again_replaces_its_own_counts(
    compatibility: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{compatibility.BEGIN}{compatibility.END}")
    monkeypatch.setattr(compatibility, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(compatibility, "PAGE", page)
    reports = [tmp_path / "end-to-end.xml", tmp_path / "magi-passes.xml"]
    for report in reports:
        report.write_text(REPORT)
    assert compatibility.main("2.9.0", *map(str, reports)) == 4
    reports[1].write_text(REPORT.replace("<failure", "<system-out").replace("</failure", "</system-out"))
    assert compatibility.main("2.9.0", str(reports[1])) == 3

    record = json.loads((tmp_path / "record.json").read_text())
    assert [(name, suite["failed"]) for name, suite in record["2.9.0"]["suites"].items()] == [
        ("magi-passes", 1),
        ("end-to-end", 2),
    ]
    record["2.9.0"]["python"] = "3.10.0"
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert compatibility.main("2.9.0", str(reports[1])) == 1, "of another environment nothing is kept"


def test_every_session_has_a_complete_result_without_failures() -> None:
    assert list(RECORD) == list(sessions())
    for name, row in RECORD.items():
        assert row["torch"] == name.partition("-")[0]
        assert row["python"].startswith(f"{sessions()[name]}.")
        assert set(row["suites"]) == {path.name for path in (ROOT / "packages").iterdir()} | {"end-to-end"}
        for suite in row["suites"].values():
            assert suite["failed"] == 0
            assert suite["passed"] > 0
            assert len(suite["commit"]) == 12


def test_a_session_leaves_out_the_test_of_the_record_that_it_writes() -> None:
    left_out = f"tests/{Path(__file__).name}::{test_every_session_has_a_complete_result_without_failures.__name__}"

    assert f"--deselect={left_out}" in (ROOT / "noxfile.py").read_text()


def test_the_page_shows_the_record(compatibility: Any) -> None:
    page = PAGE.read_text()

    assert compatibility.with_table(page, RECORD) == page
    assert compatibility.table({}) not in compatibility.with_table(page, {"2.13.0": EXAMPLE})
    assert compatibility.table(RECORD) in page


def test_the_page_shows_the_fuzz_report() -> None:
    """The report itself is checked against the cases by magi-opschema's test_robustness.py."""
    text = " ".join(PAGE.read_text().split())

    assert (
        f"{FUZZ['cases']} cases, {FUZZ['right']} right, {FUZZ['refused']} refused at decoration because two names make "
        f"one flat name, {len(FUZZ['failures'])} failures"
    ) in text
