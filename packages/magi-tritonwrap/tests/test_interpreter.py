# SPDX-License-Identifier: Apache-2.0
"""Under TRITON_INTERPRET=1 ops stay opaque, work eager and compiled, and their bodies still run as fakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tritonwrap_patterns as patterns


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
    program = Path(__file__).with_name("interpreter_runs.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False, timeout=300)
    words = [line.split() for line in done.stdout.splitlines()]
    found = {line[0]: line[1] for line in words if len(line) == 2 and line[1] in ("ok", "FAILED")}
    assert found.keys() == patterns.PATTERNS.keys(), done.stdout + done.stderr
    if done.returncode:
        sys.stdout.write(done.stdout)
    return found


NOT_WRAPPED = pytest.mark.xfail(
    not patterns.WRAPS_ANY, reason="wrap_triton of torch 2.10 to 2.12 refuses interpreted kernels", strict=True
)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=NOT_WRAPPED if name in patterns.WRAPPED_BY_HAND else ()) for name in patterns.PATTERNS],
)
def test_pattern_under_the_interpreter(outcome: dict[str, str], name: str) -> None:
    assert outcome[name] == "ok"
