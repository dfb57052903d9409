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
from collections.abc import Callable
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
        (folder / "first.h").write_text("#include <torch/first.h>")
        self.path = f"{folder}:{os.environ['PATH']}"
        self.start_a_run()

    def start_a_run(
        self, torchs: str = "here", release: str = "2.13.0", version: str = "12.2", processor: str = "flags : sse"
    ) -> None:
        self.headers = (f"-I/{torchs}/torch/include", f"-I{sysconfig.get_path('include')}")
        self.monkeypatch.setattr("_compile_once._processor", lambda: processor)
        self.monkeypatch.setenv("PATH", self.path)
        self.monkeypatch.setattr(torch, "__file__", f"/{torchs}/torch/__init__.py")
        self.monkeypatch.setattr(torch, "__version__", release)
        (self.folder / "version").write_text(version)
        put_on_path(Path(tempfile.mkdtemp(dir=self.folder)), self.folder / "libraries")

    def run(self, text: str, *flags: str, name: str = "kernel") -> subprocess.CompletedProcess[str]:
        source = self.folder / f"{name}.cpp"
        source.write_text(text)
        included = (*self.headers, "-include", str(self.folder / "first.h"))
        command = ["g++", *flags, *included, "-o", str(source.with_suffix(".so")), str(source)]
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


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        (lambda compiler: None, 1),
        (lambda compiler: compiler.start_a_run(), 1),
        (lambda compiler: compiler.start_a_run("there"), 1),
        (lambda compiler: compiler.start_a_run(release="2.13.1"), 2),
        (lambda compiler: compiler.start_a_run(version="13.1"), 2),
        (lambda compiler: compiler.start_a_run(processor="flags : avx512f"), 2),
        (lambda compiler: (compiler.folder / "first.h").write_text("#include <a>"), 2),
    ],
    ids=["nothing", "run", "environment", "release of torch", "compiler", "processor", "header"],
)
def test_what_changes_makes_another_library(
    compiler: Compiler, change: Callable[[Compiler], object], runs: int
) -> None:
    compiler.run(TEXT, "-shared")
    change(compiler)
    compiler.run(TEXT, "-shared")

    assert compiler.runs == runs


@pytest.mark.parametrize(
    ("text", "flags", "runs"),
    [
        (TEXT, ("-shared", "-O3"), 1),
        (TEXT, ("-shared", "-O1"), 2),
        (TEXT, ("-c", "-O3"), 2),
        (TEXT, ("-shared", "-DNDEBUG", "-O3"), 2),
        ("int f() ;\n", ("-shared", "-O3"), 2),
        ("int f();\n\n", ("-shared", "-O3"), 2),
        # What its text does not determine is compiled each time.
        ('#include "other.h"\n', ("-shared",), 3),
        ('asm(".incbin weights.bin");\n', ("-shared",), 3),
        (TEXT, ("-E",), 3),
        (TEXT, ("-shared", "other.cpp"), 3),
        ("#include <mine.h>\n", ("-shared", "-I/mine"), 3),
    ],
)
def test_another_text_and_other_flags_make_another_library(
    compiler: Compiler, text: str, flags: tuple[str, ...], runs: int
) -> None:
    compiler.run(TEXT, "-shared", "-O3", name="first")
    for name in ("second", "third"):
        assert compiler.run(text, *flags, name=name).returncode == 0
        made = (compiler.folder / f"{name}.so").read_text()
        assert made.startswith(f" {' '.join(flags)} -I")
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
