# SPDX-License-Identifier: Apache-2.0
"""A program of Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def python(
    *arguments: object,
    cwd: Path | None = None,
    seconds: int = 580,
    executable: object = sys.executable,
    **variables: str,
) -> str:
    """What Python prints with these *arguments*, and *variables* beside those of this environment; it must end well."""
    command = [str(executable), *map(str, arguments)]
    env = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=seconds, env=env)
    assert done.returncode == 0, f"ended with {done.returncode} after {done.stdout!r}\n{done.stderr}"
    return done.stdout
