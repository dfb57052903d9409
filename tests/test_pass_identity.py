# SPDX-License-Identifier: Apache-2.0
"""The uuid of each shipped pass changes with every function that runs when the pass is asked and run.

What runs is found by watching, which knows nothing of how uuids are made. How a pass is run, which is the same for
every pass, decides nothing of what it does to a graph.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType


ROOT = Path(__file__).parent.parent
PACKAGES = {name.replace("-", "_"): ROOT / "packages" / name / "src" for name in ("magi-passes", "magi-backend")}
OTHERS = {name.replace("-", "_"): ROOT / "packages" / name / "src" for name in ("magi-opschema", "magi-tritonwrap")}


class Place(NamedTuple):
    """A function: its file, its name, and the line where it begins, with its decorators."""

    file: Path
    name: str
    line: int


@functools.cache
def _shipped() -> dict[str, Any]:
    """Every pass of the two packages, by its name."""
    from magi_passes import MagiInductorPass

    for name in ("magi_passes", "magi_backend._passes"):
        importlib.import_module(name)
    todo, found = [MagiInductorPass], {}
    while todo:
        todo += (cls := todo.pop()).__subclasses__()
        if cls.__module__.startswith(tuple(PACKAGES)) and not cls.__abstractmethods__:
            found[cls.__name__] = cls
    return found


def _executed(run: Callable[[], object]) -> set[Place]:
    """The functions of the two packages that *run* runs."""
    found = set()
    folders = tuple(f"{folder}/" for folder in PACKAGES.values())

    def note(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(folders) and "/_framework/" not in code.co_filename
        if event == "call" and is_ours and not code.co_name.startswith("<"):
            found.add(Place(Path(code.co_filename), code.co_name, code.co_firstlineno))

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


@functools.cache
def _places() -> dict[Place, list[str]]:
    """The functions that run when passes are asked about and run on a graph of convolutions -> those passes."""
    from magi_passes import PassContext, PassPipeline

    places: dict[Place, list[str]] = {}
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
            for place in _executed(run):
                places.setdefault(place, []).append(name)
    config.load_config(before)
    # The repairs are found by the modules of their folder, and the pass that stands for them calls none.
    for defect in importlib.import_module("magi_backend._repairs._defect").known_defects():
        for repair in defect.replaces.values():
            code = inspect.unwrap(repair).__code__
            places[Place(Path(code.co_filename), code.co_name, code.co_firstlineno)] = ["ActiveRepairs"]
    return dict(sorted(places.items()))


def _first_line(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(one.lineno for one in node.decorator_list)])


def _edit(place: Place, passes: list[str]) -> dict[str, Any]:
    """One more statement at the start of the function at *place*, for passes of the same package."""
    lines = place.file.read_text().splitlines()
    functions = (node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.FunctionDef))
    node = next(node for node in functions if node.name == place.name and _first_line(node) == place.line)
    first = node.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    at = first.end_lineno if is_text else first.lineno - 1
    assert at is not None
    statement = textwrap.indent("edited_for_a_test = 1", " " * first.col_offset)
    package = next(folder for folder in PACKAGES.values() if place.file.is_relative_to(folder))
    ours = [name for name in passes if _shipped()[name].__module__.startswith(package.parent.name.replace("-", "_"))]
    file = str(place.file.relative_to(package))
    return {"file": file, "text": "\n".join([*lines[:at], statement, *lines[at:], ""]), "passes": _named(ours)}


def _named(passes: Iterable[str]) -> list[str]:
    return [f"{_shipped()[name].__module__}:{name}" for name in passes]


def _uuids(folder: Path, edits: list[dict[str, Any]], hash_seed: str = "0") -> list[dict[str, str]]:
    for name, source in {**PACKAGES, **OTHERS}.items():
        if not (folder / name).exists():
            shutil.copytree(source / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    program = [sys.executable, str(Path(__file__).with_name("_uuid_runs.py")), str(folder)]
    done = subprocess.run(
        program, input=json.dumps(edits), capture_output=True, text=True, check=True, env=environment, timeout=590
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(edits), done.stderr
    return found


def _missed(folder: Path, places: list[Place]) -> list[str]:
    """The functions of which an edit leaves the uuid of a pass of the same package as it was."""
    edits = [_edit(place, _places()[place]) for place in places]
    nothing = {"file": "", "text": "", "passes": _named(_shipped())}
    first, *answers, last = _uuids(folder, [nothing, *edits, nothing])
    assert first == last
    return [
        f"{name}: {place}"
        for place, answer in zip(places, answers, strict=True)
        for name, uuid in answer.items()
        if first[name] == uuid
    ]


def test_watching_finds_the_functions_that_rewrite() -> None:
    found = {place.name for place in _places()}
    assert {"_rewrite", "_normalised", "_movable", "_move", "read_convolution", "flops"} <= found
    assert len(found) > 100


def test_an_edit_of_a_sample_of_functions(tmp_path: Path) -> None:
    places = list(_places())
    assert _missed(tmp_path, places[7 :: len(places) // 3][:3]) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_an_edit_of_every_function(tmp_path: Path, part: int) -> None:
    assert _missed(tmp_path, list(_places())[part::4]) == []


def test_no_edit_no_other_uuid(tmp_path: Path) -> None:
    """Neither another process, nor another hash seed, nor an edit elsewhere, nor a remark."""
    passes = _named(_shipped())
    assert len(passes) > 9
    page, module = "magi_backend/_report/html.py", "magi_passes/_rewrites/code_generation.py"
    nothing = {"file": "", "text": "", "passes": passes}
    text = (PACKAGES["magi_backend"] / page).read_text() + "\n\nOTHER = 1\n"
    elsewhere = {**nothing, "file": page, "text": text}
    remark = {**nothing, "file": module, "text": "# a remark\n\n" + (PACKAGES["magi_passes"] / module).read_text()}
    found = [*_uuids(tmp_path, [nothing, elsewhere, remark]), *_uuids(tmp_path, [nothing], hash_seed="12345")]
    assert found == [found[0]] * 4
