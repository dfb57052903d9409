# SPDX-License-Identifier: Apache-2.0
"""The uuid of each shipped pass changes with every function that runs when the pass is asked and run.

What runs is found by watching, which knows nothing of how uuids are made. How a pass is run, which is the same for
every pass, decides nothing of what it does to a graph.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx


if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    import pytest


ROOT = Path(__file__).parent.parent
SOURCES = {folder.name: folder for folder in ROOT.glob("packages/*/src/*") if folder.is_dir()}


@functools.cache
def _shipped() -> dict[str, Any]:
    """Every pass of the packages, by its name."""
    from magi_passes import MagiInductorPass

    for name in ("magi_passes", "magi_backend._passes"):
        importlib.import_module(name)
    todo, found = [MagiInductorPass], {}
    while todo:
        todo += (cls := todo.pop()).__subclasses__()
        if cls.__module__.startswith(("magi_passes", "magi_backend")) and not cls.__abstractmethods__:
            found[cls.__name__] = cls
    return found


def _executed(run: Callable[[], object]) -> list[CodeType]:
    """The code of the functions of the two packages that *run* runs."""
    found = []
    folders = tuple(f"{SOURCES[name]}/" for name in ("magi_passes", "magi_backend"))

    def note(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(folders) and "/_framework/" not in code.co_filename
        if event == "call" and is_ours and not code.co_name.startswith("<"):
            found.append(code)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


class _Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = torch.nn.ModuleList(torch.nn.Conv3d(4, 4, 3) for _ in range(2))
        self.norm = torch.nn.GroupNorm(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution in self.convolutions:
            x = torch.nn.functional.silu(self.norm(convolution(torch.nn.functional.pad(x, (1, 1, 1, 1, 2, 0)))))
        return x


def _run_by_passes() -> dict[CodeType, set[str]]:
    """The code that runs when passes are asked about and run on a graph of convolutions -> those passes."""
    from magi_passes import PassContext, PassPipeline

    found: dict[CodeType, set[str]] = {}
    before = config.save_config()
    for name, cls in _shipped().items():
        made = cls(always=True) if "always" in cls.__dataclass_fields__ else cls()
        table = select_decomp_table()
        traced = make_fx(_Decoder(), table, tracing_mode="symbolic", _allow_non_fake_inputs=True)
        graph = traced(torch.ones(1, 4, 3, 8, 8)).graph

        def run(made: Any = made, graph: Any = graph) -> None:
            made.is_applicable(graph, PassContext())
            made(graph)

        with PassPipeline([]).scope():
            for code in _executed(run):
                found.setdefault(code, set()).add(name)
    config.load_config(before)
    # The repairs are found by the modules of their folder, and the pass that stands for them calls none.
    for defect in importlib.import_module("magi_backend._repairs._defect").known_defects():
        found |= {inspect.unwrap(repair).__code__: {"ActiveRepairs"} for repair in defect.replaces.values()}
    return found


def _edited(whole: CodeType, part: CodeType) -> CodeType:
    """*whole* with one more constant in *part*, which is *whole* or nested in it."""
    consts = tuple(_edited(each, part) if isinstance(each, CodeType) else each for each in whole.co_consts)
    return whole.replace(co_consts=(*consts, "edited for a test") if whole == part else consts)


def _with_nested(code: CodeType) -> list[CodeType]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return [code, *(each for one in inner for each in _with_nested(one))]


def test_an_edit_of_every_function(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run_by_passes()
    names = {code.co_name for code in run}
    assert {"_rewrite", "_normalised", "_movable", "_move", "read_convolution", "flops"} <= names
    assert len(run) > 100
    owners: dict[CodeType, list[FunctionType]] = {}
    gc.unfreeze()  # conftest.py hides from it what was imported
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__module__ and function.__module__.startswith("magi_"):
            for code in _with_nested(function.__code__):
                owners.setdefault(code, []).append(function)
    first = {name: cls().uuid() for name, cls in _shipped().items()}
    missed = []
    for code, passes in run.items():
        with monkeypatch.context() as patch:
            for owner in owners[code]:
                patch.setattr(owner, "__code__", _edited(owner.__code__, code))
            missed += [f"{name}: {code}" for name in sorted(passes) if _shipped()[name]().uuid() == first[name]]
    assert missed == []
    assert {name: cls().uuid() for name, cls in _shipped().items()} == first
    html = importlib.import_module("magi_backend._report.html")
    elsewhere = next(value for value in vars(html).values() if type(value) is FunctionType)
    monkeypatch.setattr(elsewhere, "__code__", _edited(elsewhere.__code__, elsewhere.__code__))
    assert {name: cls().uuid() for name, cls in _shipped().items()} == first


def test_another_process_gets_the_same_uuids(tmp_path: Path) -> None:
    """With another hash seed, from another folder, and with a remark in each file."""
    for name, source in SOURCES.items():
        shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in tmp_path.glob("magi_passes/**/*.py"):
        file.write_text("# a remark\n\n" + file.read_text())
    wanted = {name: cls.__module__ for name, cls in _shipped().items()}
    assert len(wanted) > 9
    program = f"""
import importlib, sys
sys.path.insert(0, {str(tmp_path)!r})
print(*(getattr(importlib.import_module(module), name)().uuid() for name, module in {wanted}.items()))
assert importlib.import_module("magi_passes").__file__.startswith({str(tmp_path)!r})
"""
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == [cls().uuid() for cls in _shipped().values()]
