# SPDX-License-Identifier: Apache-2.0
"""Each program under examples/ runs, ends with exit status 0, and writes what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


EXAMPLES = Path(__file__).parent.parent / "examples"
# What a program must print, and the files it must write.
PROMISES = {
    "vae_decode": (
        ["path       flattened", "NDTilingWorkaroundPass", "keep_mutation_order", "compiled and eager agree"],
        ["vae_decode.png", "vae_decode.html", "vae_train.html"],
    ),
}


def test_every_example_has_promises() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PROMISES)


@pytest.mark.parametrize("name", PROMISES)
def test_example(name: str, tmp_path: Path) -> None:
    said, written = PROMISES[name]

    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "--out", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    for promise in said:
        assert promise in done.stdout
    for file in written:
        assert (tmp_path / file).stat().st_size > 0
