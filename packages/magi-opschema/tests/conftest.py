# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the magi-opschema tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch


_numbers = itertools.count()


@pytest.fixture
def ns() -> str:
    """A namespace that no other test uses."""
    return f"opschema_test_{next(_numbers)}"


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No test sees what another compiled."""
    yield
    torch.compiler.reset()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="write golden files instead of comparing with them")
