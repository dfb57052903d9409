# SPDX-License-Identifier: Apache-2.0
"""What the suites compile is compiled once a run, and only what is the same is taken for the same."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import cast

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


class Compiler:
    """A g++ that counts, behind the one that the suites find."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        script = folder / "g++"
        script.write_text(COMPILER)
        script.chmod(0o755)
        (folder / "libraries").mkdir()
        self.path = f"{folder}:{os.environ['PATH']}"
        self.monkeypatch = monkeypatch
        self.start_a_run("12.2")

    def start_a_run(self, version: str) -> None:
        self.monkeypatch.setenv("PATH", self.path)
        (self.folder / "version").write_text(version)
        run = Path(tempfile.mkdtemp(dir=self.folder))
        put_on_path(run, self.folder / "libraries")

    def run(self, text: str, *flags: str, name: str = "kernel") -> subprocess.CompletedProcess[str]:
        source = self.folder / f"{name}.cpp"
        source.write_text(text)
        command = ["g++", *flags, "-o", str(self.output(name)), str(source)]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    def output(self, name: str) -> Path:
        return self.folder / f"{name}.so"

    @property
    def runs(self) -> int:
        return (self.folder / "runs").read_text().count("run")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(tmp_path, monkeypatch)


def test_every_suite_finds_it_first() -> None:
    found = shutil.which("g++")

    assert found is None or "_compile_once" in Path(found).read_text()


def test_a_source_is_compiled_once_whatever_its_path(compiler: Compiler) -> None:
    for name in ("here", "there"):
        assert compiler.run("int f();\n", "-shared", name=name).returncode == 0

    assert compiler.runs == 1
    assert compiler.output("there").read_text() == " -shared\nint f();\n"


@pytest.mark.parametrize("flags", [("-shared", "-O1"), ("-c", "-O3"), ("-shared", "-DNDEBUG", "-O3")])
def test_other_flags_are_another_library(compiler: Compiler, flags: tuple[str, ...]) -> None:
    compiler.run("int f();\n", "-shared", "-O3", name="first")
    compiler.run("int f();\n", *flags, name="second")

    assert compiler.runs == 2
    assert compiler.output("second").read_text().startswith(f" {' '.join(flags)}\n")


@pytest.mark.parametrize("text", ["int f() ;\n", "int f();\n\n", "float f();\n"])
def test_another_text_is_another_library(compiler: Compiler, text: str) -> None:
    compiler.run("int f();\n", "-shared", name="first")
    compiler.run(text, "-shared", name="second")

    assert compiler.runs == 2
    assert compiler.output("second").read_text() == f" -shared\n{text}"


def test_what_does_not_compile_says_so_each_time(compiler: Compiler) -> None:
    for _ in range(2):
        refused = compiler.run("#error\n", "-shared")
        assert (refused.returncode, refused.stderr) == (3, "refused\n")

    assert compiler.runs == 2


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ('#include "other.h"\n', ("-shared",)),
        ('asm(".incbin weights.bin");\n', ("-shared",)),
        ("int f();\n", ("-E",)),
        ("int f();\n", ("-shared", "other.cpp")),
    ],
    ids=["reads a header", "reads a file", "is a text again", "is two texts"],
)
def test_what_its_text_does_not_determine_is_compiled_each_time(
    compiler: Compiler, text: str, flags: tuple[str, ...]
) -> None:
    for _ in range(2):
        assert compiler.run(text, *flags).returncode == 0

    assert compiler.runs == 2


def test_the_next_run_finds_the_library(compiler: Compiler) -> None:
    for _ in range(2):
        assert compiler.run("int f();\n", "-shared").returncode == 0
        compiler.start_a_run("12.2")

    assert compiler.runs == 1


def test_another_compiler_makes_another_library(compiler: Compiler) -> None:
    for version in ("12.2", "13.1"):
        compiler.start_a_run(version)
        assert compiler.run("int f();\n", "-shared").returncode == 0

    assert compiler.runs == 2


@pytest.mark.parametrize("processor", ["flags : avx512f", "model name : another"])
def test_another_processor_has_other_libraries(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, processor: str
) -> None:
    compiler.run("int f();\n", "-shared", "-march=native")
    monkeypatch.setattr("_compile_once._processor", lambda: processor)
    compiler.start_a_run("12.2")
    compiler.run("int f();\n", "-shared", "-march=native")

    assert compiler.runs == 2


def environment_with_torch(folder: Path, version: str) -> tuple[str, ...]:
    """Flags for the headers of a torch and a Python that are installed in *folder*, and one that is precompiled."""
    torchs, python = folder / "torch", folder / "python"
    (torchs / "include").mkdir(parents=True)
    (torchs / "version.py").write_text(version)
    python.mkdir()
    (python / "patchlevel.h").write_text("3.11.7")
    (folder / "first.h").write_text("#include <torch/first.h>")
    return "-shared", f"-I{torchs / 'include'}", f"-I{python}", "-include", str(folder / "first.h")


def test_a_release_of_torch_is_the_same_in_every_environment(compiler: Compiler, tmp_path: Path) -> None:
    for name in ("one", "two"):
        compiler.run("int f();\n", *environment_with_torch(tmp_path / name, "2.13.0"))

    assert compiler.runs == 1


@pytest.mark.parametrize(
    ("file", "text"), [("torch/version.py", "2.13.1"), ("python/patchlevel.h", "3.11.8"), ("first.h", "#include <a>")]
)
def test_other_headers_make_another_library(compiler: Compiler, tmp_path: Path, file: str, text: str) -> None:
    flags = environment_with_torch(tmp_path / "one", "2.13.0")
    compiler.run("int f();\n", *flags)
    (tmp_path / "one" / file).write_text(text)
    compiler.run("int f();\n", *flags)

    assert compiler.runs == 2


def test_headers_of_anything_else_may_change(compiler: Compiler, tmp_path: Path) -> None:
    for _ in range(2):
        compiler.run("#include <mine.h>\n", "-shared", f"-I{tmp_path}")

    assert compiler.runs == 2


class Kept:
    """A pytest.Config whose cache is a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder, self

    def mkdir(self, name: str) -> Path:
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        return self.folder / name


def kept(config: object, otherwise: Path) -> Path:
    return kept_libraries(cast("pytest.Config", config), otherwise)


def test_libraries_that_were_used_longest_ago_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("_compile_once._MOST_LIBRARIES", 2)
    config = Kept(tmp_path / "cache")
    folder = kept(config, tmp_path)
    for age, name in enumerate(("new", "old", "oldest")):
        (folder / name).touch()
        os.utime(folder / name, (1e9 - age, 1e9 - age))

    assert folder != tmp_path
    assert {file.name for file in kept(config, tmp_path).iterdir()} == {"new", "old"}


def test_nothing_is_kept_if_pytest_has_no_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert kept(Kept(tmp_path / "file"), tmp_path) == tmp_path
    assert kept(object(), tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["torch", "torch_cpu", "c10"])
def test_the_linker_gets_an_empty_library_for_one_of_torch(compiler: Compiler, name: str) -> None:
    compiler.run("int f();\n", "-shared", "-lgomp", f"-l{name}", "-L/torchs")

    flags = compiler.output("kernel").read_text().splitlines()[0].split()
    places = [Path(flag.removeprefix("-L")) for flag in flags if flag.startswith("-L")]
    assert [(place / f"lib{name}.so").is_file() for place in places] == [True, False]
    assert not (places[0] / "libgomp.so").exists()


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
