# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/card.py counts, and that the program compiles, compares and counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _card_case import KNOWN, NAMES, ROUNDED, WHOLE
from _class_table import CLASSES
from _ratios import ratios


ROOT = Path(__file__).parents[1]
Row = dict[str, Any]


def row(case: str, arm: str, *errors: float, fell_back: tuple[str, ...] = ()) -> Row:
    """A row with the error at the first and at the second size; one that failed has none."""
    found: Row = {"case": case, "arm": f"{arm}_dynamic", "torch": "2.11.0", "seconds": [1.0] * bool(errors)}
    for which, error in zip(("difference", "second_difference"), errors, strict=False):
        found[which] = {"cosine": 1.0, "relative": error, "largest": error, "output": 0}
    return found | {"fell_back": list(fell_back)}


def test_what_stock_does_not_compile_does_not_count() -> None:
    rows = [row("a", "stock", 0.01, 0.01), row("a", "magi", 0.01, 0.01), row("b", "stock"), row("b", "magi")]
    assert ratios("card", rows) == {"classes": 1, "compiled_share": 1.0, "wrong": 0, "fell_back": 0}


@pytest.mark.parametrize(
    ("ours", "key", "value"),
    [
        (row("b", "magi"), "compiled_share", 0.5),
        (row("b", "magi", 0.01, 0.3), "wrong", 1),
        (row("b", "magi", float("inf"), 0.01), "wrong", 1),
        (row("b", "magi", 0.01, float("nan")), "wrong", 1),
        (row("b", "magi", 0.01, 0.01, fell_back=("no pass ran",)), "fell_back", 1),
    ],
    ids=["failed", "second size", "infinite", "not a number", "fell back"],
)
def test_each_kind_of_failure_shows(ours: Row, key: str, value: float) -> None:
    good = [row("a", "stock", 0.01, 0.01), row("a", "magi", 0.01, 0.01)]
    found = ratios("card", [*good, row("b", "stock", 0.01, 0.01), ours])
    assert found[key] == value
    assert found["classes"] == 2


def test_the_classes_are_new_and_the_classifiers_are_first() -> None:
    assert len(NAMES) >= 40
    assert NAMES[: len(WHOLE)] == WHOLE
    assert set(CLASSES) >= KNOWN | ROUNDED
    for name in NAMES:
        heights_and_widths = CLASSES[name].large
        assert len(set(heights_and_widths)) == 2, name


@pytest.mark.slow
def test_the_program_compiles_compares_and_counts(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "benchmarks" / "card.py"), "--tiny", "--only", "SanaTransformer2DModel"]
    subprocess.run([*program, "--compiling", "2", "--out", str(tmp_path)], check=True, timeout=580)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {found["arm"] for found in rows} == {"stock_dynamic", "magi_dynamic"}
    for found in rows:
        assert found["difference"]["relative"] < 1e-5
        assert found["second_difference"]["relative"] < 1e-5
        assert found["graphs"] == 1
        assert found["fell_back"] == []
    assert ratios("card", rows) == {"classes": 1, "compiled_share": 1.0, "wrong": 0, "fell_back": 0}
