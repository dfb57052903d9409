# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import magi_tritonwrap
import pytest


MODULES = sorted(module.name for module in pkgutil.walk_packages(magi_tritonwrap.__path__, "magi_tritonwrap."))


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
