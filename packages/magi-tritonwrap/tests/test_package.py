# SPDX-License-Identifier: Apache-2.0
"""The package needs nothing that it does not declare, and its import changes nothing."""

from __future__ import annotations

from pathlib import Path

from _python import python


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
    program = tmp_path / "program.py"
    program.write_text(WITHOUT_NUMPY)
    assert python(program) == "1 kernel\n"
