# SPDX-License-Identifier: Apache-2.0
"""The command ``magi``: what ``doctor`` finds on a machine where something is broken, and what ``settings`` prints."""

from __future__ import annotations

import json
import re
import shutil
import sys
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from click.testing import CliRunner
from magi_backend import _doctor
from magi_backend.__main__ import magi
from magi_backend._doctor import Finding, examine
from magi_backend._settings import fields
from magi_backend._torch_compat import compiling
from torch.torch_version import TorchVersion


Patch = pytest.MonkeyPatch


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(magi, arguments, catch_exceptions=False)
    return done.exit_code, done.output


def quick() -> list[Finding]:
    return list(examine(compiles=False))


def python(patch: Patch, *version: int) -> None:
    patch.setattr(_doctor, "sys", types.SimpleNamespace(version_info=version, executable=sys.executable))


@pytest.fixture(autouse=True)
def _healthy(monkeypatch: Patch, tmp_path: Path) -> None:
    """A machine without cards, on which everything works."""
    python(monkeypatch, 3, 12, 1)
    monkeypatch.setattr(_doctor, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(_doctor, "ROOM", 0)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0+cpu"))
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(triton, "__version__", "3.7.1")
    monkeypatch.setattr(metadata, "requires", lambda _: [])


def test_where_everything_works_each_line_says_so() -> None:
    findings = quick()

    assert [one for one in findings if one.state != "works"] == []
    assert [one.what for one in findings][:6] == ["Python", "packages", "torch", "Triton", "card", "C++ compiler"]
    assert run("doctor", "--quick")[0] == 0


Break = Callable[[Patch, Path], None]


def without(name: str) -> Break:
    return lambda patch, _: patch.setitem(sys.modules, name, None)


def version(module: Any, text: str) -> Break:
    return lambda patch, _: patch.setattr(module, "__version__", TorchVersion(text))


def installed(**versions: str) -> Break:
    def look_up(name: str) -> str:
        if not versions.get(name.replace("-", "_"), "1"):
            raise metadata.PackageNotFoundError(name)
        return versions.get(name.replace("-", "_"), "0.1.0")

    return lambda patch, _: patch.setattr(metadata, "version", look_up)


def full_disk(patch: Patch, _: Path) -> None:
    patch.setenv("TRITON_CACHE_DIR", "/full")
    patch.setattr(_doctor, "ROOM", 2**30)
    patch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=2**29))


def no_compiler(patch: Patch, _: Path) -> None:
    patch.setenv("CXX", "/no/such/g++")
    # Inductor reads the variable when its configuration is imported.
    patch.setattr(compiling, "cpp_compiler", lambda: "/no/such/g++")


def variables(**values: str) -> Break:
    """Variables of the environment; ``FILE`` stands for a path below a file, which can never be a folder."""

    def set_them(patch: Patch, folder: Path) -> None:
        (folder / "file").touch()
        for name, value in values.items():
            patch.setenv(name, value.replace("FILE", str(folder / "file" / "x")))

    return set_them


def cards(*, driver: bool, cuda: str | None, found: tuple[int, int] | None) -> Break:
    def pretend(patch: Patch, folder: Path) -> None:
        if driver:
            (folder / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Mon\n")
            patch.setattr(_doctor, "DRIVER", folder / "version")
        patch.setattr(torch.version, "cuda", cuda)
        patch.setattr(torch.cuda, "is_available", lambda: found is not None)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        major, minor = found or (0, 0)
        card = types.SimpleNamespace(name="Card", total_memory=80 * 2**30, major=major, minor=minor)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: card)

    return pretend


BROKEN: list[tuple[Break, str, str]] = [
    (
        without("torch"),
        "fails torch: ModuleNotFoundError: import of torch halted; None in sys.modules",
        "pip install torch",
    ),
    (version(torch, "2.9.1+cu126"), "fails torch: 2.9.1+cu126 is older than 2.10", "pip install 'torch>=2.10'"),
    (
        version(torch, "2.16.0"),
        "note torch: 2.16.0 is newer than 2.15, the newest that the packages are tested with",
        "",
    ),
    (
        lambda patch, _: python(patch, 3, 14, 0),
        "note Python: 3.14.0, with which the packages are not tested",
        "Python 3.11 to 3.13",
    ),
    (
        without("triton"),
        "fails Triton: ModuleNotFoundError: import of triton halted; None in sys.modules",
        "pip install triton==3.7.1",
    ),
    (
        lambda patch, _: patch.setattr(metadata, "requires", lambda _: ["triton==3.9.0; python_version>'3'"]),
        "fails Triton: 3.7.1, and this torch is built for 3.9.0",
        "pip install triton==3.9.0",
    ),
    (version(triton, "3.5.0"), "fails Triton: 3.5.0, and this torch is built for 3.7.1", "pip install triton==3.7.1"),
    (
        installed(magi_passes=""),
        "fails packages: not all of one version: opschema 0.1.0, tritonwrap 0.1.0, passes missing, backend 0.1.0",
        "install all four from one checkout: see the quick start",
    ),
    (
        lambda patch, _: patch.setattr(metadata, "entry_points", lambda **_: ()),
        'fails backend: torch does not find backend="magi"',
        "install magi-backend with pip, rather than put its folder on the path",
    ),
    (
        no_compiler,
        "fails C++ compiler: CXX=/no/such/g++ does not run, so there is no code for a CPU",
        "apt-get install g++, or CXX=/path/of/a/compiler",
    ),
    (
        variables(TORCHINDUCTOR_CACHE_DIR="FILE"),
        "fails Inductor's cache: FILE cannot be written to: Not a directory",
        "TORCHINDUCTOR_CACHE_DIR=/a/folder/of/yours",
    ),
    (
        variables(MAGI_COMPILE_REPORT="FILE"),
        "fails reports: FILE cannot be written to: Not a directory",
        "MAGI_COMPILE_REPORT=/a/folder/of/yours",
    ),
    (full_disk, "note Triton's cache: /full has 512 MiB left", "TRITON_CACHE_DIR=/a/folder/of/yours"),
    (
        variables(MAGI_HOT_SIZES="4"),
        "fails settings: MAGI_HOT_SIZES is not read",
        "did you mean MAGI_COMPILE_HOT_SIZES?",
    ),
    (
        variables(MAGI_COMPILE_TOPOLOGY_KEY="4"),
        "note settings: MAGI_COMPILE_TOPOLOGY_KEY is not read",
        "unset it, or ignore this if another program reads it",
    ),
    (
        variables(MAGI_COMPILE_CHECK="maybe"),
        "fails settings: The environment variable MAGI_COMPILE_CHECK = 'maybe': the setting check takes True or False.",
        "correct it, or unset it",
    ),
    (
        cards(driver=True, cuda=None, found=None),
        "note card: driver 570.86.15, and torch is a build for the CPU alone",
        "install the build of torch for the CUDA of that driver, to use the card",
    ),
    (
        cards(driver=True, cuda="12.8", found=None),
        "fails card: driver 570.86.15, and torch finds no card",
        "a newer driver, or the torch of its CUDA; this one is built for CUDA 12.8",
    ),
    (
        cards(driver=False, cuda="12.8", found=None),
        "works card: none, and torch is built for CUDA 12.8: code is for the CPU",
        "",
    ),
    (cards(driver=True, cuda="12.8", found=(9, 0)), "works card 0: Card, 80 GiB, CUDA 12.8, driver 570.86.15", ""),
    (
        cards(driver=True, cuda="12.8", found=(6, 1)),
        "fails card 0: Card, 80 GiB, CUDA 12.8, driver 570.86.15: compute capability 6.1, and Triton needs 7.0",
        "CUDA_VISIBLE_DEVICES without it",
    ),
]


@pytest.mark.parametrize(("break_it", "line", "way_out"), BROKEN)
def test_what_is_broken_is_named_with_the_way_out(
    break_it: Break, line: str, way_out: str, monkeypatch: Patch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        break_it(patch, tmp_path)
        findings = quick()

    lines = {f"{one.state} {one.what}: {one.found}": one.way_out for one in findings}
    assert lines.get(line.replace("FILE", f"{tmp_path}/file/x")) == way_out
    assert all(one.way_out for one in findings if one.state == "fails")


def test_each_limit_of_an_old_torch_is_named(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu126"))
    python(monkeypatch, 3, 11, 7)
    limits = {one.what: (one.state, one.found, one.way_out) for one in quick() if "2.11.0" in one.found}

    crash = "torch 2.11.0 crashes in every torch.compile under Python 3.11.7"
    apart = "pointwise operators after your Triton kernels are kernels of their own with torch 2.11.0"
    threads = "torch 2.11.0 fails in several threads that compile at once"
    del limits["torch"]
    assert limits == {
        "torch.compile": ("fails", crash, "Python 3.12, or torch 2.13"),
        "threads": ("note", threads, "compile in one thread, or torch 2.12"),
        "epilogues": ("note", apart, "torch 2.12 fuses them"),
    }


def test_the_doctor_knows_the_releases_that_were_tested() -> None:
    table = json.loads((Path(__file__).parents[3] / "docs" / "compatibility.json").read_text()).values()
    tested = {_doctor._numbers(row["torch"])[:2]: row["triton"] for row in table}

    assert tested == _doctor.TRITONS
    assert (min(tested), max(tested)) == (_doctor.OLDEST, _doctor.NEWEST)


def test_a_check_that_fails_itself_does_not_end_the_others(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: 1 / 0)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    by_name = {one.what: one for one in quick()}

    assert (by_name["card"].state, by_name["card"].found) == ("fails", "ZeroDivisionError: division by zero")
    assert by_name["settings"].state == "works"


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("import os; os.kill(os.getpid(), 11)", "torch.compile ends with signal 11"),
        ("raise ValueError('no room')", "torch.compile ends with status 1: ValueError: no room"),
        ("import time; time.sleep(60)", "torch.compile took more than 0.5 s"),
        ("import os; assert 'MAGI_COMPILE_CHECK' not in os.environ", ""),
    ],
)
def test_a_compilation_that_crashes_is_a_finding(program: str, found: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv("MAGI_COMPILE_CHECK", "maybe")
    monkeypatch.setattr(_doctor, "PROGRAM", program)
    if "sleep" in program:
        monkeypatch.setattr(_doctor, "SECONDS", 0.5)
    finding = _doctor._compiled("on cpu", "cpu")

    assert (finding.state, finding.found) == (("fails", found) if found else ("works", finding.found))


@pytest.mark.slow
def test_a_function_is_compiled_and_right() -> None:
    assert list(examine())[-1].state == "works"


def test_the_doctors_answer_for_programs(monkeypatch: Patch) -> None:
    monkeypatch.setenv("MAGI_CHECK", "1")
    status, output = run("doctor", "--quick", "--json")
    answer = json.loads(output)

    assert (status, answer["works"]) == (1, False)
    assert {"what", "state", "found", "way_out"} == set(answer["findings"][0])
    status, output = run("doctor", "--quick")
    assert status == 1
    assert "fails  settings          MAGI_CHECK is not read -> did you mean MAGI_COMPILE_CHECK?" in output


def test_settings_with_their_origins(monkeypatch: Patch) -> None:
    monkeypatch.setenv("MAGI_COMPILE_HOT_SIZES", "4")
    monkeypatch.setenv("MAGI_CHECK", "1")
    status, output = run("settings")

    assert status == 0
    assert len(output.splitlines()) == len(fields()) + 1
    assert re.search("^hot_sizes +4 +environment MAGI_COMPILE_HOT_SIZES$", output, re.MULTILINE)
    assert output.endswith("MAGI_CHECK is not read (did you mean MAGI_COMPILE_CHECK?)\n")

    monkeypatch.delenv("MAGI_CHECK")
    status, output = run("settings", "hot_sizes")
    assert output.startswith("hot_sizes\n  value      4\n  from       environment MAGI_COMPILE_HOT_SIZES\n")
    assert json.loads(run("settings", "--json")[1]).keys() == set(fields())
    assert json.loads(run("settings", "hot_sizes", "--json")[1])["hot_sizes"]["takes"] == "int from 0"


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["settings", "hot_size"], 1, "'hot_size' is not a setting of the magi backend. Did you mean 'hot_sizes'?"),
        (["report", "none"], 1, "Run the program with MAGI_COMPILE_REPORT=none; only what backend="),
        (["docter"], 2, "No such command 'docter'"),
        (["report", "x", "--htlm"], 2, "No such option"),
    ],
)
def test_a_wrong_call(arguments: list[str], status: int, sentence: str) -> None:
    found, output = run(*arguments)

    assert found == status
    assert sentence in output


def test_a_bad_variable_is_said_by_settings(set_env: Callable[[str, str], None]) -> None:
    set_env("CHECK", "maybe")

    assert run("settings") == (
        1,
        "Error: The environment variable MAGI_COMPILE_CHECK = 'maybe': the setting check takes True or False.\n",
    )
