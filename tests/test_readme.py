# SPDX-License-Identifier: Apache-2.0
"""The README's examples run, each in an interpreter of its own, and print what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = dict(re.findall(r"^### (magi-\w+)\n\n```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))
PROMISES = {
    "magi-opschema": ["tensor([3., 3.])", "path       flattened"],
    "magi-tritonwrap": ["sees through 1 Triton kernel"],
    "magi-passes": ["WiderTiles ran on 0_inference: sizes are symbolic; triton.max_tiles: None -> 3"],
    "magi-backend": ["compiled by magi", "agree, within"],
}


def test_every_package_has_an_example() -> None:
    assert set(EXAMPLES) == set(PROMISES)


@pytest.mark.parametrize("package", PROMISES)
def test_example(package: str, tmp_path: Path) -> None:
    program = tmp_path / "example.py"  # a file: Triton and magi read the source of functions
    program.write_text(EXAMPLES[package])

    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, timeout=300)

    assert done.returncode == 0, done.stderr
    for promise in PROMISES[package]:
        assert promise in done.stdout


def test_the_test_command_is_what_ci_runs() -> None:
    ci = (Path(__file__).parent.parent / ".ci" / "run").read_text()

    assert "pip install nox && nox\n" in README
    assert ci.rstrip().endswith("pip install nox && nox")
