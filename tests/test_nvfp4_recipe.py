# SPDX-License-Identifier: Apache-2.0
"""docs/nvfp4.md says to copy the folder and own it: that recipe, in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from _nvfp4 import EXAMPLES
from _pages import read_page


if TYPE_CHECKING:
    from pathlib import Path


def run(program: str, folder: Path) -> str:
    """What a program says that is run in *folder* and finds nothing else but what is installed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def copied(to: Path) -> None:
    shutil.copytree(EXAMPLES / "nvfp4", to, ignore=shutil.ignore_patterns("__pycache__"))


@pytest.mark.slow
def test_the_program_of_the_page_runs_beside_a_copy(tmp_path: Path, root: Path) -> None:
    copied(tmp_path / "fp4")
    page = read_page(root / "docs" / "nvfp4.md")
    programs = [block for block in page.blocks if block.language == "python" and "from fp4" in block.code]
    assert len(programs) == 1
    assert run(programs[0].code, tmp_path) == "['0', '2'] (('3', 'the filter'),)\n"


def test_copies_do_not_meet(tmp_path: Path) -> None:
    package = tmp_path / "mypackage"
    copied(package / "fp4")
    copied(package / "other")
    (package / "__init__.py").touch()
    program = """
import torch
from mypackage import fp4, other
assert fp4.linear_gemm is not other.linear_gemm
print(torch.ops.fp4.linear_gemm, torch.ops.other.linear_gemm)
for package in (fp4, other):
    layer = package.NVFP4Linear.from_float(torch.nn.Linear(32, 16))
    expected = layer.runner.weight.decoded().sum(1) + layer.bias
    torch.testing.assert_close(layer(torch.ones(32)), expected)
"""
    assert run(program, tmp_path) == "fp4.linear_gemm other.linear_gemm\n"
