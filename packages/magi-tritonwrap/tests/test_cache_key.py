# SPDX-License-Identifier: Apache-2.0
"""Edits between two processes: each one that can change the graph misses the compile cache, and no edit hits it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


KERNELS = """
import triton
import triton.language as tl

SCALE = tl.constexpr(2)

@triton.jit
def device_function(value):
    return value * 3

@triton.jit
def plain(x, out, n, BLOCK: tl.constexpr = 64):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, device_function(tl.load(x + at, at < n)) * SCALE, at < n)

@triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_warps=4), triton.Config({"BLOCK": 128})], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned(x, out, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n), at < n)
"""

HELPERS = """
from . import kernels

OFFSET = 1
TABLE = {"kernel": kernels.plain}

def launch(x, out):
    TABLE["kernel"][(1,)](x, out, x.numel())
    kernels.tuned[(1,)](x, out, x.numel())

WORDS = {"red", "green", "blue", "yellow"}

def shift(x, by=2):
    assert "red" in WORDS and x.ndim in {1, 2, 3} and "a" in {"a", "b", "c", "d"}
    return x + by + OFFSET

def make_shifter(amount):
    def shifter(x):
        return x + amount
    return shifter
"""

SETTINGS = """
import dataclasses, enum

class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"

@dataclasses.dataclass
class Settings:
    mode: Mode = Mode.FAST
    scale: float = 1.5

    def apply(self, x):
        return x * self.scale if self.mode is Mode.FAST else x / self.scale

settings = Settings()
"""

OP_MODULE = """
import torch
from magi_tritonwrap import triton_op

from . import helpers
from .settings import settings

FACTOR = 2
shifter = helpers.make_shifter(5)

def body(x: torch.Tensor) -> torch.Tensor:
    if x.device.type == "cpu":
        return settings.apply(shifter(helpers.shift(x * FACTOR)))
    out = torch.empty_like(x)
    helpers.launch(x, out)
    return out

eager = body
op = triton_op("cached_package::op", body, mutates_args=())
"""

FILES = {
    "__init__.py": "",
    "kernels.py": KERNELS,
    "helpers.py": HELPERS,
    "settings.py": SETTINGS,
    "op_module.py": OP_MODULE,
}

# name -> (file, text, what it becomes)
EDITS = {
    "kernel behind a helper": ("kernels.py", "tl.load(x + at, at < n)) * SCALE", "tl.load(x + at, at < n)) + SCALE"),
    "function that a kernel calls": ("kernels.py", "return value * 3", "return value * 4"),
    "constexpr that a kernel reads": ("kernels.py", "SCALE = tl.constexpr(2)", "SCALE = tl.constexpr(4)"),
    "default of a kernel parameter": ("kernels.py", "BLOCK: tl.constexpr = 64", "BLOCK: tl.constexpr = 32"),
    "block size of an autotune config": ("kernels.py", '{"BLOCK": 128}', '{"BLOCK": 256}'),
    "warps of an autotune config": ("kernels.py", "num_warps=4", "num_warps=8"),
    "autotune key": ("kernels.py", 'key=["n"]', "key=[]"),
    "heuristic": ("kernels.py", '== 0}', '== 1}'),
    "body of the op": ("op_module.py", "x * FACTOR", "x / FACTOR"),
    "constant that the body reads": ("op_module.py", "FACTOR = 2", "FACTOR = 3"),
    "value in a closure": ("op_module.py", "make_shifter(5)", "make_shifter(6)"),
    "helper that the body calls": ("helpers.py", "return x + by + OFFSET", "return x - by + OFFSET"),
    "constant that a helper reads": ("helpers.py", "OFFSET = 1", "OFFSET = 2"),
    "default of a helper": ("helpers.py", "by=2", "by=3"),
    "kernel in a table": ("helpers.py", '{"kernel": kernels.plain}', '{"kernel": kernels.tuned}'),
    "field of an object": ("settings.py", "scale: float = 1.5", "scale: float = 2.5"),
    "enum member of an object": ("settings.py", "Mode = Mode.FAST", "Mode = Mode.EXACT"),
    "method of an object": ("settings.py", "x * self.scale if", "x - self.scale if"),
}  # fmt: skip

HARMLESS = {
    "comment in the body": ("op_module.py", "    out = torch", "    # out\n    out = torch"),
    "constant that nobody reads": ("helpers.py", "OFFSET = 1\n", "OFFSET = 1\nOTHER = 7\n"),
}  # fmt: skip

UNSTABLE = (
    ("op_module.py", "FACTOR = 2", "import socket\nFACTOR = 2\nsock = socket.socket()"),
    ("op_module.py", "    if x.device.type", "    sock.family\n    if x.device.type"),
)


def edited(*edits: tuple[str, str, str]) -> dict[str, str]:
    files = dict(FILES)
    for file, old, new in edits:
        assert files[file].count(old) >= 1, old
        files[file] = files[file].replace(old, new)
    return files


Answers = dict[str, dict[str, Any]]
Steps = list[dict[str, Any]]


def all_steps() -> Steps:
    """Every step differs from the unedited package by one edit."""
    steps: Steps = [{"name": "first", "files": FILES}, {"name": "unedited", "files": FILES}]
    steps += [{"name": name, "files": edited(edit)} for name, edit in {**EDITS, **HARMLESS}.items()]
    return [*steps, {"name": "unstable", "files": edited(*UNSTABLE)}, {"name": "unedited again", "files": FILES}]


def run_steps(mode: str, folder: Path, steps: Steps, hash_seed: str = "0") -> Answers:
    """What each step answered, each in a process of its own."""
    (folder / "cached_package").mkdir()
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": hash_seed,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    program = [sys.executable, str(Path(__file__).with_name("cache_runs.py")), mode, str(folder)]
    done = subprocess.run(
        program, input=json.dumps(steps), capture_output=True, text=True, check=True, env=environment, timeout=500
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(steps), done.stderr
    return {answer["name"]: answer for answer in found}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return run_steps("key", tmp_path_factory.mktemp("keys"), all_steps())


@pytest.mark.parametrize("name", ["unedited", "unedited again", *HARMLESS])
def test_same_key_without_an_edit_that_counts(keys: Answers, name: str) -> None:
    assert keys[name]["key"] == keys["first"]["key"]
    assert keys[name]["cache"] == "keyed"


def test_same_key_under_another_hash_seed(keys: Answers, tmp_path: Path) -> None:
    """Sets of strings are in another order there."""
    (answer,) = run_steps("key", tmp_path, [{"name": "first", "files": FILES}], hash_seed="12345").values()
    assert answer["key"] == keys["first"]["key"]


@pytest.mark.parametrize("name", EDITS)
def test_another_key_after_an_edit(keys: Answers, name: str) -> None:
    others = [answer["key"] for other, answer in keys.items() if other in EDITS and other != name]
    assert keys[name]["key"] not in [keys["first"]["key"], *others]


def test_no_key_for_a_value_without_a_stable_form(keys: Answers) -> None:
    path = "global 'sock' read by cached_package.op_module.body is a "
    assert keys["unstable"]["cache"].startswith(f"bypassed: {path}")
    assert path in keys["unstable"]["key"][0]


@pytest.mark.slow
def test_a_compilation_asks_for_the_key(tmp_path: Path) -> None:
    steps = all_steps()
    answers = run_steps("compile", tmp_path, steps)
    assert all(answer["right"] for answer in answers.values())
    found = {name: (answer["hit"], answer["miss"], answer["bypass"]) for name, answer in answers.items()}
    hits = dict.fromkeys(("unedited", "unedited again", *HARMLESS), (1, 0, 0))
    assert found == {step["name"]: (0, 1, 0) for step in steps} | hits | {"unstable": (0, 0, 1)}
