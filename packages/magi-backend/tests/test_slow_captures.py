# SPDX-License-Identifier: Apache-2.0
"""A report says how long Dynamo traced before the backend was called, and what helps where sizes are symbols."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from magi_backend import explain
from magi_backend._report import sections
from magi_backend._report.sections import SLOW, capture_line
from magi_backend._torch_compat.frames import capture_seconds
from magi_backend.records import Compilation
from torch import Tensor


QUICK = Compilation(0, "model", 1, ("float32[2, 3, s77, s77]", "float32[8]", "s27"), ())
SLOW_ONE = replace(QUICK, capture_seconds=151.2)


def test_a_quick_capture_is_worth_no_line() -> None:
    assert capture_line(replace(QUICK, capture_seconds=SLOW - 0.1)) == ""


def test_a_slow_capture_with_symbols_says_what_helps() -> None:
    line = capture_line(SLOW_ONE)

    assert line.startswith("Dynamo traced for 151 s before it called the backend. Sizes are symbols (s27, s77), and")
    assert "torch._dynamo.mark_dynamic(images, 0)" in line
    assert "dynamic=False" in line


def test_a_slow_capture_of_constant_sizes_has_no_advice() -> None:
    line = capture_line(replace(SLOW_ONE, inputs=("float32[2, 3, 224, 224]",)))

    assert line == "Dynamo traced for 151 s before it called the backend."


def test_outside_of_a_compilation_nothing_is_captured() -> None:
    assert capture_seconds() == 0.0


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_capture_of_a_function_is_timed(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "SLOW", 1e-6)

    def fn(x: Tensor) -> Tensor:
        for _ in range(30):
            x = x.sin()
        return x

    start = time.perf_counter()
    report = explain(fn, dynamic=dynamic)(torch.randn(5))
    took = time.perf_counter() - start

    (compilation,) = report.compilations
    assert 0 < compilation.capture_seconds < took
    assert compilation.capture_seconds + compilation.seconds < took
    for text in (" ".join(report.to_text().split()), report.to_html()):
        assert "Dynamo traced for" in text
        assert ("Let only the batch vary" in text) is dynamic
