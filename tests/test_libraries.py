# SPDX-License-Identifier: Apache-2.0
"""What `find_kernels` finds in six libraries of Triton kernels, ops of theirs, and what a second process compiles.

`nox -s libraries` installs them; without them what needs them is skipped. `libraries/` lists the functions that launch,
with their kernels. A program that read the libraries' files, and shared no code with the packages, wrote those lists.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from _library_scan import LIBRARIES, kernels_of, needs
from _python import python


HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "adopt-a-triton-library.md"
MISSES: dict[str, dict[str, str]] = json.loads((HERE / "libraries" / "misses.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_launching_function(library: str) -> None:
    needs(library)
    report: dict[str, Any] = json.loads(python(HERE / "_library_scan.py", library))

    missed = {name: kernels for name, kernels in report["missing"].items() if kernels}
    assert missed.keys() == MISSES[library].keys(), missed


def ops(mode: str) -> list[dict[str, Any]]:
    needs("liger-kernel", "fla-core", "unsloth")
    env = {"TRITON_INTERPRET": "1"} if mode == "numbers" else {}
    printed = python(HERE / "_library_ops.py", mode, "liger", "fla", "unsloth", env=env)
    found = [json.loads(line) for line in printed.splitlines()]
    assert len(found) == 39
    return found


@pytest.mark.slow
def test_ops_compile_and_all_but_one_are_seen_through() -> None:
    found = ops("graphs")
    assert [one for one in found if "error" in one] == []
    (opaque,) = (one for one in found if not one["launches"] or one["opaque"] or one["warnings"])
    assert (opaque["op"], opaque["launches"], opaque["opaque"]) == ("liger_cross_entropy", 0, True)
    (text,) = opaque["warnings"]
    assert "stays opaque to the compiler: its body cannot be traced." in text
    assert "it branches on data of a tensor (" in text


@pytest.mark.slow
def test_numbers_are_the_librarys() -> None:
    failed = {one["op"]: one["error"] for one in ops("numbers") if "error" in one}
    # Triton's interpreter lacks something for four of fla's, and the fifth takes no float32.
    chunked = ("delta_rule", "gated_delta_rule", "gla", "retention", "simple_gla")
    assert sorted(failed) == [f"fla_chunk_{name}" for name in chunked], failed
    assert all(text.startswith(("InterpreterError", "AssertionError: Chunk")) for text in failed.values()), failed


FORWARD = {"_rms_norm_forward_kernel": 5, "_swiglu_forward_kernel": 2}
BACKWARD = {"_rms_norm_backward_kernel": 5, "_swiglu_backward_kernel": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "launches", "graphs"),
    [
        ("forward", {**FORWARD, "_triton_rope": 2}, 1),
        ("training", FORWARD | BACKWARD, 2),
        ("version", {"_swiglu_forward_kernel": 1}, 1),
    ],
)
def test_a_second_process_compiles_nothing(mode: str, launches: dict[str, int], graphs: int, tmp_path: Path) -> None:
    """A model with Liger's kernels; `forward` is that of the page on adopting a library."""
    needs("liger-kernel")
    command = (HERE / "_warm_library.py", mode, PAGE, tmp_path)
    first, second = (
        json.loads(python(*command, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}).splitlines()[-1])
        for _ in range(2)
    )

    # One graph is captured: the page's `eps` is a number of the module, which is a constant from the start.
    assert first["misses"] == {"autograd": 1, "fxgraph": graphs}
    assert first["hits"] == {"autograd": 0, "fxgraph": 0}
    assert second["misses"] == {"autograd": 0, "fxgraph": 0}
    assert second["hits"] == {"autograd": 1, "fxgraph": graphs}
    for one in (first, second):
        assert one["bypasses"] == 0
        assert Counter(one["launches"]) == launches


def test_the_record_is_of_the_names_and_misses_on_file() -> None:
    keeper: Any = importlib.import_module("_libraries")  # of docs/
    record = keeper.read_record()
    assert set(record) == set(LIBRARIES) == set(MISSES)
    for library, row in record.items():
        functions = kernels_of(library)
        assert row["functions"] == len(functions)
        assert row["found"] == len(functions) - len(MISSES[library])
        assert MISSES[library].keys() <= functions.keys()
    assert keeper.table(record) in (HERE.parent / "docs" / "compatibility.md").read_text()
