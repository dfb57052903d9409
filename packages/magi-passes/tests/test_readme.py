# SPDX-License-Identifier: Apache-2.0
"""The example of the README runs and prints what it says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest


README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_prints_what_the_readme_shows(
    inductor: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (promised,) = re.findall(r"^# (WiderTiles ran.*)$", example, re.MULTILINE)
    (tmp_path / "example.py").write_text(example)
    runpy.run_path(str(tmp_path / "example.py"), run_name="readme_example")
    graph = re.compile(r"\d+_inference")
    assert graph.sub("N", promised) == graph.sub("N", capsys.readouterr().out.strip())
