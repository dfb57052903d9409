# SPDX-License-Identifier: Apache-2.0
"""Under TRITON_INTERPRET=1 ops stay opaque, work eager and compiled, and their bodies still run as fakes.

This file is also the program that runs the catalogue so, because TRITON_INTERPRET counts when kernels are made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
import tritonwrap_patterns as patterns
from magi_tritonwrap import capture_launches, find_kernels, see_through_report, triton_op
from torch._subclasses.fake_tensor import FakeTensorMode


def check(pattern: patterns.Pattern) -> None:
    """Eager and compiled numbers of one pattern, its report, and its body run as a fake."""
    op = triton_op(f"interpreted::{pattern.name}", pattern.body, mutates_args=(), schema="(Tensor x) -> Tensor")
    x = torch.arange(300.0)
    expected = pattern.reference(x)
    if pattern.interpretable:
        assert torch.equal(op(x), expected), "eager"
        torch.compiler.reset()
        compiled = torch.compile(lambda x: op(x) + 1, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), expected + 1), "compiled"
    report = see_through_report(op)
    assert not report.see_through
    assert "TRITON_INTERPRET=1" in report.reason
    assert find_kernels(pattern.body).kernels
    with FakeTensorMode(), capture_launches(drop=True) as log:
        pattern.body(torch.ones(300))
    assert len(log.launches) == pattern.launches
    assert all(launch.kernel.is_interpreted for launch in log.launches)


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True, timeout=300)
    found: dict[str, str] = json.loads(done.stdout)
    return found


NOT_WRAPPED = pytest.mark.xfail(
    not patterns.WRAPS_ANY, reason="wrap_triton of torch 2.10 to 2.12 refuses interpreted kernels", strict=True
)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=NOT_WRAPPED if name in patterns.WRAPPED_BY_HAND else ()) for name in patterns.PATTERNS],
)
def test_pattern_under_the_interpreter(errors: dict[str, str], name: str) -> None:
    assert errors[name] == ""


def main() -> None:
    errors = dict.fromkeys(patterns.PATTERNS, "")
    for name, pattern in patterns.PATTERNS.items():
        try:
            check(pattern)
        except Exception:  # noqa: BLE001 - a program that reports
            errors[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(errors))


if __name__ == "__main__":
    main()
