# SPDX-License-Identifier: Apache-2.0
"""The README's example runs as it is printed, and sees through its helper."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


README = Path(__file__).parents[1] / "README.md"


def test_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)

    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)

    assert result.stdout.startswith("mylib::scale: sees through 1 Triton kernel\n")
    assert f"scale_kernel ({script}:8)" in result.stdout
