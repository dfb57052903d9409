# SPDX-License-Identifier: Apache-2.0
"""The cookbook's blocks run one after the other, and print what the page shows."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest


PAGE = Path(__file__).parents[3] / "docs" / "passes-cookbook.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the docs are not part of the source distribution")
def test_the_cookbook_runs(
    inductor: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    module = types.ModuleType("cookbook")
    monkeypatch.setitem(sys.modules, "cookbook", module)
    source = tmp_path / "cookbook.py"
    source.write_text(code)

    exec(compile(code, str(source), "exec"), module.__dict__)

    graph = re.compile(r"\d+_inference")
    assert graph.sub("N", capsys.readouterr().out) == graph.sub("N", shown)
