# SPDX-License-Identifier: Apache-2.0
"""Most tests need no kernels; what several of them set and ask."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

import pytest
from magi_backend._hot import captured, table


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(autouse=True)
def _few_kernels(quick_compilations: None) -> None:
    """Only tests that are marked ``kernels`` depend on the kernels that Inductor writes."""


@pytest.fixture(autouse=True)
def _no_code_seems_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a busy machine slows down in between must not cost code for single sizes its place.

    The tests of what sizes may cost have clocks of their own.
    """
    monkeypatch.setattr(table, "perf_counter", lambda: 0.0)


@pytest.fixture
def fresh_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inductor's cache directory, empty at the start of the test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def set_env(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Set ``MAGI_COMPILE_<name>``."""
    return lambda name, value: monkeypatch.setenv(f"MAGI_COMPILE_{name}", value)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was tried by the compiler of captured graphs, which is ill."""
    attempts: list[object] = []

    def fails(*args: object) -> None:
        attempts.append(args)
        raise RuntimeError("the compiler is ill")

    monkeypatch.setattr(captured, "put_numbers", fails)
    return attempts


@pytest.fixture
def made(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[int, ...]]]:
    """The sizes for which code was made since the last time that it was asked, in order."""
    caplog.set_level(logging.INFO, "magi_backend")

    def sizes() -> list[tuple[int, ...]]:
        texts = [match[1] for each in caplog.records if (match := re.search(r"the sizes (.*) made", each.getMessage()))]
        caplog.clear()
        return [tuple(map(int, re.findall(r"=(-?\d+)", text))) for text in texts]

    return sizes
