# SPDX-License-Identifier: Apache-2.0
"""The record of a whole run: a file for each compilation, written as it happens, and read by the command line."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from magi_backend import Compilation, ConfigError, GraphRecord, OpUse, PassOutcome, SizesOutcome, SizeUse
from magi_backend.__main__ import main
from magi_backend._records import folder as folders
from magi_backend._records.folder import Entry, EntryFile, Process, entries
from magi_backend._records.plain import from_plain, to_plain
from magi_backend._records.records import CacheUse, CheckOutcome, ConfigChange, GuardOutcome


EVERYTHING = Compilation(
    index=3,
    label="decode",
    nodes=7,
    inputs=("float32[1, s0]",),
    ops=(OpUse("a::b", "flattened", 2, "signature …", True, False, ("kernel",), ("cfg.eps",)),),
    graphs=(
        GraphRecord(
            kind="forward",
            nodes=9,
            symbols=("s0",),
            passes=(PassOutcome("Tiling", True, "because", (ConfigChange("max_tiles", "None", "3"),), 0.25),),
            guards=(GuardOutcome("order", "wrong result", "lost writes", "keeps them", 1),),
            kernels=("cpp_fused_0",),
            externs=("mm",),
            seconds=1.5,
        ),
    ),
    checks=(CheckOutcome("piece 0", 4, float("inf"), False),),
    pieces=("piece 0",),
    settings=(("check", "True", "options"),),
    cache=CacheUse(1, 2, 3),
    sizes=SizesOutcome((("s0", "x.size()[1]"),), (SizeUse((("s0", 8),), 3, 1, True, 0.5, "asked for"),), 3, 1),
    seconds=2.5,
)


def test_a_record_comes_back_from_json_as_it_was() -> None:
    entry = Entry(Process(1, "0", "serve.py", "2.13.0"), 5.0, True, EVERYTHING)

    assert from_plain(Entry, json.loads(json.dumps(to_plain(entry)))) == entry


def test_each_compilation_has_a_file_that_nobody_else_may_read(
    tmp_path: Path, set_env: Callable[[str, str], None]
) -> None:
    kept = tmp_path / "run" / "report"
    set_env("REPORT", str(kept))

    x = torch.full((3, 4), 12345.678, requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend="magi")(x).backward()
    torch.compile(lambda x: x.cos() + 1, backend="magi", dynamic=True)(x)

    first, second = entries(kept)
    assert [graph.kind for graph in first.compilation.graphs] == ["forward", "backward"]
    assert first.finished
    assert len(second.compilation.graphs[0].symbols) == 2
    assert (first.process.pid, first.process.torch) == (os.getpid(), torch.__version__)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert not any("12345" in path.read_text() for path in kept.iterdir())
    assert all(path.suffix == ".json" for path in kept.iterdir())


def test_the_folder_may_be_an_option(tmp_path: Path) -> None:
    torch.compile(torch.sin, backend="magi", options={"magi.report": str(tmp_path)})(torch.ones(3))

    (entry,) = entries(tmp_path)
    assert ("report", repr(str(tmp_path)), "options") in entry.compilation.settings


CRASHING = """
import os
import sys
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

class Crash(CustomGraphPass):
    def __call__(self, graph):
        os._exit(9)
    def uuid(self):
        return None

torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
torch.compile(lambda x: x + 1, backend="magi", options={"post_grad_custom_pre_pass": Crash()})(torch.ones(3))
"""


def test_what_was_compiled_when_the_process_died_is_there(tmp_path: Path) -> None:
    environment = os.environ | {"MAGI_COMPILE_REPORT": str(tmp_path), "RANK": "3"}
    done = subprocess.run([sys.executable, "-c", CRASHING], env=environment, check=False, capture_output=True)
    assert done.returncode == 9

    (entry,) = entries(tmp_path)
    assert not entry.finished
    assert (entry.process.rank, entry.compilation.inputs) == ("3", ("float32[3]",))


def test_a_compilation_that_fails_is_there_with_its_error(tmp_path: Path) -> None:
    options: dict[str, Any] = {"magi.report": str(tmp_path), "magi.boundary_ops": ["no::such"]}
    with pytest.raises(Exception, match="no such operator"):
        torch.compile(torch.sin, backend="magi", options=options)(torch.ones(3))

    (entry,) = entries(tmp_path)
    assert entry.compilation.error.startswith("BoundaryOpError: ")


def test_a_full_folder_gets_no_more_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folders, "CAP", 2**20)
    (tmp_path / "earlier.json").write_text(" " * 2**20)
    with caplog.at_level(logging.WARNING, "magi_backend"):
        for _ in range(3):
            EntryFile(str(tmp_path)).write(EVERYTHING, finished=True)

    assert [path.name for path in tmp_path.iterdir()] == ["earlier.json"]
    assert caplog.messages == [f"{tmp_path} holds 1 MiB, so compilations are no longer written there."]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"magi.report = '.*file/report' cannot be a folder that only you can read"):
        EntryFile(str(tmp_path / "file" / "report"))


def test_a_disk_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = EntryFile(str(tmp_path))
    monkeypatch.setattr(Path, "write_text", fails)
    with caplog.at_level(logging.WARNING, "magi_backend"):
        file.write(EVERYTHING, finished=True)

    assert "cannot be written to, and this run goes on without: [Errno 28] No space left" in caplog.text


def test_the_command_line_prints_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    EntryFile(str(tmp_path)).write(EVERYTHING, finished=True)
    EntryFile(str(tmp_path)).write(EVERYTHING, finished=False)

    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "2 compilations by magi" in text
    assert text.count("Compilation 0: decode") == text.count("Compilation 1: decode") == 1
    assert "not finished" in text
    assert "cpp_fused_0" not in text

    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--html", str(page)]) == 0
    assert "cpp_fused_0" in page.read_text()


def test_the_command_line_says_how_to_get_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 1
    assert f"Run the program with MAGI_COMPILE_REPORT={tmp_path}/none; only what backend=" in capsys.readouterr().err
