# SPDX-License-Identifier: Apache-2.0
"""A program of Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def python(
    *arguments: object,
    cwd: Path | None = None,
    seconds: int = 580,
    executable: object = sys.executable,
    env: Mapping[str, str] | None = None,
) -> str:
    """What Python prints with these *arguments*, and *env* beside the environment of this process; it must end well."""
    command = [str(executable), *map(str, arguments)]
    own = {**os.environ, **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=seconds, env=own)
    assert done.returncode == 0, f"ended with {done.returncode} after {done.stdout!r}\n{done.stderr}"
    return done.stdout
