# SPDX-License-Identifier: Apache-2.0
"""The HTML report in a browser: nothing else is run, nothing is loaded, nothing sticks out, whatever the names are."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import _browser
import pytest
from _browser import opened
from magi_backend import Report
from magi_backend._report.explain import CallRecord
from magi_backend._verify.compare import Difference, Tolerance
from magi_backend.records import (
    CacheUse,
    CheckOutcome,
    Compilation,
    ConfigChange,
    GraphRecord,
    OpUse,
    PassOutcome,
    RepairOutcome,
)


if TYPE_CHECKING:
    from pathlib import Path


HOSTILE = "</style></pre><script>console.error('run')</script><img src=http://example.invalid/x onerror=alert(1)>&\"'"
LONG = "a_namespace_of_many_words::" + "an_operator_whose_name_goes_on_" * 6
TOLERANCE = Tolerance(1e-4, 1e-4)


def graph(kind: str, piece: str, seconds: float) -> GraphRecord:
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
            graph(kind, f"piece {index}", 0.5 + index) for index in range(20) for kind in ("forward", "backward")
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


REPORTS = {"crowded": crowded(), "empty": Report("nothing", "2.13.0+cpu", (), ())}
# Only in the test's copy: the page cannot say how wide it is.
RULER = "console.log('wide', document.documentElement.scrollWidth, innerWidth)"


@pytest.mark.parametrize("name", REPORTS)
def test_the_page_has_one_script_and_no_address(name: str) -> None:
    page = REPORTS[name].to_html()

    assert not re.search(r"<(img|link|iframe|object|embed)\b", page)
    assert re.findall(r"<script[^>]*>", page) == ["<script>"]
    assert not re.search(r"<a\b(?! href='#)", page)
    assert "url(" not in page
    assert page.count("</style>") == 1


@pytest.mark.parametrize(("name", "width"), [("crowded", 1200), ("crowded", 500), ("crowded", 400), ("empty", 500)])
def test_a_browser_shows_it_and_loads_nothing(name: str, width: int, tmp_path: Path) -> None:
    seen = opened(REPORTS[name].to_html(), tmp_path, width=width, script=RULER)

    ((_, content, window),) = [line.split() for line in seen.console]  # the ruler's line, and no other
    assert int(content) <= int(window) == width, "the page is wider than the window"
    assert seen.requests == []
    assert seen.picture.stat().st_size > 5000


def test_a_browser_tells_on_a_page_that_does(tmp_path: Path) -> None:
    page = "<body><img src='http://example.invalid/x.png'><script>console.error('run')</script></body>"

    seen = opened(page, tmp_path, width=500)

    assert seen.requests == ["http://example.invalid/x.png"]
    assert "run" in seen.console


def test_where_a_browser_is_required_the_test_fails_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_browser, "CHROMIUM", None)
    monkeypatch.setenv(_browser.REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        opened("<body></body>", tmp_path, width=500)
