# SPDX-License-Identifier: Apache-2.0
"""What the suites compile is compiled once a run, and only what is the same is taken for the same."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _compile_once import kept_libraries, put_on_path


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="g++ is not what Inductor starts elsewhere")

# It "compiles" to the text and the flags, counts its runs, and refuses what says #error.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then cat "$(dirname "$0")/version"; exit; fi
echo run >> "$(dirname "$0")/runs"
for last; do source="$last"; done
if grep -q '#error' "$source"; then echo refused >&2; exit 3; fi
while [ "$1" != -o ]; do flags="$flags $1"; shift; done
{ echo "$flags"; cat "$source"; } > "$2"
"""
TEXT = "int f();\n"


class Compiler:
    """A g++ that counts, behind the one that the suites find."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        script = folder / "g++"
        script.write_text(COMPILER)
        script.chmod(0o755)
        (folder / "libraries").mkdir()
        self.path = f"{folder}:{os.environ['PATH']}"
        self.start_a_run()

    def start_a_run(
        self,
        torchs: str = "here",
        release: str = "2.13.0",
        version: str = "12.2",
        processor: str = "flags : sse",
        header: str = "#include <torch/first.h>",
    ) -> None:
        self.headers = (f"-I/{torchs}/torch/include", f"-I{sysconfig.get_path('include')}")
        (self.folder / "first.h").write_text(header)
        self.monkeypatch.setattr("_compile_once._processor", lambda: processor)
        self.monkeypatch.setenv("PATH", self.path)
        self.monkeypatch.setattr(torch, "__file__", f"/{torchs}/torch/__init__.py")
        self.monkeypatch.setattr(torch, "__version__", release)
        (self.folder / "version").write_text(version)
        put_on_path(Path(tempfile.mkdtemp(dir=self.folder)), self.folder / "libraries")

    def run(self, text: str, flags: str, name: str = "kernel") -> subprocess.CompletedProcess[str]:
        source = self.folder / f"{name}.cpp"
        source.write_text(text)
        included = (*self.headers, "-include", str(self.folder / "first.h"))
        command = ["g++", *flags.split(), *included, "-o", str(source.with_suffix(".so")), str(source)]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    @property
    def runs(self) -> int:
        return (self.folder / "runs").read_text().count("run")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(tmp_path, monkeypatch)


def test_every_suite_finds_it_first() -> None:
    found = shutil.which("g++")

    assert found is None or "_compile_once" in Path(found).read_text()


# How often the compiler runs for one text, and then twice for this one, with these flags, in such a run.
CASES: dict[str, tuple[dict[str, str], str, str, int]] = {
    "another run": ({}, TEXT, "-shared -O3", 1),
    "another environment": ({"torchs": "there"}, TEXT, "-shared -O3", 1),
    "another release of torch": ({"release": "2.13.1"}, TEXT, "-shared -O3", 2),
    "another compiler": ({"version": "13.1"}, TEXT, "-shared -O3", 2),
    "another processor": ({"processor": "flags : avx512f"}, TEXT, "-shared -O3", 2),
    "another header": ({"header": "#include <a>"}, TEXT, "-shared -O3", 2),
    "another text": ({}, "int f() ;\n", "-shared -O3", 2),
    "another flag": ({}, TEXT, "-shared -O1", 2),
    "another kind of output": ({}, TEXT, "-c -O3", 2),
    # What its text does not determine is compiled each time.
    "includes a file": ({}, '#include "other.h"\n', "-shared", 3),
    "holds a file": ({}, 'asm(".incbin weights.bin");\n', "-shared", 3),
    "no library": ({}, TEXT, "-E", 3),
    "two sources": ({}, TEXT, "-shared other.cpp", 3),
    "another folder of headers": ({}, "#include <mine.h>\n", "-shared -I/mine", 3),
}


@pytest.mark.parametrize("name", CASES)
def test_only_what_is_the_same_is_taken_for_the_same(name: str, compiler: Compiler) -> None:
    changes, text, flags, runs = CASES[name]
    compiler.run(TEXT, "-shared -O3", name="first")
    compiler.start_a_run(**changes)
    for output in ("second", "third"):
        assert compiler.run(text, flags, name=output).returncode == 0
        made = (compiler.folder / f"{output}.so").read_text()
        assert made.startswith(f" {flags} -I")
        assert made.endswith(f".h\n{text}")

    assert compiler.runs == runs


def test_what_does_not_compile_says_so_each_time(compiler: Compiler) -> None:
    for _ in range(2):
        refused = compiler.run("#error\n", "-shared")
        assert (refused.returncode, refused.stderr) == (3, "refused\n")

    assert compiler.runs == 2


def test_libraries_that_were_used_longest_ago_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("_compile_once._MOST_LIBRARIES", 2)
    for age, name in enumerate(("new", "old", "oldest")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    config: Any = SimpleNamespace(cache=SimpleNamespace(mkdir=lambda name: tmp_path))
    without: Any = SimpleNamespace()

    assert {file.name for file in kept_libraries(config, Path("/")).iterdir()} == {"new", "old"}
    assert kept_libraries(without, Path("/")) == Path("/")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_the_loader_gets_torch(tmp_path: Path) -> None:
    """A name of torch in a library that was linked against an empty one."""
    source, library = tmp_path / "ask.cpp", tmp_path / "ask.so"
    source.write_text(
        'extern "C" int aoti_torch_dtype_float32(); extern "C" int ask() { return aoti_torch_dtype_float32(); }'
    )
    torchs = Path(torch.__file__).parent / "lib"

    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library, "-ltorch_cpu", f"-L{torchs}"], check=True)

    assert ctypes.CDLL(str(library)).ask() == 6  # ScalarType::Float
    # The linker got an empty library.
    (empty,) = [Path(word) for word in Path(shutil.which("g++") or "").read_text().split() if word.endswith("/empty")]
    assert (empty / "libtorch_cpu.so").stat().st_size < 1e5
