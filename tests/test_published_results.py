# SPDX-License-Identifier: Apache-2.0
"""What is published is what was measured: ratios follow from rows, and pages show ratios, counts and pictures."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import _panels
import pytest
from _python import python
from _ratios import ratios


ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
compatibility: Any = importlib.import_module("_compatibility")  # of docs/, for `nox -s compat`
RUN_OF_TESTS = ROOT / "benchmarks" / "results" / "gpu_e2e.json"
RESULTS = [path for path in sorted(RUN_OF_TESTS.parent.glob("*.json")) if path != RUN_OF_TESTS]


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_and_what_stands_next_to_it(path: Path) -> None:
    result, table = load(path), path.with_suffix(".md").read_text()

    assert result["name"] == path.stem
    assert result["ratios"]
    assert result["ratios"] == pytest.approx(ratios(path.stem, result["rows"]))
    for key, value in result["ratios"].items():
        assert f"| {key} | {value:.3f} |" in table
        if key.endswith("_low"):
            middle = key.removesuffix("_low")
            assert value < result["ratios"][middle] < result["ratios"][f"{middle}_high"]
    for row in result["rows"]:
        assert {"arm", "case", "seconds", "torch", "triton", "device", "commit"} <= row.keys()
    if _panels.panels(result["rows"]):  # times were taken while nothing else compiled
        assert f"commit {result['commit']}" in (DOCS / "plots" / f"{path.stem}.svg").read_text()
        assert f"plots/{path.stem}.svg" in (DOCS / "performance.md").read_text()


@pytest.mark.skipif(
    git("rev-parse", "--is-shallow-repository").stdout.strip() != "false",
    reason="no history here: an unpacked archive, or a shallow clone",
)
def test_rows_name_commits_of_this_history() -> None:
    for commit in {row["commit"] for path in RESULTS for row in load(path)["rows"]}:
        assert git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0, commit


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_pages_quote_only_measured_ratios(name: str) -> None:
    measured = {f"{value:.3f}" for path in RESULTS for value in load(path)["ratios"].values()}
    quoted = set(re.findall(r"\b\d+\.\d{3}\b", (ROOT / name).read_text()))

    assert quoted
    assert quoted <= measured


def test_the_run_on_a_gpu_was_green_and_noticed_broken_kernels() -> None:
    record = load(RUN_OF_TESTS)
    assert record["name"] == "gpu_e2e"
    assert record["commit"]
    for run in record["runs"]:
        assert run["failed"] == 0
        assert run["passed"] == len(run["tests"]) > 0
        assert all(reason and count > 0 for reason, count in run["skipped"].items())
        assert len(run["mutation"]) >= 5
        assert run["mutation"].keys() <= set(run["tests"])


CHECK = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def store_one(pointer):
    tl.store(pointer, 1.0)

def test_the_kernel_stores_one():
    compiled = triton.compile(ASTSource(store_one, {"pointer": "*fp32"}, {}), target=GPUTarget("cuda", 90, 32))
    assert "1065353216" in compiled.asm["ptx"]  # the bits of 1.0
"""


def test_a_run_with_zero_kernels_leaves_none_in_the_caches_of_a_later_run(tmp_path: Path) -> None:
    (tmp_path / "test_kernel.py").write_text(CHECK)
    env = {"PYTHONPATH": str(Path(__file__).parent), "TRITON_CACHE_DIR": str(tmp_path / "cache")}

    def run(*arguments: str) -> str:
        return python("-m", "pytest", "-p", "_gpu_record", "test_kernel.py", *arguments, cwd=tmp_path, env=env)

    # A test that passes with zeros would end this run with an error.
    assert "test_the_kernel_stores_one: failed as it must" in run("--zero-kernels")
    assert "1 passed" in run()


REPORT = """<testsuites><testsuite name="pytest">
<testcase name="test_good" />
<testcase name="test_good_too"><properties /></testcase>
<testcase name="test_bad"><failure message="assert 1 == 2">...</failure></testcase>
<testcase name="test_fixture"><error message="failed on setup">...</error></testcase>
<testcase name="test_not_here"><skipped type="pytest.skip" message="no GPU">...</skipped></testcase>
<testcase name="test_broken_torch"><skipped type="pytest.xfail" message="torch">...</skipped></testcase>
</testsuite></testsuites>
"""


def test_reports_are_counted_and_join_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, record, page = tmp_path / "magi-passes.xml", tmp_path / "record.json", tmp_path / "page.md"
    report.write_text(REPORT)
    page.write_text(f"before\n{compatibility.BEGIN}old\n{compatibility.END}after\n")
    monkeypatch.setattr(compatibility, "RECORD", record)
    monkeypatch.setattr(compatibility, "PAGE", page)
    for name in ("2.13.0-py3.13", "2.9.0"):
        assert compatibility.main(name, str(report)) == 2
    # A suite that is run again replaces its own counts alone.
    report.with_stem("end-to-end").write_text(REPORT.replace("failure", "system-out"))
    assert compatibility.main("2.9.0", str(report.with_stem("end-to-end"))) == 3

    assert list(load(record)) == ["2.9.0", "2.13.0-py3.13"]
    assert page.read_text().count("2 passed, 1 skipped, 1 xfailed, 2 failed") == 2
    assert page.read_text().count("3 passed, 1 skipped, 1 xfailed, 1 failed") == 1
    assert (page.read_text()[:7], page.read_text()[-6:]) == ("before\n", "after\n")


def test_every_session_has_a_complete_result_without_failures() -> None:
    noxfile = ast.parse((ROOT / "noxfile.py").read_text())
    (sessions,) = [
        ast.literal_eval(node.value)
        for node in noxfile.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPAT"
    ]
    record = load(DOCS / "compatibility.json")

    assert list(record) == list(sessions)
    for name, row in record.items():
        assert row["torch"] == name.partition("-")[0]
        assert row["python"].startswith(f"{sessions[name]}.")
        assert set(row["suites"]) == {path.name for path in (ROOT / "packages").iterdir()} | {"end-to-end"}
        for suite in row["suites"].values():
            assert suite["failed"] == 0
            assert suite["passed"] > 0
            assert len(suite["commit"]) == 12


def test_the_page_on_compatibility_shows_what_was_counted() -> None:
    page = (DOCS / "compatibility.md").read_text()
    assert compatibility.table(load(DOCS / "compatibility.json")) in page
