# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the magi-opschema tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture
def x() -> torch.Tensor:
    return torch.arange(3.0)


@pytest.fixture(autouse=True)
def _few_kernels(quick_compilations: None) -> None:
    """An operator does not depend on the kernels that Inductor writes, so most tests do without them."""


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []
        self.schemas: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        self.schemas.append(str(func._schema))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="write golden files instead of comparing with them")
