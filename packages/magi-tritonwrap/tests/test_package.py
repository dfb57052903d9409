# SPDX-License-Identifier: Apache-2.0
"""The package needs nothing that it does not declare, its import changes nothing, and its examples run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import magi_tritonwrap
import pytest


MODULES = sorted(module.name for module in pkgutil.walk_packages(magi_tritonwrap.__path__, "magi_tritonwrap."))


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def printed_by(program: Path, text: str) -> str:
    program.write_text(text)
    return subprocess.run([sys.executable, program], capture_output=True, text=True, check=True).stdout


# Triton's interpreter imports numpy, which neither Triton nor torch declares.
WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import warnings
warnings.filterwarnings("ignore", message=".*NumPy.*")
import torch, triton
run = triton.JITFunction.run
from magi_tritonwrap import capture_launches, find_kernels
assert triton.JITFunction.run is run
assert "torch._inductor.compile_fx" not in sys.modules

@triton.jit
def kernel(x): ...

def body(x):
    kernel[(1,)](x)

with capture_launches(drop=True) as log:
    body(torch.ones(1))
print(len(log.launches), find_kernels(body).kernels[0].name)
"""


def test_an_import(tmp_path: Path) -> None:
    assert printed_by(tmp_path / "program.py", WITHOUT_NUMPY) == "1 kernel\n"


def test_the_example_of_the_readme_runs_and_sees_through_its_helper(tmp_path: Path) -> None:
    readme = Path(__file__).parents[1] / "README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(), flags=re.DOTALL)
    text = printed_by(tmp_path / "example.py", example)
    assert text.startswith("mylib::scale: sees through 1 Triton kernel\n")
    assert f"scale_kernel ({tmp_path}/example.py:8)" in text
