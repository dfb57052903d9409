# SPDX-License-Identifier: Apache-2.0
"""The uuid of each shipped pass changes with every function that the pass can reach.

What a pass can reach is found by `_reach`, from syntax trees, and by watching passes run; neither knows how uuids are
made.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from _reach import Module, Place, edited, reachable, read_packages


if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType


ROOT = Path(__file__).parent.parent
PACKAGES = {name.replace("-", "_"): ROOT / "packages" / name / "src" for name in ("magi-passes", "magi-backend")}
OTHERS = {name.replace("-", "_"): ROOT / "packages" / name / "src" for name in ("magi-opschema", "magi-tritonwrap")}
# The compiler hands these to a pass; its code does not name them.
HANDED_OVER = (("magi_passes._framework.context", "PassContext"),)


@functools.cache
def _modules() -> dict[str, Module]:
    return read_packages(folder / name for name, folder in PACKAGES.items())


@functools.cache
def _shipped() -> dict[str, str]:
    """Every pass of the two packages -> its module."""
    return {
        statement.name: name
        for name, module in _modules().items()
        for statement in module.tree.body
        if isinstance(statement, ast.ClassDef)
        and any(ast.unparse(base) == "MagiInductorPass" for base in statement.bases)
    }


@functools.cache
def _reached() -> dict[str, set[Place]]:
    """Pass -> functions."""
    modules = _modules()
    reached = {name: reachable(modules, (module, name), *HANDED_OVER) for name, module in _shipped().items()}
    # The repairs are found by the modules of their folder, which no syntax tree shows.
    themes = [module for name, module in modules.items() if name.startswith("magi_backend._repairs.")]
    repairs = [(module.name, name) for module in themes for name in module.bound if name.isupper()]
    assert len(repairs) > 20
    reached["ActiveRepairs"] |= reachable(modules, *repairs)
    return reached


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
    modules, reached = _modules(), _reached()
    edits = [_edit(modules[place.module], place, _named(_passes_of(place, reached))) for place in places]
    nothing = {"file": "", "text": "", "passes": _named(reached)}
    first, *answers, last = _uuids(folder, [nothing, *edits, nothing])
    assert first == last
    return [
        f"{name}: {place.module}.{place.name}, line {place.line}"
        for place, answer in zip(places, answers, strict=True)
        for name, uuid in answer.items()
        if first[name] == uuid
    ]


def _edit(module: Module, place: Place, passes: list[str]) -> dict[str, Any]:
    package = module.name.partition(".")[0]
    file = module.file.relative_to(PACKAGES[package])
    return {"file": str(file), "text": edited(module, place), "passes": passes}


def _passes_of(place: Place, reached: dict[str, set[Place]]) -> list[str]:
    """The passes that reach the function at *place*, of its own package."""
    package = place.module.partition(".")[0]
    return [name for name, module in _shipped().items() if module.startswith(package) and place in reached[name]]


def _named(passes: Iterable[str]) -> list[str]:
    shipped = _shipped()
    return [f"{shipped[name]}:{name}" for name in passes]


def _places() -> list[Place]:
    reached = _reached()
    return sorted(place for place in set().union(*reached.values()) if _passes_of(place, reached))


def test_the_second_opinion_finds_the_functions_that_rewrite() -> None:
    reached = {name: {place.name for place in places} for name, places in _reached().items()}
    assert {"_rewrite", "_normalised", "_movable", "_move", "_real", "_remember", "release"} <= reached["ConvChooser"]
    assert {"torch_release", "is_convolution"} <= reached["NDTilingWorkaroundPass"]
    assert "_rewrite" not in reached["NDTilingWorkaroundPass"]
    assert len(reached["ConvChooser"]) > 150


def test_an_edit_of_a_sample_of_functions(tmp_path: Path) -> None:
    places = _places()
    assert _missed(tmp_path, places[7 :: len(places) // 3][:3]) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_an_edit_of_every_function(tmp_path: Path, part: int) -> None:
    places = _places()
    assert _missed(tmp_path, places[part::4]) == []


def test_no_edit_no_other_uuid(tmp_path: Path) -> None:
    """Neither another process, nor another hash seed, nor an edit elsewhere, nor a remark."""
    passes = _named(_shipped())
    assert len(passes) > 9
    page = PACKAGES["magi_backend"] / "magi_backend" / "_report" / "html.py"
    layout = PACKAGES["magi_passes"] / "magi_passes" / "_rewrites" / "layout.py"
    nothing = {"file": "", "text": "", "passes": passes}
    elsewhere = {**nothing, "file": "magi_backend/_report/html.py", "text": page.read_text() + "\n\nOTHER = 1\n"}
    remark = {**nothing, "file": "magi_passes/_rewrites/layout.py", "text": "# a remark\n\n" + layout.read_text()}
    found = [*_uuids(tmp_path, [nothing, elsewhere, remark]), *_uuids(tmp_path, [nothing], hash_seed="12345")]
    assert found == [found[0]] * 4


def _executed(run: Any) -> set[tuple[str, str, int]]:
    """The functions of the two packages that *run* runs."""
    found = set()
    folders = tuple(f"{folder}/" for folder in PACKAGES.values())

    def note(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folders) and not code.co_name.startswith("<"):
            found.add((frame.f_globals["__name__"], code.co_name, code.co_firstlineno))

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


def test_what_runs_is_what_the_second_opinion_says(tmp_path: Path) -> None:
    """Every pass, asked about and run on a graph of convolutions, runs no function that `_reach` does not know."""
    from magi_passes import PassContext, PassPipeline
    from torch._inductor import config
    from torch.fx.experimental.proxy_tensor import make_fx

    decoder = _Decoder()
    reached = _reached()
    count = 0
    before = config.save_config()
    for name, module in _shipped().items():
        made = getattr(importlib.import_module(module), name)()
        graph = make_fx(decoder, tracing_mode="symbolic", _allow_non_fake_inputs=True)(torch.ones(1, 4, 3, 8, 8))

        def run(made: Any = made, graph: Any = graph.graph) -> None:
            if made.is_applicable(graph, PassContext()):
                made(graph)

        with PassPipeline([]).scope():
            ran = _executed(run)
        known = {(place.module, place.name) for place in reached[name]}
        generated = {"__init__", "__eq__", "__hash__", "__repr__"}
        assert {(m, n) for m, n, _ in ran if n not in generated} <= known
        count += len(ran)
    config.load_config(before)
    assert count > 40
