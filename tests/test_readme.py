# SPDX-License-Identifier: Apache-2.0
"""The README has an example of each package, and the test command of CI. tests/test_docs.py runs the examples."""

from __future__ import annotations

import re
from pathlib import Path


ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_package_has_an_example() -> None:
    examples = re.findall(r"^### (magi-\w+)\n\n```python\n", README, re.MULTILINE)

    assert sorted(examples) == sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir())


def test_the_test_command_is_what_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text()

    assert "pip install nox && nox\n" in README
    assert ci.rstrip().endswith("pip install nox && nox")
