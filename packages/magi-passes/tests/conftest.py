# SPDX-License-Identifier: Apache-2.0
"""Every compiling test starts from empty caches, and has to leave the configuration as it found it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from magi_passes import _torch_compat
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache


sys.path.insert(0, str(Path(__file__).parent))  # made_passes.py: --import-mode=importlib adds nothing


@pytest.fixture(autouse=True)
def _quick_guards(unmeasured_guards: None) -> None:
    """The passes are what takes effect in kernels, so these are compiled."""
    from made_passes import seen

    seen.clear()


@pytest.fixture
def inductor() -> Iterator[Any]:
    """Inductor's configuration, with Dynamo's and Inductor's caches empty; fails when the test leaks a key."""
    torch._dynamo.reset()
    counters.clear()
    before = _torch_compat.config.read_overrides()
    with fresh_cache():
        yield config
    leaked = _torch_compat.config.config_changes(before, _torch_compat.config.read_overrides())
    _torch_compat.config.restore_overrides(before)
    torch._dynamo.reset()
    assert leaked == {}
