# SPDX-License-Identifier: Apache-2.0
"""The pages of reports, runs and two runs in a browser: what they show, what their search, tables and keys do.

Nothing else is run, nothing is loaded, nothing sticks out, whatever the names are.
"""

from __future__ import annotations

import html
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest
from _browser import DARK, opened
from magi_backend import Report, RunReport
from magi_backend._records.folder import Entry, Process
from magi_backend._records.log import BrokenAt, GivenUp, ProcessRecord
from magi_backend._report.explain import CallRecord
from magi_backend._verify.compare import Difference, Tolerance
from magi_backend.records import (
    CacheUse,
    CheckOutcome,
    Compilation,
    ConfigChange,
    GraphBreak,
    GraphChange,
    GraphRecord,
    KernelRun,
    OpUse,
    PassOutcome,
    Recompilation,
    RepairOutcome,
)


if TYPE_CHECKING:
    from pathlib import Path


HOSTILE = "</style></script></pre><script>console.error('run')</script><img src=http://example.invalid/x>&\\\"'"
CODE = """cpp_fused_sin_0 = async_compile.cpp_pybinding(['float*'], r'''
void kernel() {}
''')

def call(args):
    pass
"""
SIN = "x: f32[3] = input\n# model.py:3 in forward\nsin = sin(x)"
COS = SIN.replace("sin", "cos")
GRAPH = GraphRecord(
    kind="forward",
    nodes=1,
    symbols=("s0",),
    passes=(),
    repairs=(),
    kernels=("cpp_fused_sin_0",),
    externs=("mm",),
    seconds=2.0,
    given=SIN,
    changed=(GraphChange("SinBecomesCos", SIN, COS),),
    lowered=COS,
    code=CODE,
    phases=(("lowering", 0.5), ("compiling kernels", 1.0)),
    runs=(KernelRun("cpp_fused_sin_0", 2, 3e-6, 2**20, 0.25),),
)
FIRST = Compilation(
    index=0,
    label="graph 0",
    nodes=1,
    inputs=("float32[s0]",),
    ops=(),
    graphs=(GRAPH,),
    seconds=3.0,
    capture_seconds=1.0,
    compile_id="0/1",
    function="Model.forward",
    place="/home/someone/model.py:2",
    captured=SIN,
    recompiled=Recompilation("0/0", "tensor 'x' size mismatch at index 0. expected 3, actual 5", "model.py:3"),
    stopped=GraphBreak("/home/someone/model.py:4", "forward", f"print {HOSTILE}", ("do not print",)),
    inductor_seconds=2.0,
    frame_seconds=4.5,
)
SECOND = Compilation(
    index=1,
    label="graph 0",
    nodes=1,
    inputs=("float32[s0]",),
    ops=(),
    seconds=0.25,
    function="loss",
    place="/home/someone/model.py:9",
)
PROCESSES = tuple(Process(pid, str(pid), f"train.py {HOSTILE}", "2.13.0") for pid in (0, 1))
RUN = RunReport(
    (
        Entry(PROCESSES[0], 1.0, True, FIRST),
        Entry(PROCESSES[1], 2.0, False, SECOND),
        Entry(PROCESSES[1], 3.0, True, replace(SECOND, index=2, function="norm", error=f"Error: {HOSTILE}")),
    ),
    tuple(
        ProcessRecord(process, 2, (BrokenAt(FIRST.stopped, 3),), (GivenUp("f", "a.py:1", HOSTILE, 1),))
        for process in PROCESSES
        if FIRST.stopped is not None
    ),
)
LONG = "a_namespace_of_many_words::" + "an_operator_whose_name_goes_on_" * 6
TOLERANCE = Tolerance(1e-4, 1e-4)


def crowded_graph(kind: str, piece: str, seconds: float) -> GraphRecord:
    change = ConfigChange("triton.prefer_nd_tiling", "False", "True")
    return GraphRecord(
        kind=kind,
        nodes=312,
        symbols=("s27", "s53", "s77"),
        passes=(
            PassOutcome("NDTilingWorkaroundPass", True, "sizes are symbolic, 31 convolutions", (change,), 0.0021),
            PassOutcome("EpilogueFusion", False, "no Triton launch"),
        ),
        repairs=(RepairOutcome("keep_mutation_order", "wrong code", f"gradients are zero {HOSTILE}", "waits", 3),),
        kernels=tuple(f"triton_poi_fused_{index}_{LONG}" for index in range(12)),
        externs=("convolution", "mm"),
        seconds=seconds,
        piece=piece,
    )


def crowded() -> Report:
    """Many graphs, long names, and every text as hostile as it can be."""
    pieces = tuple(name for index in range(20) for name in (f"piece {index}", LONG))
    description = f"signature  norm(x: Tensor, cfg: {HOSTILE})\nschema     {LONG}(Tensor x, float cfg__eps=1e-06)"
    compilation = Compilation(
        index=0,
        label=HOSTILE,
        nodes=4000,
        inputs=tuple(f"float32[s{index}, 4, 64, 64]" for index in range(200)),
        ops=(OpUse(LONG, "flattened", 31, description), OpUse(HOSTILE, "direct", 1, "plain")),
        graphs=tuple(
            crowded_graph(kind, f"piece {index}", 0.5 + index)
            for index in range(20)
            for kind in ("forward", "backward")
        ),
        checks=(CheckOutcome("piece 0", 12, 3e-6, True), CheckOutcome(LONG, 3, 0.5, False)),
        pieces=pieces,
        settings=(("mode", repr(HOSTILE), "options"), ("boundary_ops", repr((LONG,) * 4), "config_patch")),
        cache=CacheUse(1, 2, 3),
        seconds=93.2,
        error=f"InductorError: {HOSTILE} {LONG}",
    )
    differences = (
        Difference("output", 1e-6, TOLERANCE, True),
        Difference(f"gradient of {LONG}", 0.3, TOLERANCE, False, HOSTILE),
    )
    call = CallRecord(
        ("float32[1, 4, 64, 64]",) * 40, 93.2, (0.01,), (0.02,), 2, (f"break {HOSTILE} {LONG}",), differences
    )
    return Report(HOSTILE, "2.13.0+cpu", (call, call), (compilation, Compilation(1, LONG, 0, (), ())))


CHANGED = replace(FIRST, graphs=(replace(GRAPH, lowered=SIN, kernels=("cpp_fused_cos_0",)),))
AFTER = RunReport((Entry(PROCESSES[0], 1.0, True, CHANGED), *RUN.entries[1:2]), ())
PAGES = {
    "crowded": crowded().to_html(),
    "empty": Report("nothing", "2.13.0+cpu", (), ()).to_html(),
    "run": RUN.to_html(),
    "two runs": RUN.compared_with(AFTER).to_html(),
}
# Only in the test's copy: the page cannot say how wide it is.
EVERYTHING_OPEN = "document.querySelectorAll('details').forEach((one) => { one.open = true; });"
RULER = "console.log('wide', document.documentElement.scrollWidth, innerWidth);"
DRIVER = """
const every = (selector) => [...document.querySelectorAll(selector)];
const seen = (name, value) => console.log(name + '=' + value);
const rows = () => every('#index tbody tr').filter((row) => !row.hidden)
  .map((row) => row.dataset.of.slice(-1)).join('');
const shownOnes = () => every('.compilation').filter((one) => !one.hidden).length;
const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
const box = document.querySelector('#search');
const type = (text) => { box.value = text; box.dispatchEvent(new Event('input')); };
const sortBy = (title) => every('#index th button').find((button) => button.textContent === title).click();
const open = () => every('.compilation').map((one) => Number(one.open)).join('');
"""


def drive(tmp_path: Path, script: str, *, width: int = 1200) -> dict[str, str]:
    seen = opened(PAGES["run"], tmp_path, width=width, script=DRIVER + script)
    assert seen.requests == []
    return dict(line.split("=", 1) for line in seen.console)


@pytest.mark.parametrize("report", [crowded(), RUN])
def test_a_notebook_shows_the_text(report: Report | RunReport) -> None:
    shown = report._repr_html_()
    assert html.unescape(shown) == f"<pre>{report}</pre>"
    assert "<script" not in shown


def test_what_the_page_says() -> None:
    page = PAGES["run"]
    text = re.sub(r"<[^>]+>", "", page)

    for said in (
        "Model.forward",
        "torch._dynamo.mark_dynamic(x, 0)",
        "loss was being compiled when the process ended.",
        "capture 1.0 s",
        "AOTAutograd 1.0 s",
        "Inductor 2.0 s",
        "guards 500.0 ms",
        "lowering 500.0 ms",
        "What SinBecomesCos changed +1 &minus;1",
        "- sin = sin(x)",
        "+ cos = cos(x)",
        "void kernel() {}",
        "cpp_fused_sin_0 = …  # below, by itself",
        "25%",
        "1.00 MiB",
        "Graph break at /home/someone/model.py:4, in forward",
        "do not print",
        "rank 1",
    ):
        assert said in text, said
    assert "<ins>+ cos = cos(x)</ins>" in page
    assert "<dt>by other backends</dt><dd>4</dd>" in page


def test_search_finds_functions_kernels_and_graphs(tmp_path: Path) -> None:
    seen = drive(
        tmp_path,
        """
        seen('all', rows()); type('cpp_fused_sin'); seen('kernel', rows() + shownOnes());
        type('LOSS'); seen('name', rows()); type('model.py norm'); seen('words', rows());
        type('nothing like it'); seen('none', rows() + document.querySelector('#count').textContent);
        press('Escape'); seen('escape', rows());
        const who = document.querySelector('#rank'); who.value = 'rank 1'; who.dispatchEvent(new Event('change'));
        seen('rank', rows());
        """,
    )

    found = {"all": "012", "kernel": "01", "name": "1", "words": "2", "none": "0 of 3", "escape": "012", "rank": "12"}
    assert seen == found


def test_each_column_sorts_by_what_it_means(tmp_path: Path) -> None:
    seen = drive(
        tmp_path,
        "sortBy('time'); seen('time', rows()); sortBy('time'); seen('again', rows());"
        "sortBy('function'); seen('function', rows());"
        "seen('said', document.querySelectorAll('#index th[aria-sort=ascending]').length);",
    )

    assert seen == {"time": "120", "again": "012", "function": "102", "said": "1"}


def test_keys(tmp_path: Path) -> None:
    seen = drive(
        tmp_path,
        """
        press('j'); press('o'); seen('first', open());
        press('j'); press('j'); press('j'); press('o'); seen('last', open());
        press('k'); seen('here', document.querySelector('tr.here').dataset.of);
        press('/'); seen('search', document.activeElement.id); press('o'); seen('typed', open());
        press('Escape'); press('e'); seen('every', open()); press('e'); seen('closed', open());
        """,
    )

    assert seen == {
        "first": "100",
        "last": "101",
        "here": "compilation-1",
        "search": "search",
        "typed": "101",
        "every": "111",
        "closed": "000",
    }


def test_a_link_opens_what_it_names(tmp_path: Path) -> None:
    script = "document.querySelector('.notes a').click(); setTimeout(() => seen('open', open()), 50);"
    assert drive(tmp_path, script) == {"open": "100"}


@pytest.mark.parametrize(("flags", "ground"), [((), "rgb(255, 255, 255)"), ((DARK,), "rgb(20, 23, 27)")])
def test_light_and_dark(flags: tuple[str, ...], ground: str, tmp_path: Path) -> None:
    script = "console.log(getComputedStyle(document.body).backgroundColor)"
    seen = opened(PAGES["run"], tmp_path, width=800, script=script, flags=flags)

    assert seen.console == [ground]
    assert seen.picture.stat().st_size > 20_000


def test_two_runs_side_by_side() -> None:
    page = PAGES["two runs"]

    assert "<ins>+ sin = sin(x)</ins>" in page
    assert "kernel cpp_fused_cos_0: new" in page
    assert "Only before" in page
    assert HOSTILE not in page


class Tags(HTMLParser):
    """The tags that are still open."""

    def reset(self) -> None:
        super().reset()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open += [tag] * (tag not in {"meta", "input"})

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", PAGES)
def test_the_page_has_balanced_tags_one_script_and_no_address(name: str) -> None:
    page, tags = PAGES[name], Tags()
    tags.feed(page)

    assert tags.open == []
    assert not re.search(r"<(img|link|iframe|object|embed)\b", page)
    assert re.findall(r"<script[^>]*>", page) == ["<script>"]
    assert not re.search(r"<a\b(?! href='#)", page)
    assert "url(" not in page
    assert page.count("</style>") == 1


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("crowded", 1200),
        ("crowded", 500),
        ("crowded", 400),
        ("empty", 500),
        ("run", 1200),
        ("run", 400),
        ("two runs", 1200),
    ],
)
def test_a_browser_shows_it_and_loads_nothing(name: str, width: int, tmp_path: Path) -> None:
    seen = opened(PAGES[name], tmp_path, width=width, script=EVERYTHING_OPEN + RULER)

    ((_, content, window),) = [line.split() for line in seen.console]  # the ruler's line, and no other
    assert int(content) <= int(window) == width, "the page is wider than the window"
    assert seen.requests == []
    assert seen.picture.stat().st_size > 5000
