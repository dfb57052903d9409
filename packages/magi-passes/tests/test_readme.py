# SPDX-License-Identifier: Apache-2.0
"""The example of the README runs and prints what it says."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch


if TYPE_CHECKING:
    import pytest


README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_prints_what_the_readme_shows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (promised,) = re.findall(r"^# (WiderTiles ran.*)$", example, re.MULTILINE)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    source = tmp_path / "readme_example.py"
    source.write_text(example)
    module = types.ModuleType("readme_example")
    monkeypatch.setitem(sys.modules, "readme_example", module)

    exec(compile(example, str(source), "exec"), module.__dict__)

    graph = re.compile(r"\d+_inference")
    assert graph.sub("N", promised) == graph.sub("N", capsys.readouterr().out.strip())
