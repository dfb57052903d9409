# SPDX-License-Identifier: Apache-2.0
"""What holds for every suite of the workspace."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from _compile_once import kept_libraries, put_on_path


_FOLDER = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Compile each text once. Worker processes inherit the PATH of the one that started them."""
    if not hasattr(config, "workerinput"):
        config.stash[_FOLDER] = Path(tempfile.mkdtemp(prefix="compiled-once-"))
        put_on_path(config.stash[_FOLDER], kept_libraries(config, otherwise=config.stash[_FOLDER]))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave no compiler behind."""
    if _FOLDER in config.stash:
        shutil.rmtree(config.stash[_FOLDER])


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """A comparison within rounding passes or fails by what it compares, not by the run."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where there is none, so that a bare ``pytest`` passes anywhere."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU: torch.cuda.is_available() is False"))
