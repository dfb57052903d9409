# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for `nox -s gpu_e2e`: it records a run, and it can break every Triton kernel to see tests fail.

`--gpu-record FILE` writes the run on this torch into *FILE*, beside those on other releases. `--zero-kernels` makes
each `tl.store` of a kernel that a person wrote store zeros; a selected test that passes all the same proves nothing,
and fails the run.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction


NAME = "gpu_e2e"
FAILED = "failed as it must"
OUTCOMES = ("passed", "failed")
INDUCTORS_OWN = ("triton_poi_", "triton_red_", "triton_per_", "triton_tem_")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-record", metavar="FILE", help="write what ran, on which torch and device, into FILE")
    parser.addoption("--zero-kernels", action="store_true", help="every kernel stores zeros, and every test must fail")


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    if config.getoption("--zero-kernels"):
        store_zeros()
        if not is_worker:
            # Caches for this run alone: one that other runs share would keep the zeros for them.
            folder = tempfile.TemporaryDirectory(prefix="zero-kernels-")
            config.add_cleanup(folder.cleanup)
            os.environ.update(dict.fromkeys(("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"), folder.name))
    if not is_worker:
        config.pluginmanager.register(Recorder(config), "gpu-recorder")


class ZeroStores(ast.NodeTransformer):
    """``tl.store(pointer, value, …)`` becomes ``tl.store(pointer, value * 0, …)``."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "store":
            zero = ast.Constant(0)
            for keyword in node.keywords:
                if keyword.arg == "value":
                    keyword.value = ast.BinOp(keyword.value, ast.Mult(), zero)
            node.args[1:2] = [ast.BinOp(value, ast.Mult(), zero) for value in node.args[1:2]]
        return ast.fix_missing_locations(node)


def store_zeros() -> None:
    """Compile kernels from now on as if each stored zeros, in this process: Inductor would start others."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    parse: Any = JITFunction.parse

    def parse_with_zeros(kernel: Any) -> ast.Module:
        tree: ast.Module = parse(kernel)
        return tree if kernel.__name__.startswith(INDUCTORS_OWN) else ZeroStores().visit(tree)

    JITFunction.parse = parse_with_zeros


class Recorder:
    """Collects the outcome of each test, in the process that the user started."""

    def __init__(self, config: pytest.Config) -> None:
        self.file: str | None = config.getoption("--gpu-record")
        self.is_mutated: bool = config.getoption("--zero-kernels")
        self.outcomes: dict[str, str] = {}
        self.skips: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.outcomes[report.nodeid] = "skipped"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skips[reason.removeprefix("Skipped: ")] += 1
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = "" if crash is None else crash.message
            # A test that breaks for another reason than its numbers has not noticed anything.
            noticed = not self.is_mutated or said.startswith(("AssertionError", "assert "))
            self.outcomes[report.nodeid] = "failed" if noticed else f"broke: {said}"
        elif report.when == "call":
            self.outcomes.setdefault(report.nodeid, "passed")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        passed, failed = (sorted(name for name in self.outcomes if self.outcomes[name] == which) for which in OUTCOMES)
        counts = {"passed": len(passed), "failed": len(failed), "skipped": dict(self.skips), "tests": passed}
        part: dict[str, Any] = {"mutation": dict.fromkeys(failed, FAILED)} if self.is_mutated else counts
        if self.is_mutated:
            noticed = bool(failed) and len(failed) == len(self.outcomes)
            session.exitstatus = pytest.ExitCode.OK if noticed else pytest.ExitCode.TESTS_FAILED
        if self.file:
            write(Path(self.file), _versions() | part)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.is_mutated:
            terminalreporter.section("every kernel stored zeros")
            for name, outcome in self.outcomes.items():
                said = FAILED if outcome == "failed" else f"{outcome}, AND SHOULD HAVE FAILED"
                terminalreporter.write_line(f"{name}: {said}")


def _versions() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def write(path: Path, part: dict[str, Any]) -> None:
    """Put *part* of a run into the file at *path*: runs are told apart by the release of torch."""
    earlier: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    runs = {run["torch"]: run for run in earlier}
    runs[part["torch"]] = {**runs.get(part["torch"], {"mutation": {}}), **part}
    asked = ["git", "rev-parse", "HEAD"]
    commit = (
        os.environ.get("MAGI_BENCHMARK_COMMIT") or subprocess.check_output(asked, cwd=path.parent, text=True).strip()
    )
    record = {"name": NAME, "commit": commit, "runs": [runs[release] for release in sorted(runs)]}
    path.write_text(json.dumps(record, indent=1) + "\n")
