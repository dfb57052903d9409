# SPDX-License-Identifier: Apache-2.0
"""What is published is what was measured: ratios follow from rows, and documents quote them."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import subprocess
from pathlib import Path
from typing import Any

import _panels
import pytest


ROOT = Path(__file__).parents[1]
RUN_OF_TESTS = ROOT / "benchmarks" / "results" / "gpu_e2e.json"
RESULTS = [path for path in sorted(RUN_OF_TESTS.parent.glob("*.json")) if path != RUN_OF_TESTS]


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


PICTURED = [path for path in RESULTS if _panels.panels(load(path)["rows"])]
"""Where times were taken while nothing else compiled."""


def recomputed(result: dict[str, Any]) -> dict[str, float]:
    spec = importlib.util.spec_from_file_location("benchmark_ratios", ROOT / "benchmarks" / "_ratios.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ratios(result["name"], result["rows"])  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_ratios_follow_from_rows(path: Path) -> None:
    result = load(path)
    assert result["name"] == path.stem
    assert result["ratios"] == pytest.approx(recomputed(result))
    assert result["ratios"]
    for row in result["rows"]:
        assert {"arm", "case", "seconds", "torch", "triton", "device", "commit"} <= row.keys()


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_no_ratio_is_the_end_of_its_interval(path: Path) -> None:
    ratios = load(path)["ratios"]
    with_interval = [key.removesuffix("_low") for key in ratios if key.endswith("_low")]
    for key in with_interval:
        assert ratios[f"{key}_low"] < ratios[key] < ratios[f"{key}_high"]
    if path.stem == "backend_parity":
        assert len(with_interval) == 6


def test_backend_parity_publishes_medians_of_pairs() -> None:
    result = load(RUN_OF_TESTS.with_name("backend_parity.json"))
    seconds = {(row["arm"], row["case"]): row["seconds"] for row in result["rows"]}
    for arm, case in seconds:
        if arm == "inductor":
            pairs = zip(seconds["magi", case], seconds["inductor", case], strict=True)
            published = result["ratios"][f"{case.replace(' ', '_')}_vs_inductor"]
            assert published == pytest.approx(statistics.median(ours / theirs for ours, theirs in pairs))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_rows_name_a_commit_of_this_history(path: Path) -> None:
    shallow = ["git", "rev-parse", "--is-shallow-repository"]
    if subprocess.run(shallow, cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip() != "false":
        pytest.skip("no history here: an unpacked archive, or a shallow clone")
    for commit in {row["commit"] for row in load(path)["rows"]}:
        asked = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
        assert subprocess.run(asked, cwd=ROOT, check=False).returncode == 0, commit


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_table_next_to_the_result_shows_its_ratios(path: Path) -> None:
    table = path.with_suffix(".md").read_text()
    for key, value in load(path)["ratios"].items():
        assert f"| {key} | {value:.3f} |" in table


@pytest.mark.parametrize("path", PICTURED, ids=lambda path: path.stem)
def test_the_picture_is_of_this_result(path: Path) -> None:
    picture = (ROOT / "docs" / "plots" / f"{path.stem}.svg").read_text()
    assert f"commit {load(path)['commit']}" in picture
    assert f"plots/{path.stem}.svg" in (ROOT / "docs" / "performance.md").read_text()


@pytest.mark.parametrize("path", PICTURED, ids=lambda path: path.stem)
def test_the_picture_takes_its_ink_from_the_page_and_names_every_arm(path: Path) -> None:
    picture = (ROOT / "docs" / "plots" / f"{path.stem}.svg").read_text()
    drawn = {row["arm"] for rows in _panels.panels(load(path)["rows"]).values() for row in rows}

    assert "prefers-color-scheme:dark" in picture
    assert len(set(re.findall(r"(?:fill|stroke): (#\w+)", picture))) <= 2  # our bars and theirs, and no ground
    for arm in drawn:
        assert f"<!-- {_panels.of_arm(path.stem, arm)}" in picture  # beside the outlines of its letters


@pytest.mark.parametrize("name", ["call_overhead", "see_through", "real_decoders"])
def test_the_panels_go_by_the_names_of_the_table(name: str) -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())

    for case in _panels.panels(result["rows"]):
        assert f"| {_panels.of_case(name, case)}" in page


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_pages_quote_only_measured_ratios(name: str) -> None:
    page = (ROOT / name).read_text()
    measured = {f"{value:.3f}" for path in RESULTS for value in load(path)["ratios"].values()}
    quoted = set(re.findall(r"\b\d+\.\d{3}\b", page))
    assert quoted
    assert quoted <= measured


def test_the_run_on_a_gpu_was_green_and_noticed_broken_kernels() -> None:
    if not RUN_OF_TESTS.exists():
        pytest.skip("no run of `nox -s gpu_e2e` is published yet")
    record = load(RUN_OF_TESTS)
    assert record["name"] == "gpu_e2e"
    assert record["commit"]
    for run in record["runs"]:
        assert run["failed"] == 0
        assert run["passed"] == len(run["tests"]) > 0
        assert all(reason and count > 0 for reason, count in run["skipped"].items())
        assert len(run["mutation"]) >= 5
        assert run["mutation"].keys() <= set(run["tests"])
