# SPDX-License-Identifier: Apache-2.0
"""A second process that compiles a model with Liger's kernels finds all of it in the caches.

Without the library, which `nox -s libraries` installs, the tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from _library_scan import LIBRARIES, folder_of


HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "adopt-a-triton-library.md"
FORWARD = {"_rms_norm_forward_kernel": 5, "_swiglu_forward_kernel": 2}
BACKWARD = {"_rms_norm_backward_kernel": 5, "_swiglu_backward_kernel": 2}


def answers(mode: str, folder: Path) -> dict[str, Any]:
    """What the caches in *folder* answer a new process."""
    command = [sys.executable, str(HERE / "_warm_library.py"), mode, str(PAGE), str(folder)]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "launches", "graphs"),
    [
        ("forward", {**FORWARD, "_triton_rope": 2}, 1),
        ("training", FORWARD | BACKWARD, 2),
        ("version", {"_swiglu_forward_kernel": 1}, 1),
    ],
)
def test_a_second_process_compiles_nothing(mode: str, launches: dict[str, int], graphs: int, tmp_path: Path) -> None:
    if folder_of(LIBRARIES["liger-kernel"].package) is None:
        pytest.skip("liger-kernel is not installed; nox -s libraries installs it")

    first, second = answers(mode, tmp_path), answers(mode, tmp_path)

    # One graph is captured: the page's `eps` is a number of the module, which is a constant from the start.
    assert first["misses"] == {"autograd": 1, "fxgraph": graphs}
    assert first["hits"] == {"autograd": 0, "fxgraph": 0}
    assert second["misses"] == {"autograd": 0, "fxgraph": 0}
    assert second["hits"] == {"autograd": 1, "fxgraph": graphs}
    for one in (first, second):
        assert one["bypasses"] == 0
        assert Counter(one["launches"]) == launches
