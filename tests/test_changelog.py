# SPDX-License-Identifier: Apache-2.0
"""Every fragment of the changelog is one that a release will find, and reads as the others do."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
FRAGMENTS = sorted((ROOT / "changelog.d").iterdir())
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir())
KINDS = [
    kind["directory"] for kind in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
]


def faults(name: str, text: str) -> list[str]:
    """What is wrong with a fragment, in sentences."""
    checks = {
        f"name it +words.KIND.md, KIND one of {', '.join(KINDS)}": re.fullmatch(
            rf"\+[a-z0-9-]+\.({'|'.join(KINDS)})\.md", name
        ),
        f"begin with a package and a colon: {', '.join(PACKAGES)}": text.partition(": ")[0] in PACKAGES,
        "end with a full stop": text.endswith(".\n"),
        "one paragraph, without a bullet: a release adds it": "\n\n" not in text and not text.startswith(("-", "*")),
        "wrap lines at 120 columns": all(len(line) <= 120 for line in text.splitlines()),
    }
    return [f"{name}: {sentence}" for sentence, holds in checks.items() if not holds]


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda path: path.name)
def test_fragment_is_well_formed(fragment: Path) -> None:
    assert faults(fragment.name, fragment.read_text()) == []


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("+x.added.md", "magi-passes: `P` was added.\n", None),
        ("x.added.md", "magi-passes: `P` was added.\n", "name it"),
        ("+x.news.md", "magi-passes: `P` was added.\n", "name it"),
        ("+x.added.md", "`P` was added.\n", "begin with a package"),
        ("+x.added.md", "magi-passes: `P` was added", "full stop"),
        ("+x.added.md", "magi-passes: a.\n\nb.\n", "one paragraph"),
        ("+x.added.md", f"magi-passes: {'a' * 120}.\n", "wrap"),
    ],
)
def test_a_malformed_fragment_is_noticed(name: str, text: str, sentence: str | None) -> None:
    found = faults(name, text)

    assert (found == []) if sentence is None else sentence in " ".join(found)


def test_the_changelog_takes_fragments() -> None:
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["start_string"]

    assert configured in (ROOT / "CHANGELOG.md").read_text()
