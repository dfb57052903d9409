# SPDX-License-Identifier: Apache-2.0
"""The line on a terminal: the phase, and the time that is left by what earlier compilations took."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from magi_backend._progress import expected_seconds, time_left


PROGRAM = """
import torch
import magi_backend
compiled = torch.compile(lambda x: x.sin() + 1, backend="magi")
compiled(torch.ones(3))
"""


def _on_a_terminal(cache: Path) -> str:
    """What the program shows on a terminal of its own."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TERM": "xterm", "COLUMNS": "120"}
    environment |= {"MAGI_COMPILE_PROGRESS": "1"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # Linux says so where the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    return shown.decode()


def test_what_was_compiled_before_says_how_long_it_takes(tmp_path: Path) -> None:
    first = _on_a_terminal(tmp_path)

    assert "magi: graph 0" in first
    assert "left" not in first
    file = tmp_path / "magi_seconds.json"
    ((key, (calls, seconds)),) = json.loads(file.read_text()).items()
    assert calls == 2
    assert 0 < seconds < 300

    file.write_text(json.dumps({key: [calls, 4000.0]}))
    assert re.search("about (4000|399[0-9]) s left", _on_a_terminal(tmp_path))
    assert json.loads(file.read_text()) == {key: [calls, 4000.0]}, "what came from a cache says nothing of compilations"

    file.write_text("no JSON")
    assert "left" not in _on_a_terminal(tmp_path)


@pytest.mark.parametrize(
    ("known", "expected"),
    [({}, None), ({"a": [10, 4.0]}, 4.0), ({"b": [10, 2.0], "c": [10, 4.0], "d": [2, 0.6]}, 6.0)],
)
def test_a_graph_that_is_not_known_takes_as_long_for_each_call_as_others(
    known: dict[str, list[float]], expected: float | None
) -> None:
    assert expected_seconds("a", 20, known) == expected


def test_nothing_is_said_of_what_is_over_or_not_known() -> None:
    assert [time_left(*each) for each in ((None, 3.0), (40.0, 28.4), (40.0, 41.0))] == ["", "about 12 s left", ""]
