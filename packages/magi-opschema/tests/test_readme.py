# SPDX-License-Identifier: Apache-2.0
"""The README's example runs and prints what the README says."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import re
from pathlib import Path

import magi_opschema
import pytest


README = Path(__file__).parents[1] / "README.md"


def test_example() -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    expected = re.search(r"```\n(signature .*?)```", README.read_text(), re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(README), "exec", dont_inherit=True), {"__name__": "readme"})
    assert expected is not None
    assert printed.getvalue() == expected[1]


@pytest.mark.parametrize("module", ["_ops.decorator", "_lowering.signature", "_ops.catalogue", "_ops.rules"])
def test_docstring_examples(module: str) -> None:
    imported = importlib.import_module(f"magi_opschema.{module}")
    public = {name: getattr(magi_opschema, name) for name in magi_opschema.__all__}
    result = doctest.testmod(imported, extraglobs={**public, **vars(imported)})
    assert result.attempted > 0
    assert result.failed == 0
