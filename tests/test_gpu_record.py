# SPDX-License-Identifier: Apache-2.0
"""The run of `nox -s gpu_e2e` in which every kernel stores zeros."""

from __future__ import annotations

from pathlib import Path

from _python import python


CHECK = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def store_one(pointer):
    tl.store(pointer, 1.0)

def test_the_kernel_stores_one():
    compiled = triton.compile(ASTSource(store_one, {"pointer": "*fp32"}, {}), target=GPUTarget("cuda", 90, 32))
    assert "1065353216" in compiled.asm["ptx"]  # the bits of 1.0
"""


def test_a_later_run_does_not_find_the_zeros_in_its_caches(tmp_path: Path) -> None:
    (tmp_path / "test_kernel.py").write_text(CHECK)
    env = {"PYTHONPATH": str(Path(__file__).parent), "TRITON_CACHE_DIR": str(tmp_path / "cache")}

    def run(*arguments: str) -> str:
        return python("-m", "pytest", "-p", "_gpu_record", "test_kernel.py", *arguments, cwd=tmp_path, env=env)

    # A test that passes with zeros would end this run with an error.
    assert "test_the_kernel_stores_one: failed as it must" in run("--zero-kernels")
    assert "1 passed" in run()
