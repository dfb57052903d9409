# SPDX-License-Identifier: Apache-2.0
"""Running a user's file as Python itself would."""

from __future__ import annotations

import runpy
import sys
from typing import TYPE_CHECKING

from magi_opschema.aten.errors import SurfaceError


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


def run_kernels(path: Path | None) -> None:
    """Run the file that registers the user's kernels, if there is one, with its own name and not as `__main__`.

    Raises:
        SurfaceError: There is no such file.
    """
    if path is None:
        return
    if not path.is_file():
        msg = f"--kernels {path}: no such file"
        raise SurfaceError(msg)
    run_script(path)
