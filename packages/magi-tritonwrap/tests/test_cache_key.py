# SPDX-License-Identifier: Apache-2.0
"""Edits between two processes: each one that can change the graph misses the compile cache, and no edit hits it.

What else the code of a body reaches is in `test_identity.py` of magi-passes, which has the same walk.

This file is also a program, `python test_cache_key.py (key|compile) FOLDER`: `key` prints what torch puts into the key
of a graph with the op in the folder, `compile` compiles that graph and prints what AOTAutograd's cache answered. Both
want the steps as JSON on stdin. torch is imported once; every step has a process of its own, which imports the edited
files afresh.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from magi_tritonwrap import see_through_report
from torch._dynamo.utils import counters


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

TABLE = {"kernel": kernels.plain}
WORDS = {"red", "green", "blue", "yellow"}

def launch(x, out):
    TABLE["kernel"][(1,)](x, out, x.numel())
    kernels.tuned[(1,)](x, out, x.numel())

def shift(x, by=2):
    assert "red" in WORDS and x.ndim in {1, 2, 3} and "a" in {"a", "b", "c", "d"}
    return x + by
"""

OP_MODULE = """
import torch
from magi_tritonwrap import triton_op

from . import helpers

FACTOR = 2

def body(x: torch.Tensor) -> torch.Tensor:
    if x.device.type == "cpu":
        return helpers.shift(x * FACTOR)
    out = torch.empty_like(x)
    helpers.launch(x, out)
    return out

eager = body
op = triton_op("cached_package::op", body, mutates_args=())
"""

FILES = {"__init__.py": "", "kernels.py": KERNELS, "helpers.py": HELPERS, "op_module.py": OP_MODULE}

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
    "helper that the body calls": ("helpers.py", "return x + by", "return x - by"),
    "kernel in a table": ("helpers.py", '{"kernel": kernels.plain}', '{"kernel": kernels.tuned}'),
}  # fmt: skip

HARMLESS = {
    "comment in the body": ("op_module.py", "    out = torch", "    # out\n    out = torch"),
    "constant that nobody reads": ("op_module.py", "FACTOR = 2\n", "FACTOR = 2\nOTHER = 7\n"),
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
    program = [sys.executable, __file__, mode, str(folder)]
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


def key_once(folder: Path) -> dict[str, Any]:
    """What torch asks of the op of the package in *folder* for a cache key."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails, BypassAOTAutogradCache

    sys.path.insert(0, str(folder))
    from cached_package import op_module  # type: ignore[import-not-found]

    graph = torch.fx.symbolic_trace(lambda x: op_module.op._opoverload(x) + 1)
    details = AOTAutogradCacheDetails.__new__(AOTAutogradCacheDetails)
    try:
        key = details.get_triton_source_codes_from_gm(graph)
    except BypassAOTAutogradCache as bypass:
        key = [f"bypass: {bypass}"]
    return {"key": key, "cache": see_through_report(op_module.op).cache}


def compile_once(folder: Path) -> dict[str, Any]:
    """What the cache did while the op was compiled with Inductor on a CPU."""
    sys.path.insert(0, str(folder))
    from cached_package import op_module

    x = torch.arange(8.0)
    result = torch.compile(lambda value: op_module.op(value) + 1, fullgraph=True)(x)
    found = {word: counters["aot_autograd"][f"autograd_cache_{word}"] for word in ("hit", "miss", "bypass")}
    return {**found, "right": bool(torch.equal(result, op_module.eager(x) + 1))}


def main(mode: str, folder: Path) -> None:
    for step in json.load(sys.stdin):
        for path, text in step["files"].items():
            (folder / "cached_package" / path).write_text(text)
        with get_context("fork").Pool(1) as pool:
            answer = pool.apply({"key": key_once, "compile": compile_once}[mode], (folder,))
        sys.stdout.write(json.dumps({"name": step["name"], **answer}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
