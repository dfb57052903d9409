# SPDX-License-Identifier: Apache-2.0
"""Every compiling test starts from empty caches, and has to leave the configuration as it found it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from magi_passes import _torch_compat
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache


if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def inductor() -> Iterator[Any]:
    """Inductor's configuration, with Dynamo's and Inductor's caches empty; fails when the test leaks a key."""
    torch._dynamo.reset()
    counters.clear()
    before = _torch_compat.read_overrides()
    with fresh_cache():
        yield config
    leaked = _torch_compat.config_changes(before, _torch_compat.read_overrides())
    _torch_compat.restore_overrides(before)
    torch._dynamo.reset()
    assert leaked == {}
