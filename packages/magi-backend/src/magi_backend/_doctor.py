# SPDX-License-Identifier: Apache-2.0
"""What works here and what does not: versions, card, compilers, folders, settings, and a function that is compiled."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """What was looked at and what was found; what fails, and some of what is only noted, has a way out."""

    what: str
    state: Literal["works", "note", "fails"]
    found: str
    way_out: str = ""


OURS = ("opschema", "tritonwrap", "passes", "backend")
OLDEST, NEWEST = (2, 10), (2, 15)
"""The oldest release of torch that the packages support, and the newest that they are tested with."""
TRITONS = {(2, 10): "3.6.0", (2, 11): "3.6.0", (2, 12): "3.7.1", (2, 13): "3.7.1", (2, 15): "3.9.0"}
"""The Triton of each release of torch, for a build of torch that names none."""
DRIVER = Path("/proc/driver/nvidia/version")
CAPABILITY = (7, 0)
"""The oldest cards for which Inductor and Triton compile."""
ROOM = 2**30
"""Bytes of free space below which a cache is noted."""
SECONDS = 600
"""How long compiling one small function may take: seconds, or minutes on a busy machine."""


def examine(*, compiles: bool = True) -> Iterator[Finding]:
    """All findings; with *compiles*, a small function is compiled and run in another process for each device.

    What is broken here is what this is for, so no error ends it.
    """
    for what, (look, way_out) in _CHECKS.items():
        if what == "torch.compile" and not compiles:
            continue
        try:
            yield from look()
        except Exception as error:  # noqa: BLE001 - each is a finding
            yield Finding(what, "fails", _line(error), way_out)
            if what == "torch":
                return  # nothing else can be looked at


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _release() -> tuple[int, ...]:
    import torch  # alone: with a torch that is too old, what the backend has for its release cannot be imported

    return _numbers(torch.__version__)


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    tested = (3, 11) <= sys.version_info[:2] <= (3, 13)
    untested = Finding("Python", "note", f"{version}, with which the packages are not tested", "Python 3.11 to 3.13")
    yield Finding("Python", "works", version) if tested else untested


def _packages() -> Iterator[Finding]:
    found = dict.fromkeys(OURS, "missing")
    for name in found:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(f"magi-{name}")
    text = ", ".join(map(" ".join, found.items()))
    if "missing" in found.values() or len(set(found.values())) > 1:
        yield Finding("packages", "fails", f"not all of one version: {text}", _CHECKS["packages"][1])
    else:
        yield Finding("packages", "works", text)
    if not metadata.entry_points(group="torch_dynamo_backends", name="magi"):
        way_out = "install magi-backend with pip, rather than put its folder on the path"
        yield Finding("backend", "fails", 'torch does not find backend="magi"', way_out)


def _torch() -> Iterator[Finding]:
    import torch

    release, version = _release(), str(torch.__version__)
    text = ".".join(map(str, release))
    if release[:2] < OLDEST:
        yield Finding("torch", "fails", f"{version} is older than 2.10", "pip install 'torch>=2.10'")
        return
    if release[:2] > NEWEST:
        yield Finding("torch", "note", f"{version} is newer than 2.15, the newest that the packages are tested with")
    else:
        yield Finding("torch", "works", version)
    if release[:2] < (2, 13) and sys.version_info[:3] == (3, 11, 7):
        crash = f"torch {text} crashes in every torch.compile under Python 3.11.7"
        yield Finding("torch.compile", "fails", crash, "Python 3.12, or torch 2.13")
    if release[:2] < (2, 12):
        threads = f"torch {text} fails in several threads that compile at once"
        yield Finding("threads", "note", threads, "compile in one thread, or torch 2.12")
        without = f"pointwise operators after your Triton kernels are kernels of their own with torch {text}"
        yield Finding("epilogues", "note", without, "torch 2.12 fuses them")


def _triton() -> Iterator[Finding]:
    named = [found[1] for text in metadata.requires("torch") or () if (found := re.match(r"triton==([\d.]+)", text))]
    major, minor, *_ = _release()
    wanted = named[0] if named else TRITONS.get((major, minor), "")
    way_out = f"pip install triton=={wanted}" if wanted else "pip install triton"
    try:
        version = str(importlib.import_module("triton").__version__)
    except ImportError as error:
        yield Finding("Triton", "fails", _line(error), way_out)
        return
    if wanted and _numbers(version)[:2] != _numbers(wanted)[:2]:
        yield Finding("Triton", "fails", f"{version}, and this torch is built for {wanted}", way_out)
    else:
        yield Finding("Triton", "works", version)


def _card() -> Iterator[Finding]:
    import torch

    driver = DRIVER.read_text().partition("\n")[0] if DRIVER.is_file() else ""
    number = re.search(r"\d+\.\d+(\.\d+)?", driver)
    shown = f"driver {number[0]}" if number else ""
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    if not (torch.version.cuda or torch.version.hip):
        if shown:
            way_out = "install the build of torch for the CUDA of that driver, to use the card"
            yield Finding("card", "note", f"{shown}, and torch is a build for the CPU alone", way_out)
        else:
            yield Finding("card", "works", "none, and torch is a build for the CPU alone")
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        said = "; ".join(str(one.message).partition("\n")[0] for one in caught)
        if shown:
            way_out = f"a newer driver, or the torch of its CUDA; this one is built for {built}"
            yield Finding("card", "fails", f"{shown}, and torch finds no card{': ' if said else ''}{said}", way_out)
        else:
            yield Finding("card", "works", f"none, and torch is built for {built}: code is for the CPU")
        return
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        text = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, {built}" + f", {shown}" * bool(shown)
        if torch.version.cuda and (card.major, card.minor) < CAPABILITY:
            old = f"{text}: compute capability {card.major}.{card.minor}, and Triton needs 7.0"
            yield Finding(f"card {index}", "fails", old, "CUDA_VISIBLE_DEVICES without it")
        else:
            yield Finding(f"card {index}", "works", text)


def _compiler() -> Iterator[Finding]:
    from ._torch_compat.compiling import cpp_compiler

    asked = f"CXX={os.environ['CXX']}" if "CXX" in os.environ else "g++"
    try:
        found = cpp_compiler()
    except OSError as error:  # Inductor looks for it under a lock in its cache
        yield Finding("C++ compiler", "fails", f"not looked for: {_line(error)}", "first Inductor's cache")
        return
    except RuntimeError:
        found = ""
    try:
        said = subprocess.check_output([found, "--version"], text=True, timeout=60)  # noqa: S603 - as Inductor calls it
    except (OSError, subprocess.SubprocessError):
        found = f"{asked} does not run, so there is no code for a CPU"
        yield Finding("C++ compiler", "fails", found, _CHECKS["C++ compiler"][1])
        return
    yield Finding("C++ compiler", "works", f"{found}: {said.partition(chr(10))[0]}")


def _folders() -> Iterator[Finding]:
    from ._torch_compat.compiling import inductor_cache

    triton = Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton", "cache")
    yield _folder("Inductor's cache", inductor_cache(), "TORCHINDUCTOR_CACHE_DIR")
    yield _folder("Triton's cache", os.environ.get("TRITON_CACHE_DIR") or triton, "TRITON_CACHE_DIR")
    if kept := os.environ.get("MAGI_COMPILE_REPORT"):
        yield _folder("reports", kept, "MAGI_COMPILE_REPORT")


def _folder(what: str, place: str | Path, variable: str) -> Finding:
    """Whether files can be written to *place*, or to the nearest folder above it if it is not there yet."""
    folder = next(path for path in (Path(place).absolute(), *Path(place).absolute().parents) if path.exists())
    way_out = f"{variable}=/a/folder/of/yours"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except OSError as error:
        return Finding(what, "fails", f"{place} cannot be written to: {error.strerror}", way_out)
    free = shutil.disk_usage(folder).free
    if free < ROOM:
        return Finding(what, "note", f"{place} has {free / 2**20:.0f} MiB left", way_out)
    return Finding(what, "works", str(place))


def _settings() -> Iterator[Finding]:
    from ._settings import CompileConfig, unread_variables
    from .errors import ConfigError

    unread = unread_variables()
    for variable, near in unread.items():
        way_out = f"did you mean {near}?" if near else "unset it, or ignore this if another program reads it"
        yield Finding("settings", "fails" if near else "note", f"{variable} is not read", way_out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = CompileConfig()
        except ConfigError as error:
            yield Finding("settings", "fails", str(error), "correct it, or unset it")
            return
    given = [name for name, _ in config.items() if config.origin(name) != "default"]
    if given or not unread:
        yield Finding("settings", "works", f"from the environment: {', '.join(given) or 'none'}")


PROGRAM = """
import sys, torch
x = torch.arange(8.0, device=sys.argv[1])
compiled = torch.compile(lambda x: (x.sin() + 1).cumsum(0), backend="magi")
torch.testing.assert_close(compiled(x), (x.sin() + 1).cumsum(0))
"""


def _compiles() -> Iterator[Finding]:
    import torch

    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        yield _compiled(f"on {device}", device)


def _compiled(what: str, device: str) -> Finding:
    """Whether a function compiles and computes the right result, without caches and settings of the environment."""
    own = {"MAGI_COMPILE_STRICT": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment = {key: text for key, text in os.environ.items() if not key.upper().startswith("MAGI_COMPILE_")} | own
    command = [sys.executable, "-c", PROGRAM, device]
    way_out = _CHECKS["torch.compile"][1]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return Finding(what, "fails", f"torch.compile took more than {SECONDS} s", way_out)
    if done.returncode == 0:
        return Finding(what, "works", 'torch.compile(backend="magi") compiles, and the result is that of eager')
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    errors = re.findall(r"^[\w.]*(?:Error|Exception|Failed|Failure)\b.*$", done.stderr, re.MULTILINE)
    return Finding(what, "fails", ": ".join((f"torch.compile ends with {ended}", *errors[:1])), way_out)


_CHECKS: dict[str, tuple[Callable[[], Iterator[Finding]], str]] = {
    "Python": (_python, "install Python again"),
    "packages": (_packages, "install all four from one checkout: see the quick start"),
    "torch": (_torch, "pip install torch"),
    "Triton": (_triton, "install the Triton that torch names"),
    "card": (_card, "CUDA_VISIBLE_DEVICES= leaves the card out"),
    "C++ compiler": (_compiler, "apt-get install g++, or CXX=/path/of/a/compiler"),
    "folders": (_folders, "set TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR to folders of yours"),
    "settings": (_settings, "unset the variables MAGI_COMPILE_*"),
    "torch.compile": (
        _compiles,
        'first what fails above; if the same fails with backend="inductor", it is torch, otherwise please report it',
    ),
}
"""What is looked at in order, and the way out where looking itself fails."""
