# SPDX-License-Identifier: Apache-2.0
"""The README's example runs, and its table names only settings that exist, with their defaults."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from magi_backend import CompileConfig


README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.slow  # `nox -s wheels` runs it on the built wheels
def test_the_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    program = tmp_path / "example.py"
    program.write_text(example)

    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, timeout=300)

    assert done.returncode == 0, done.stderr
    assert "centred, compiled by magi" in done.stdout


def test_the_table_of_settings_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAGI_COMPILE_STRICT", raising=False)  # the tests are strict, users are not
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `(.*?)` \|", README, re.MULTILINE))
    actual = {name: repr(value).replace("'", '"') for name, value in CompileConfig().items()}

    assert rows
    assert rows.items() <= actual.items()
