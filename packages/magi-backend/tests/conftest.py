# SPDX-License-Identifier: Apache-2.0
"""Each test starts without settings from the environment and with its own compilation cache."""

from __future__ import annotations

import itertools
import logging
import os
import re
from typing import TYPE_CHECKING

import pytest
import torch


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


_namespaces = (f"magi_backend_test_{index}" for index in itertools.count())


@pytest.fixture(autouse=True, scope="session")
def _own_compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A pass is not asked about a graph that a cache has, so a run must not find what another one left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def _few_kernels(quick_compilations: None) -> None:
    """Only tests that are marked ``kernels`` depend on the kernels that Inductor writes."""


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("MAGI_COMPILE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MAGI_COMPILE_STRICT", "1")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.fixture
def fresh_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inductor's cache directory, empty at the start of the test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def ns() -> str:
    """A namespace of operators that no other test uses."""
    return next(_namespaces)


@pytest.fixture
def set_env(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Set ``MAGI_COMPILE_<name>``."""
    return lambda name, value: monkeypatch.setenv(f"MAGI_COMPILE_{name}", value)


@pytest.fixture
def made(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[int, ...]]]:
    """The sizes for which code was made since the last time that it was asked, in order."""
    caplog.set_level(logging.INFO, "magi_backend")

    def sizes() -> list[tuple[int, ...]]:
        texts = [match[1] for each in caplog.records if (match := re.search(r"the sizes (.*) made", each.getMessage()))]
        caplog.clear()
        return [tuple(map(int, re.findall(r"=(-?\d+)", text))) for text in texts]

    return sizes
