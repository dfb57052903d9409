# SPDX-License-Identifier: Apache-2.0
"""Each end-to-end test starts without settings from the environment and without compiled code."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _own_compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A pass is not asked about a graph that a cache has, so a run must not find what another one left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


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
