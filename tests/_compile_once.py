# SPDX-License-Identifier: Apache-2.0
"""In one run of the tests, g++ compiles one text with one set of flags once, and does not read torch to link it.

Most of the time of a compiling test is g++, and most of what it compiles in a run it has compiled before: each process
asks whether vector instructions work, each use of an empty Inductor cache translates the same small kernels. Torch
still generates every kernel and starts a compiler for it. The one that it finds is this program, which runs g++ for
what is new and copies the library of an earlier test for what is not.

A third of the time for a small kernel goes into reading torch's libraries, hundreds of MB, although the linker
leaves the names that it does not find to the loader. It gets empty libraries here, and the loader gets torch.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


# What another file brings in is not in the text, so the text does not say what the library will be.
_READS_OTHER_FILES = (b'#include "', b".incbin")


def put_on_path(folder: Path) -> None:
    """Make a ``g++`` in *folder* the first one on PATH, for this process and those it starts."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        return
    libraries = folder / "libraries"
    libraries.mkdir()
    command = shlex.join([sys.executable, "-IS", __file__, str(libraries), compiler])
    script = folder / "g++"
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ["PATH"]])


def _key(compiler: str, arguments: list[str], output: str) -> str | None:
    """A name for what *arguments* compile, or None unless that is one text that stands for itself."""
    sources = [argument for argument in arguments if argument.endswith(".cpp")]
    if len(sources) != 1 or "-shared" not in arguments:
        return None
    text = Path(sources[0]).read_bytes()
    if any(mark in text for mark in _READS_OTHER_FILES):
        return None
    flags = [argument for argument in arguments if argument not in (sources[0], output)]
    return hashlib.sha256("\0".join([compiler, *flags, ""]).encode() + text).hexdigest()


def _with_empty_libraries(folder: Path, compiler: str, arguments: list[str]) -> list[str]:
    """*arguments*, and those by which the linker finds an empty library in *folder* for each of torch's."""
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
    # Some linkers note only the libraries in which they found a name.
    return [f"-L{folder}", "-Wl,--no-as-needed", *arguments] if names else arguments


def _compile(libraries: Path, compiler: str, arguments: list[str]) -> int:
    output = arguments[arguments.index("-o") + 1] if "-o" in arguments[:-1] else ""
    key = _key(compiler, arguments, output)
    command = [compiler, *_with_empty_libraries(libraries, compiler, arguments)]
    if key is None or not output:
        # By its path: g++ looks for its own parts next to what it is called by.
        os.execv(compiler, command)
    library = libraries / f"{key}.so"
    if library.is_file():
        shutil.copyfile(library, output)
        shutil.copymode(library, output)
        return 0
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        # Another process may be at the same text: what has the final name is whole.
        with tempfile.NamedTemporaryFile(dir=libraries, delete=False) as new:
            shutil.copyfile(output, new.name)
            shutil.copymode(output, new.name)
        Path(new.name).replace(library)
    return code


if __name__ == "__main__":
    sys.exit(_compile(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
