# SPDX-License-Identifier: Apache-2.0
"""Ops in a namespace of their own for each test, a driver that needs no GPU, and what the tests import."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent))  # --import-mode=importlib adds nothing
from graph_questions import Ops
from magi_tritonwrap.testing import stub_driver


_NUMBERS = itertools.count()


@pytest.fixture
def ops() -> Iterator[Ops]:
    registry = Ops(f"tritonwrap_test_{next(_NUMBERS)}")
    yield registry
    registry.library._destroy()


@pytest.fixture
def stub() -> Iterator[None]:
    with stub_driver():
        yield
