# SPDX-License-Identifier: Apache-2.0
"""The uuid of each shipped pass changes with every function that runs when the pass is asked and run.

What runs is found by watching, which knows nothing of how uuids are made. How a pass is run, which is the same for
every pass, decides nothing of what it does to a graph.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
import torch
from _models import VideoBlock
from _python import python
from magi_passes import MagiInductorPass, PassContext, PassPipeline
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx


ROOT = Path(__file__).parent.parent
SOURCES = {folder.name: folder for folder in ROOT.glob("packages/*/src/*") if folder.is_dir()}


@pytest.fixture(scope="module")
def shipped() -> dict[str, Any]:
    """Every pass of the packages, by its name."""
    importlib.import_module("magi_backend._passes")
    todo: list[Any] = [MagiInductorPass]
    found = {}
    while todo:
        todo += (cls := todo.pop()).__subclasses__()
        is_ours = cls.__module__.startswith(("magi_passes", "magi_backend"))
        if is_ours and not (cls.__abstractmethods__ or cls.__name__.startswith("_")):
            found[cls.__name__] = cls
    return found


def uuids(shipped: dict[str, Any]) -> dict[str, str]:
    return {name: cls().uuid() for name, cls in shipped.items()}


def run_by_passes(shipped: dict[str, Any]) -> dict[CodeType, set[str]]:
    """The code of ours that runs when passes are asked about and run on a graph of convolutions -> those passes."""
    found: dict[CodeType, set[str]] = {}
    folders = tuple(f"{SOURCES[name]}/" for name in ("magi_passes", "magi_backend"))
    before = config.save_config()
    for name, cls in shipped.items():
        made = cls(always=True) if "always" in cls.__dataclass_fields__ else cls()
        traced = make_fx(VideoBlock(), select_decomp_table(), tracing_mode="symbolic", _allow_non_fake_inputs=True)
        graph = traced(torch.ones(1, 8, 3, 8, 8)).graph

        def note(frame: FrameType, event: str, arg: object, name: str = name) -> None:
            code = frame.f_code
            is_ours = code.co_filename.startswith(folders) and "/_framework/" not in code.co_filename
            if event == "call" and is_ours and not code.co_name.startswith("<"):
                found.setdefault(code, set()).add(name)

        with PassPipeline([]).scope():
            sys.setprofile(note)
            try:
                made.is_applicable(graph, PassContext())
                made(graph)
            finally:
                sys.setprofile(None)
    config.load_config(before)
    # The repairs are found by the modules of their folder, and the pass that stands for them calls none.
    for defect in importlib.import_module("magi_backend._repairs._defect").known_defects():
        found |= {inspect.unwrap(repair).__code__: {"ActiveRepairs"} for repair in defect.replaces.values()}
    return found


def edited(whole: CodeType, part: CodeType) -> CodeType:
    """*whole* with one more constant in *part*, which is *whole* or nested in it."""
    consts = tuple(edited(each, part) if isinstance(each, CodeType) else each for each in whole.co_consts)
    return whole.replace(co_consts=(*consts, "edited for a test") if whole == part else consts)


def with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from with_nested(each)


def test_an_edit_of_every_function(shipped: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_by_passes(shipped)
    names = {code.co_name for code in run}
    assert {"_rewrite", "_normalised", "_movable", "_move", "read_convolution", "flops"} <= names
    assert len(run) > 100
    owners: dict[CodeType, list[FunctionType]] = {}
    gc.unfreeze()  # conftest.py hides from it what was imported
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__module__ and function.__module__.startswith("magi_"):
            for code in with_nested(function.__code__):
                owners.setdefault(code, []).append(function)
    first = uuids(shipped)
    missed = []
    for code, passes in run.items():
        with monkeypatch.context() as patch:
            for owner in owners[code]:
                patch.setattr(owner, "__code__", edited(owner.__code__, code))
            missed += [f"{name}: {code}" for name in sorted(passes) if shipped[name]().uuid() == first[name]]
    assert missed == []
    assert uuids(shipped) == first
    html = importlib.import_module("magi_backend._report.html")
    elsewhere = next(value for value in vars(html).values() if type(value) is FunctionType)
    monkeypatch.setattr(elsewhere, "__code__", edited(elsewhere.__code__, elsewhere.__code__))
    assert uuids(shipped) == first


def test_another_process_gets_the_same_uuids(shipped: dict[str, Any], tmp_path: Path) -> None:
    """With another hash seed, from another folder, and with a remark in each file."""
    for name, source in SOURCES.items():
        shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in tmp_path.glob("magi_passes/**/*.py"):
        file.write_text("# a remark\n\n" + file.read_text())
    wanted = {name: cls.__module__ for name, cls in shipped.items()}
    assert len(wanted) > 9
    program = f"""
import importlib, sys
sys.path.insert(0, {str(tmp_path)!r})
print(*(getattr(importlib.import_module(module), name)().uuid() for name, module in {wanted}.items()))
assert importlib.import_module("magi_passes").__file__.startswith({str(tmp_path)!r})
"""
    assert python("-c", program, env={"PYTHONHASHSEED": "12345"}).split() == list(uuids(shipped).values())
