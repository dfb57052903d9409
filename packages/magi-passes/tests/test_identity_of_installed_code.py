# SPDX-License-Identifier: Apache-2.0
"""The uuid of a pass that comes from, or calls, an installed distribution."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import pytest


if TYPE_CHECKING:
    from pathlib import Path

from identity_passes import PASS, made_pass


def _installed(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str) -> Any:
    """A module in a folder like those that pip installs into."""
    place = folder / "site-packages"
    place.mkdir(exist_ok=True)
    (place / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(place)
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    return importlib.import_module(name)


FOREIGN = """
import re, threading, socket
LOCK, SOCKET, SEEN = threading.Lock(), socket.socket(), [object()]
SOCKET.close()
FLAG = False
_VERSION = re.compile("[0-9]+")
def helper(): return 1
def version(x):
    with LOCK:
        SEEN.append(x)
    return _VERSION.match(x), FLAG, SOCKET, helper()
"""


def test_an_installed_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state does not matter; a patched file, a changed flag and a replaced helper do."""
    foreign = _installed(tmp_path, monkeypatch, FOREIGN, "magi_test_foreign")
    mine = made_pass("import magi_test_foreign", "magi_test_foreign.version('1')")
    first = mine().uuid()
    foreign.version("1")
    assert mine().uuid() == first

    monkeypatch.setattr(foreign, "FLAG", True)
    assert mine().uuid() != first
    monkeypatch.undo()
    assert mine().uuid() == first
    monkeypatch.setattr(foreign, "helper", lambda: 2)
    assert mine().uuid() != first
    monkeypatch.undo()

    _installed(tmp_path, monkeypatch, FOREIGN + "\ndef nobody(): pass\n", "magi_test_foreign")
    assert made_pass("import magi_test_foreign", "magi_test_foreign.version('1')")().uuid() != first


def test_a_pass_of_an_installed_distribution_is_read_as_its_author_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PASS.format(before="TABLE = {'a': object}\ndef f(): return 1", body="TABLE['a']; f()")
    found = [
        _installed(tmp_path, monkeypatch, changed, "magi_test_installed").Mine().uuid()
        for changed in (text, text, text + "\n# a remark", text.replace("return 1", "return 2"))
    ]
    assert found[0] == found[1] == found[2] != found[3]


def test_a_script_that_is_called_like_a_module_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    for value in (1, 1, 2):
        folder = tmp_path / f"folder_{len(found)}"
        folder.mkdir()
        (folder / "nntplib.py").write_text(f"def f(): return {value}")
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, "nntplib", raising=False)
        importlib.invalidate_caches()
        found.append(made_pass("from nntplib import f", "f()")().uuid())
    assert found[0] == found[1] != found[2]
