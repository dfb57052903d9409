# SPDX-License-Identifier: Apache-2.0
"""Running a user's file as Python itself would."""

from __future__ import annotations

import runpy
import sys
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def run_script(path: Path, *, name: str | None = None, arguments: Sequence[str] | None = None) -> None:
    """Run *path*; it can import what lies beside it, then and later, from inside its kernels.

    Args:
        path: The file.
        name: Its `__name__`, `__main__` for a program; without it, one of its own.
        arguments: What it sees behind `sys.argv[0]` while it runs; without it, it sees this process's own `sys.argv`.
    """
    before = sys.argv
    sys.path.insert(0, str(path.resolve().parent))
    if arguments is not None:
        sys.argv = [str(path), *arguments]
    try:
        runpy.run_path(str(path), run_name=name)
    finally:
        sys.argv = before
