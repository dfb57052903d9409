# SPDX-License-Identifier: Apache-2.0
"""Packages compiled ahead of time, loaded in a process that has neither these packages nor Triton."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


LOADING = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith(("magi_", "triton")):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import torch
package, values = sys.argv[1:]
loaded = torch._inductor.aoti_load_package(package)
for x, expected in torch.load(values):
    torch.testing.assert_close(loaded(x), expected)
assert not [name for name in sys.modules if name.startswith("magi_")]
print("equal")
"""


def check_elsewhere(package: str, values: Sequence[tuple[Tensor, Tensor]], folder: Path) -> str:
    """Fail unless *package* gives the second of each pair for the first, in such a process; what it prints."""
    torch.save(list(values), folder / "values.pt")
    command = [sys.executable, "-W", "ignore", "-c", LOADING, package, str(folder / "values.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
