# SPDX-License-Identifier: Apache-2.0
"""Run the catalogue under Triton's interpreter; a program, because TRITON_INTERPRET counts when kernels are made."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path


os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

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


def main() -> int:
    """Check every pattern, print `name ok` or what went wrong."""
    failed = 0
    for name, pattern in patterns.PATTERNS.items():
        try:
            check(pattern)
        except Exception:  # noqa: BLE001 - a program that reports
            failed += 1
            sys.stdout.write(f"{name} FAILED\n{traceback.format_exc()}\n")
        else:
            sys.stdout.write(f"{name} ok\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
