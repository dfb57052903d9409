# SPDX-License-Identifier: Apache-2.0
"""A replacement for torchvision, so that timm can be imported with a CPU build of torch.

timm's models take nothing from torchvision but names: its transforms are mentioned in tables that no model reads. The
wheel of torchvision on PyPI is built against CUDA and refuses to load without it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        del path, target
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return mock.MagicMock(name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """The module is complete."""


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]


@contextmanager
def torchvision_or_stand_in() -> Iterator[None]:
    """While entered, `import torchvision` returns the installed one if it loads, and a replacement otherwise."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        _forget()
    else:
        yield
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _forget()
