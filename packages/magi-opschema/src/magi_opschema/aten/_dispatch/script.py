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
    """Run the file *path*, which can import modules from its folder, also later from inside its kernels.

    Args:
        path: The file.
        name: Its `__name__`, `__main__` for a program; by default, a unique one.
        arguments: Its arguments after `sys.argv[0]` while it runs; by default, `sys.argv` of this process is unchanged.
    """
    before = sys.argv
    sys.path.insert(0, str(path.resolve().parent))
    if arguments is not None:
        sys.argv = [str(path), *arguments]
    try:
        runpy.run_path(str(path), run_name=name)
    finally:
        sys.argv = before
