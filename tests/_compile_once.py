# SPDX-License-Identifier: Apache-2.0
"""A ``g++`` for tests that compiles each source once for each set of flags, and does not read torch to link it.

A test that compiles spends most of its time in g++, and most of its sources were compiled before: every process checks
whether vector instructions work, and every test with an empty Inductor cache compiles the same small kernels. Torch
still generates every kernel and starts a compiler for it. The compiler that it finds is this program, which runs g++
for a new source, and copies the library of an earlier test for any other. The libraries are kept for the next run.
Their names depend on the releases of torch, Python and g++, and on the processor. ccache would not do: Inductor
compiles and links by one command, which it does not cache.

For a small kernel, a third of the time is for reading torch's libraries, which are hundreds of MB. The linker does not
need them, because it leaves undefined names to the loader. So the linker gets empty libraries, and the loader gets
torch's.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import pytest

# A source that reads other files does not determine the library alone.
_READS_OTHER_FILES = (b'#include "', b".incbin")
# The environment variables that g++ reads.
_READ_BY_GXX = ("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX")
# Each has a few hundred kB.
_MOST_LIBRARIES = 4000


def kept_libraries(config: pytest.Config, otherwise: Path) -> Path:
    """The folder in pytest's cache that keeps libraries from run to run, or *otherwise* if pytest has no cache.

    The least recently used libraries are deleted. ``pytest --cache-clear`` deletes all of them.
    """
    try:
        folder: Path = config.cache.mkdir("compiled-once")
    except (AttributeError, OSError):  # ``-p no:cacheprovider``, or a checkout that is read-only
        return otherwise
    files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[_MOST_LIBRARIES:]:
        file.unlink(missing_ok=True)
    return folder


def put_on_path(folder: Path, libraries: Path) -> None:
    """Put a ``g++`` in *folder* first on PATH, here and in child processes. It stores its output in *libraries*."""
    import torch

    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        return
    (folder / "empty").mkdir()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    made_for = "\0".join([compiler, version, _processor(), torch.__version__, sys.version])
    known = [str(Path(torch.__file__).parent), sysconfig.get_path("include")]
    settings = [str(libraries), str(folder / "empty"), hashlib.sha256(made_for.encode()).hexdigest(), *known, compiler]
    script = folder / "g++"
    script.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-IS", __file__, *settings])} "$@"\n')
    script.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ["PATH"]])


def _processor() -> str:
    """The text that says which instructions ``-march=native`` allows."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _key(made_for: str, known: list[str], arguments: list[str], output: str) -> str | None:
    """A name for the output of *arguments*, or None unless one source and headers in *known* folders determine it.

    Wherever those folders are, the releases of what is in them are part of *made_for*.
    """
    sources = [argument for argument in arguments if argument.endswith(".cpp")]
    if len(sources) != 1 or not {"-shared", "-c"} & set(arguments):
        return None
    text = Path(sources[0]).read_bytes()
    if any(mark in text for mark in _READS_OTHER_FILES):
        return None
    parts = [made_for, *(os.environ.get(name, "") for name in _READ_BY_GXX)]
    for before, flag in zip(["", *arguments], arguments, strict=False):
        place = next((place for place in known if flag[2:].startswith(place)), None)
        if before == "-include":
            parts.append(Path(flag).read_text())
        elif flag.startswith("-I") and place is None:
            return None
        elif flag not in (sources[0], output):
            parts.append(flag.replace(place, str(known.index(place))) if place else flag)
    return hashlib.sha256("\0".join([*parts, ""]).encode() + text).hexdigest()


def _with_empty_libraries(folder: Path, compiler: str, arguments: list[str]) -> list[str]:
    """*arguments* with options that make the linker find an empty library in *folder* for each of torch's."""
    if "-shared" not in arguments:
        return arguments
    names = [argument.removeprefix("-l") for argument in arguments if argument.startswith(("-ltorch", "-lc10"))]
    for name in names:
        library = folder / f"lib{name}.so"
        if not library.is_file():
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as new:
                command = [compiler, "-shared", f"-Wl,-soname,{library.name}", "-o", new.name, "-xc++", os.devnull]
            subprocess.run(command, check=True)
            Path(new.name).replace(library)
    # By default, some linkers record only the libraries that define a name.
    return [f"-L{folder}", "-Wl,--no-as-needed", *arguments] if names else arguments


def _copied(source: Path, folder: Path, name: str) -> None:
    """Another process may do the same, so the final *name* is given to complete files only."""
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as new:
        shutil.copyfile(source, new.name)
        shutil.copymode(source, new.name)
    Path(new.name).replace(folder / name)


def _compile(libraries: Path, empty: Path, made_for: str, known: list[str], compiler: str, arguments: list[str]) -> int:
    output = Path(arguments[arguments.index("-o") + 1]) if "-o" in arguments[:-1] else None
    key = _key(made_for, known, arguments, str(output))
    command = [compiler, *_with_empty_libraries(empty, compiler, arguments)]
    if key is None or output is None:
        # g++ looks for its own programs next to the path that it was started with.
        os.execv(compiler, command)
    library = libraries / f"{key}.so"
    if library.is_file():
        _copied(library, output.parent, output.name)
        library.touch()
        return 0
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        _copied(output, libraries, library.name)
    return code


if __name__ == "__main__":
    libraries, empty, made_for, torchs, pythons, compiler, *arguments = sys.argv[1:]
    sys.exit(_compile(Path(libraries), Path(empty), made_for, [torchs, pythons], compiler, arguments))
