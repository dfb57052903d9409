# SPDX-License-Identifier: Apache-2.0
"""The record of a whole run: a file for each compilation, written as it happens, and read by the command line."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from _python import python
from click.testing import CliRunner
from magi_backend import _torch_compat, explain
from magi_backend.__main__ import magi
from magi_backend._records import folder as folders
from magi_backend._records.folder import Entry, EntryFile, Process, entries, from_plain, to_plain
from magi_backend._report import sections
from magi_backend._report.run import RunReport, read_report
from magi_backend._report.sections import SLOW, advice_on, capture_line
from magi_backend._torch_compat.compiling import torch_release
from magi_backend.errors import ConfigError, ReportError
from magi_backend.records import (
    CacheUse,
    CheckOutcome,
    Compilation,
    ConfigChange,
    GraphRecord,
    OpUse,
    PassOutcome,
    Recompilation,
    RepairOutcome,
    SizesOutcome,
    SizeUse,
)
from magi_passes import MagiInductorPass, PassPipeline
from torch import nn


EVERYTHING = Compilation(
    index=3,
    label="decode",
    nodes=7,
    inputs=("float32[1, s0]",),
    ops=(OpUse("a::b", "flattened", 2, "signature …", True, False, True, ("cfg.eps",)),),
    graphs=(
        GraphRecord(
            kind="forward",
            nodes=9,
            symbols=("s0",),
            passes=(PassOutcome("Tiling", True, "because", (ConfigChange("max_tiles", "None", "3"),), 0.25),),
            repairs=(RepairOutcome("order", "wrong result", "lost writes", "keeps them", 1),),
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


def test_each_compilation_has_a_file_that_nobody_else_may_read(tmp_path: Path, set_env: Any) -> None:
    kept = tmp_path / "run" / "report"
    set_env("REPORT", str(kept))

    x = torch.ones(3, 4, requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend="magi")(x).backward()
    torch.compile(lambda x: x.cos() + 1, backend="magi", dynamic=True)(x)

    first, second = entries(kept)
    assert [graph.kind for graph in first.compilation.graphs] == ["forward", "backward"]
    assert first.finished
    assert len(second.compilation.graphs[0].symbols) == 2
    assert (first.process.pid, first.process.torch) == (os.getpid(), torch.__version__)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert {path.suffix for path in kept.rglob("*") if path.is_file()} == {".json", ".txt"}


CRASHING = """
import os
import torch

def crash(graph):
    os._exit(9)

torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
torch.compile(lambda x: x + 1, backend="magi", options={"post_grad_custom_pre_pass": crash})(torch.ones(3))
"""


def test_what_was_compiled_when_the_process_died_is_there(tmp_path: Path) -> None:
    environment = os.environ | {"MAGI_COMPILE_REPORT": str(tmp_path), "RANK": "3"}
    done = subprocess.run([sys.executable, "-c", CRASHING], env=environment, check=False, capture_output=True)
    assert done.returncode == 9

    (entry,) = entries(tmp_path)
    assert not entry.finished
    assert (entry.process.rank, entry.compilation.inputs) == ("3", ("float32[3]",))
    run = read_report(tmp_path)
    assert [process.others for process in run.processes] == [1]
    assert "1 graph was compiled by other backends, and is not shown." in run.to_text()
    assert "<lambda> was being compiled when the process ended." in run.to_text()
    assert "add: f32[3] = add(l_x_, 1)" in run.entries[0].compilation.captured


def test_a_compilation_that_fails_is_there_with_its_error(tmp_path: Path) -> None:
    options: dict[str, Any] = {"magi.report": str(tmp_path), "magi.boundary_ops": ["no::such"]}
    with pytest.raises(Exception, match="no such operator"):
        torch.compile(torch.sin, backend="magi", options=options)(torch.ones(3))

    (entry,) = entries(tmp_path)
    assert entry.compilation.error.startswith("BoundaryOpError: ")


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"magi.report = '.*file/report' cannot be a folder that only you can read"):
        EntryFile(str(tmp_path / "file" / "report"))


def test_a_disk_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = EntryFile(str(tmp_path))
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=OSError(28, "No space left on device")))
    with caplog.at_level(logging.WARNING, "magi_backend"):
        file.write(EVERYTHING, finished=True)

    assert "cannot be written to, and this run goes on without: [Errno 28] No space left" in caplog.text


def command(*arguments: object) -> str:
    """What ``magi report`` prints."""
    done = CliRunner().invoke(magi, ["report", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_the_command_line_prints_the_run(tmp_path: Path) -> None:
    EntryFile(str(tmp_path)).write(EVERYTHING, finished=True)
    EntryFile(str(tmp_path)).write(EVERYTHING, finished=False)

    text = command(tmp_path)
    assert "2 compilations with torch 2" in text
    assert text.count("Compilation 0: decode") == text.count("Compilation 1: decode") == 1
    assert "not finished" in text
    assert "cpp_fused_0" not in text

    page = tmp_path / "page.html"
    assert command(tmp_path, "--html", page) == f"{page}\n"
    assert command(tmp_path, "--html") == f"{tmp_path / 'report.html'}\n"
    assert "cpp_fused_0" in page.read_text()
    assert page.read_text() == (tmp_path / "report.html").read_text()
    assert len(read_report(tmp_path).entries) == 2


@pytest.mark.kernels
def test_graphs_and_code_are_kept_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"magi.report": str(tmp_path), "force_disable_caches": True}
    for _ in range(2):
        torch.compiler.reset()
        torch.compile(lambda x: x.sin() + 1, backend="magi", options=options)(torch.ones(3))

    first, second = (entry.compilation for entry in read_report(tmp_path).entries)
    (graph,) = first.graphs
    assert ".sin(l_x_)" in first.captured
    assert "aten.sin.default" in graph.given
    assert graph.kernels[0] in graph.code
    assert dict(graph.phases).keys() >= {"lowering", "code generation", "compiling kernels"}
    assert 0 < sum(seconds for _, seconds in graph.phases) <= graph.seconds
    assert 0 < first.report_seconds < first.seconds
    assert (second.captured, second.graphs[0].given) == (first.captured, graph.given)
    assert len([path for path in (tmp_path / "texts").iterdir() if path.read_text() == first.captured]) == 1


@dataclass(frozen=True)
class SinBecomesCos(MagiInductorPass):
    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.target = torch.ops.aten.cos.default


def tan_becomes_sin(graph: torch.fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.tan.default):
        node.target = torch.ops.aten.sin.default


def test_the_graph_before_and_after_each_pass_that_changed_it(tmp_path: Path) -> None:
    options: dict[str, Any] = PassPipeline([SinBecomesCos()]).inductor_options(
        {
            "force_disable_caches": True,
            "post_grad_custom_pre_pass": tan_becomes_sin,
            "post_grad_custom_post_pass": lambda graph: None,
        }
    )
    torch.compile(torch.tan, backend="magi", options=options | {"magi.report": str(tmp_path)})(torch.ones(3))

    (entry,) = read_report(tmp_path).entries
    (graph,) = entry.compilation.graphs
    first, second = graph.changed
    assert (first.name, second.name) == ("tan_becomes_sin", "SinBecomesCos")
    operators = ["aten.tan.default", "aten.sin.default", "aten.cos.default"]
    assert [
        next(o for o in operators if o in text) for text in (first.before, second.before, second.after)
    ] == operators
    assert first.after == second.before
    assert "aten.tan.default" in graph.given
    assert "aten.cos.default" in graph.lowered


def broken(x: torch.Tensor, by: float) -> torch.Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y * by


def test_recompilations_and_graph_breaks_are_told(tmp_path: Path) -> None:
    compiled = torch.compile(broken, backend="magi", options={"magi.report": str(tmp_path)})
    for size, by in ((3, 0.25), (5, 0.25), (5, 0.75)):
        compiled(torch.ones(size), by)
    run = read_report(tmp_path)
    first, *_ = (entry.compilation for entry in run.entries)
    line = broken.__code__.co_firstlineno + 2
    assert first.function == "broken"
    assert first.place == f"{__file__}:{line - 2}"
    assert first.compile_id.endswith("/0")
    assert 0 < first.capture_seconds + first.seconds <= first.frame_seconds
    assert first.stopped is not None
    assert (first.stopped.place, first.stopped.function) == (f"{__file__}:{line}", "broken")
    again = [entry.compilation.recompiled for entry in run.entries if entry.compilation.recompiled]
    assert again[0].guard == "tensor 'x' size mismatch at index 0. expected 3, actual 5"
    assert any(one.guard.startswith("by == …") for one in again)
    (process,) = run.processes
    assert [(found.at.place, found.times) for found in process.breaks] == [(f"{__file__}:{line}", 2)]
    text = run.to_text()
    assert "torch._dynamo.mark_dynamic(x, 0)" in " ".join(text.split())
    assert f"Graph break at {__file__}:{line}, in broken" in text.replace("\n ", " ")


COUNTED = """
import torch

compiled = torch.compile(
    lambda x: x + 1, backend="magi", dynamic=True, options={"magi.hot_sizes": 1, "magi.hot_after": 2}
)
for size in (3, 4, 4, 4, 4, 5):
    compiled(torch.ones(size))
"""


def test_sizes_are_counted_to_the_end_of_the_process(tmp_path: Path) -> None:
    python("-c", COUNTED, env={"MAGI_COMPILE_REPORT": str(tmp_path)})

    (entry,) = entries(tmp_path)
    assert entry.compilation.sizes is not None
    calls = {use.sizes[0][1]: (use.calls, use.has_code) for use in entry.compilation.sizes.uses}
    assert calls == {3: (1, False), 4: (4, True), 5: (1, False)}


def test_a_function_that_dynamo_leaves_to_python_is_told(tmp_path: Path) -> None:
    @torch.compile(backend="magi", options={"magi.report": str(tmp_path)}, dynamic=False)
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    with torch._dynamo.config.patch(recompile_limit=2):
        for size in (2, 3, 4, 5):
            fn(torch.ones(size))

    (given_up,) = read_report(tmp_path).given_up
    assert given_up.function.endswith(".fn")
    assert re.search("recompile.limit", given_up.reason)
    assert given_up.became == "runs in Python where no graph fits"
    assert given_up.times >= 1
    assert "mend those that are, and run again" in read_report(tmp_path).notes()[-1].advice


def breaks(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        torch._dynamo.graph_break()
    return x.sin()


def does_not_fit(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.ones(4, 4)


@pytest.mark.parametrize(
    ("fn", "fullgraph", "suppress", "became"),
    [
        (breaks, False, False, "runs in Python"),
        (breaks, True, True, "failed"),
        (does_not_fit, False, False, "failed"),
    ],
)
def test_what_became_of_a_function_that_dynamo_did_not_capture(
    fn: Any, fullgraph: bool, suppress: bool, became: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"magi.report": str(tmp_path)}
    torch.compile(torch.sin, backend="magi", options=options)(torch.ones(3))  # a report needs one compilation
    compiled: Any = torch.compile(fn, backend="magi", options=options, fullgraph=fullgraph)
    expected = pytest.raises(Exception) if became == "failed" else contextlib.nullcontext()  # noqa: PT011
    with torch._dynamo.config.patch(suppress_errors=suppress), expected:
        compiled(torch.ones(3))

    run = read_report(tmp_path)
    assert f" {became}: " in run.notes()[-1].text
    assert f"<td>{became}</td>" in run.to_html()


@pytest.mark.parametrize(
    ("guard", "advised"),
    [
        ("tensor 'x' size mismatch at index 2. expected 3, actual 5", "torch._dynamo.mark_dynamic(x, 2)"),
        ("tensor 'x' size mismatch at index 0. expected 3, actual 1", "Dimension 0 of x is 0 or 1 in some calls"),
        ("tensor 'x' size mismatch at index 0. expected 1, actual 3", "always has a graph of its own"),
        ("tensor 'x' size mismatch at index 0. expected 3, actual 17", "one graph serves all from 2 on"),
        ("tensor 'x' stride mismatch at index 1. expected 3, actual 5", "pass x.contiguous()"),
        ("tensor 'x' rank mismatch. expected 3, actual 2", "the same number of dimensions"),
        ("tensor 'x' requires_grad mismatch. expected requires_grad=1", "in some calls only"),
        ("2 <= x.size()[0]", "Dimension 0 of x is 0 or 1 in some calls"),
        ("2 <= x.size()[0] <= 8", "look for an if, an assert"),
        ("tensor 'x' dispatch key set mismatch. actual …ADInplaceOrView)", "made under torch.inference_mode"),
        ("tensor 'x' dispatch key set mismatch. actual …SparseCPU)", "x.to("),
        ("the global SCALE == …", "torch.tensor(SCALE), or an argument"),
        ("a value from before the graph break == …", "Mend the break"),
        ("flag is None", "flag is None in some calls and not in others"),
        ("flag == True", "flag is a bool"),
        ("___check_global_state()", "grad mode"),
        ("len(xs) == 3", "Dynamo unrolls it"),
        ("___check_type_id(x, 94)", "another type"),
        ("___check_obj_id(fn, 94)", "created again in each call"),
        ("self.layer == …", "allow_unspec_int_on_nn_module"),
        ("by == …", "torch.tensor(by)"),
        ("mode == 'train'", "Compile a function for each value"),
        ("BACKEND_MATCH failure", "two backends"),
        (
            "_has_dynamo_dim_marking is present on runtime tensor but was absent at compile time",
            "Mark the tensor before",
        ),
        ("something new", "TORCH_LOGS=recompiles_verbose"),
    ],
)
def test_advice_follows_from_the_guard(guard: str, advised: str) -> None:
    assert advised in advice_on(Recompilation("0/0", guard))


@pytest.mark.parametrize("marked_from", [0, 1])
def test_a_mark_that_causes_a_recompilation_is_named(marked_from: int, tmp_path: Path) -> None:
    compiled = torch.compile(lambda xs: xs[0] + 1, backend="magi", options={"magi.report": str(tmp_path)})
    for call, size in enumerate((3, 5)):
        x = torch.ones(size)
        if call >= marked_from:
            torch._dynamo.mark_static(x, 0)
        compiled([x])

    (note,) = read_report(tmp_path).notes()
    assert "mismatch at index 0. expected 3, actual 5, marked by mark_static" in note.text
    assert note.advice.startswith("mark_static(xs[0], 0) gives each size its own graph.")


SCALE = 2


def test_what_programs_have_is_called_as_they_call_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Linear(3, 3, bias=False)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return weight(x) * SCALE if x.shape[0] % 8 == 0 else x + SCALE

    compiled = torch.compile(fn, backend="magi", options={"magi.report": str(tmp_path)}, dynamic=True)
    compiled(torch.ones(4, 3))
    compiled(torch.ones(8, 3))
    weight.requires_grad_(False)
    compiled(torch.ones(8, 3))
    monkeypatch.setattr(f"{__name__}.SCALE", 3)
    compiled(torch.ones(8, 3))

    _, size, *gradients, scale = (entry.compilation.recompiled for entry in entries(tmp_path))
    assert size is not None
    assert scale is not None
    assert len(gradients) == (torch_release() >= (2, 12))  # before, torch does not look at the parameters of a module
    for gradient in gradients:
        assert gradient is not None
        assert gradient.guard == "tensor 'weight.weight' requires_grad mismatch. expected requires_grad=1"
    assert "x.size()[0] % 8" in size.guard
    assert size.place.endswith(f"test_run_report.py:{fn.__code__.co_firstlineno + 1}")
    assert scale.guard == "the global SCALE == …"


def test_a_run_without_operators_had_nothing_to_compile(tmp_path: Path) -> None:
    torch.compile(lambda x: x, backend="magi", options={"magi.report": str(tmp_path)})(torch.ones(3))

    with pytest.raises(ReportError, match="there is nothing to compile in a function without operators"):
        read_report(tmp_path)


def test_each_graph_that_does_not_fit_says_why(tmp_path: Path) -> None:
    compiled = torch.compile(lambda x: x + 1, backend="magi", options={"magi.report": str(tmp_path)})
    compiled(torch.ones(3))
    compiled(torch.ones(3, dtype=torch.float64))
    compiled(torch.ones(3, requires_grad=True))

    *_, again = (entry.compilation.recompiled for entry in entries(tmp_path))
    assert again is not None
    assert "dtype mismatch" in again.guard
    (other,) = again.others
    assert "requires_grad mismatch" in other.guard
    assert f"Nor does graph {other.of} fit: tensor 'x' requires_grad mismatch" in str(again)
    assert "requires gradients in some calls only" in advice_on(again)


def test_a_branch_on_data_is_told_in_words(tmp_path: Path) -> None:
    compiled = torch.compile(
        lambda x: x.sin() if x.sum() > 0 else x.cos(), backend="magi", options={"magi.report": str(tmp_path)}
    )
    compiled(torch.ones(3))

    (note,) = read_report(tmp_path).notes()
    assert "the program branches on the value of a tensor" in note.text
    assert "torch.where" in note.advice


def test_code_for_a_hot_size_is_in_the_record_at_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"magi.hot_sizes": 1, "magi.hot_after": 2, "magi.report": str(tmp_path)}
    compiled = torch.compile(lambda x: x.sin() + 3, backend="magi", dynamic=True, options=options)
    compiled(torch.ones(5))
    (before,) = (entry.compilation.cache for entry in entries(tmp_path))
    for _ in range(2):
        compiled(torch.ones(7))

    (entry,) = entries(tmp_path)
    after, sizes = entry.compilation.cache, entry.compilation.sizes
    assert sizes is not None
    assert {use.sizes[0][1]: use.has_code for use in sizes.uses} == {5: False, 7: True}
    assert sum(astuple(after)) > sum(astuple(before))


def test_the_size_of_the_folder_is_not_counted_at_each_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = Mock(wraps=folders._size)
    monkeypatch.setattr(folders, "_size", size)
    monkeypatch.setattr(folders, "CAP", 2**20)
    folder = folders.Folder(tmp_path).make()
    for index in range(64):
        folder.write(tmp_path / "file", f"{index}" * 4000)

    # All bytes that were written are counted until the next look, and a file that was replaced is found then.
    assert 2 <= size.call_count <= 20
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_another_process_fills_gets_no_more_reports_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folders, "CAP", 2**20)
    folder = folders.Folder(tmp_path).make()
    folder.write(tmp_path / "mine", "x")
    (tmp_path / "others").write_text(" " * 2**20)
    with caplog.at_level(logging.WARNING, "magi_backend"):
        for name in ["mine"] * 10 + ["later", "latest"]:
            folder.write(tmp_path / name, "x" * 2**14)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "others"]
    assert caplog.messages == [f"{tmp_path} holds 1 MiB, so compilations are no longer written there."]


def test_a_reference_to_a_text_is_not_a_path(tmp_path: Path) -> None:
    folder = folders.Folder(tmp_path / "run").make()
    (tmp_path / "secret.txt").write_text("secret")

    assert folder.text("text:../../secret") == "text:../../secret"
    assert folder.text("text:" + "0" * 24) == ""
    assert folder.text(folder.keep("a graph")) == "a graph"


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for folder, by in ((before, 1), (after, 2)):
        torch.compiler.reset()
        options: dict[str, Any] = {"magi.report": str(folder), "force_disable_caches": True}

        torch.compile(first_or_second, backend="magi", options=options)(torch.ones(3), by)
        torch.compile(same, backend="magi", options=options)(torch.ones(3))

    torch.compile(other, backend="magi", options={"magi.report": str(after)})(torch.ones(3))
    comparison = read_report(before).compared_with(read_report(after))

    first, second = comparison.pairs
    assert {"graphs", "kernels"} <= set(first.changed)
    assert second.changed == ()
    assert [one.function for one in comparison.only_after] == ["other"]
    assert comparison.only_before == ()
    assert any(line.startswith("captured graph: ") for line in first.lines())
    assert any(line.endswith(": new") and "sort" in line for line in first.lines())
    assert any(line.endswith(": gone") for line in first.lines())

    text = command(before, "--compare", after)
    assert "Compilations of both" in text
    assert "Only after" in text
    page = tmp_path / "page.html"
    command(before, "--compare", after, "--html", page)
    assert "<ins>+ " in page.read_text()


def first_or_second(x: torch.Tensor, by: int) -> torch.Tensor:
    return x.sin() if by == 1 else x.cos().sort().values


def same(x: torch.Tensor) -> torch.Tensor:
    return x.tan()


def other(x: torch.Tensor) -> torch.Tensor:
    return x.exp()


def test_passes_and_settings_of_two_runs(tmp_path: Path) -> None:
    def told(**changes: Any) -> RunReport:
        graph = replace(EVERYTHING.graphs[0], **changes)
        entry = Entry(Process(1, "", "a.py", "2.13.0"), 1.0, True, replace(EVERYTHING, graphs=(graph,)))
        return RunReport((entry,), ())

    ran = told()
    did_not = told(passes=(PassOutcome("Tiling", False, "no need"),), repairs=())
    (pair,) = ran.compared_with(did_not).pairs
    assert pair.changed == ("passes", "repairs")
    assert "pass Tiling on forward: ran (because) -> did not run (no need)" in list(pair.lines())
    assert "repair order on forward: 1 times -> not there" in list(pair.lines())

    # A cache keeps the code alone, so what is not known of the second run is not said to be gone.
    (pair,) = ran.compared_with(told(cached=True, nodes=0, symbols=(), passes=(), repairs=(), lowered="")).pairs
    assert pair.changed == ()
    assert list(pair.lines()) == ["one of the two came from a cache, so what passes and repairs did is not compared"]


@pytest.mark.kernels
@pytest.mark.parametrize("kinds", [["inference"], ["forward", "backward"]])
def test_a_graph_from_a_cache_is_there_with_its_code(kinds: list[str], tmp_path: Path, fresh_caches: Path) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sum()

    for folder in ("cold", "warm"):
        torch.compiler.reset()
        x = torch.ones(3, requires_grad=len(kinds) > 1)
        result = torch.compile(fn, backend="magi", options={"magi.report": str(tmp_path / folder)})(x)
        if result.requires_grad:
            result.backward()

    (cold,), (warm,) = (read_report(tmp_path / folder).entries for folder in ("cold", "warm"))
    assert [(graph.kind, graph.cached) for graph in cold.compilation.graphs] == [(kind, False) for kind in kinds]
    assert [(graph.kind, graph.cached) for graph in warm.compilation.graphs] == [(kind, True) for kind in kinds]
    for before, after in zip(cold.compilation.graphs, warm.compilation.graphs, strict=True):
        assert (after.kernels, after.code) == (before.kernels, before.code)
    assert "from a cache" in read_report(tmp_path / "warm").to_text()
    assert "from a cache" in read_report(tmp_path / "warm").to_html()


@pytest.mark.kernels
@pytest.mark.parametrize(("profile", "cached"), [(False, False), (True, False), (True, True)])
def test_kernels_are_measured_in_a_few_calls(profile: bool, cached: bool, tmp_path: Path, fresh_caches: Path) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin().sum()

    options: dict[str, Any] = {"magi.report": str(tmp_path), "magi.profile": profile}
    x, w = torch.ones(64, 64, requires_grad=True), torch.ones(64, 64)
    if cached:
        torch.compile(fn, backend="magi")(x, w).backward()
        torch.compiler.reset()
    compiled = torch.compile(fn, backend="magi", options=options)
    for call in range(1, 8):
        compiled(x, w).backward()
        (entry,) = read_report(tmp_path).entries
        measured = [bool(graph.runs) for graph in entry.compilation.graphs]
        assert measured == [profile and call >= 5] * 2
        assert [graph.cached for graph in entry.compilation.graphs] == [cached, cached]
    if not profile:
        return

    forward = {run.name: run for run in entry.compilation.graphs[0].runs}
    assert forward["mm"].bytes == 3 * 64 * 64 * 4
    assert forward["mm"].calls == 1
    assert forward.keys() == {"mm", *entry.compilation.graphs[0].kernels}
    for run in forward.values():
        assert run.seconds > 0
        assert run.share > 0
    torch.testing.assert_close(compiled(x, w), fn(x, w), rtol=1e-4, atol=0)
    assert "share of bandwidth" in read_report(tmp_path).to_html()


def forwarding(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    return wrapper


class Wrapped(nn.Module):
    @forwarding
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @forwarding
    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x.tan()


TANH: Any = nn.Sequential(nn.Tanh())


@pytest.mark.parametrize(
    ("fn", "name", "code"),
    [
        (Wrapped(), "Wrapped.forward", inspect.unwrap(Wrapped.forward).__code__),
        (Wrapped().decode, "Wrapped.decode", inspect.unwrap(Wrapped.decode).__code__),
        (Wrapped().encode, "Wrapped.encode", Wrapped.encode.__code__),
        (TANH, "Sequential.forward", nn.Sequential.forward.__code__),
        (same, "same", same.__code__),
    ],
)
def test_a_compilation_has_the_name_of_its_function(fn: Any, name: str, code: Any) -> None:
    compiled: Any = torch.compile(fn, backend=noting_frame)
    compiled(torch.ones(3))

    assert (frames[-1].function, frames[-1].place) == (name, f"{code.co_filename}:{code.co_firstlineno}")


frames: list[_torch_compat.frames.CapturedFrame] = []


def noting_frame(gm: Any, example_inputs: Any) -> Any:
    frames.append(_torch_compat.frames.captured_frame())
    return gm


@pytest.mark.gpu
def test_kernels_on_a_gpu_are_measured_by_its_own_clock(tmp_path: Path, fresh_caches: Path) -> None:
    options: dict[str, Any] = {"magi.report": str(tmp_path), "magi.profile": True, "magi.mode": "reduce-overhead"}
    x = torch.randn(4096, 4096, device="cuda")
    compiled = torch.compile(lambda x: (x @ x).sin() + 1, backend="magi", options=options)
    for _ in range(6):
        compiled(x)

    (entry,) = read_report(tmp_path).entries
    (graph,) = entry.compilation.graphs
    runs = {run.name: run for run in graph.runs}
    assert runs.keys() == {"mm", *graph.kernels}
    (kernel,) = graph.kernels
    assert runs[kernel].bytes in {4096 * 4096 * 4, 2 * 4096 * 4096 * 4}  # it may write in place
    assert 1e-6 < runs[kernel].seconds < 1e-2
    assert 0.05 < runs[kernel].share < 2.0
    assert runs["mm"].seconds > runs[kernel].seconds
    assert "tl.load" in graph.code


CAPTURED = Compilation(0, "model", 1, ("float32[2, 3, s77, s77]", "float32[8]", "s27"), (), capture_seconds=151.2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"capture_seconds": SLOW - 0.1}, r"$"),
        ({}, r"Dynamo .* 151 s .* symbols \(s27, s77\), and.*torch._dynamo.mark_dynamic\(images, 0\).*dynamic=False"),
        ({"inputs": ("float32[2, 3, 224, 224]",)}, r"Dynamo traced for 151 s before it called the backend\.$"),
    ],
)
def test_a_slow_capture_is_a_line_that_says_what_helps_where_sizes_are_symbols(changes: Any, said: str) -> None:
    assert re.match(said, capture_line(replace(CAPTURED, **changes)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_capture_of_a_function_is_timed(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "SLOW", 1e-6)

    def fn(x: torch.Tensor) -> torch.Tensor:
        for _ in range(30):
            x = x.sin()
        return x

    start = time.perf_counter()
    report = explain(fn, dynamic=dynamic)(torch.randn(5))
    took = time.perf_counter() - start
    assert _torch_compat.frames.capture_seconds() == 0.0, "outside of a compilation nothing is captured"

    (compilation,) = report.compilations
    assert 0 < compilation.capture_seconds < took
    assert compilation.capture_seconds + compilation.seconds < took
    for text in (" ".join(report.to_text().split()), report.to_html()):
        assert "Dynamo traced for" in text
        assert ("Let only the batch vary" in text) is dynamic


RANKS = """
import torch
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.compile(lambda x: x.sin() + rank, backend="magi")(torch.ones(3))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_each_rank_of_a_run_is_there(tmp_path: Path) -> None:
    program, kept = tmp_path / "ranks.py", tmp_path / "report"
    program.write_text(RANKS)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    python(*launcher, program, env={"MAGI_COMPILE_REPORT": str(kept)})

    run = read_report(kept)
    assert sorted(entry.process.rank for entry in run.entries) == ["0", "1"]
    assert len(run.processes) == 2
    assert "rank 1" in run.to_text()
