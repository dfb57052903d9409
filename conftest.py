# SPDX-License-Identifier: Apache-2.0
"""What holds for every suite of the workspace."""

from __future__ import annotations

import pytest
import torch


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
