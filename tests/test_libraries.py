# SPDX-License-Identifier: Apache-2.0
"""What `find_kernels` finds in three libraries of Triton kernels.

`nox -s libraries` installs them; without them the searches are skipped. `libraries/` lists the functions that launch,
with their kernels. A program that read the libraries' files, and shared no code with the packages, wrote those lists.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _library_scan import LIBRARIES, folder_of, kernels_of


HERE = Path(__file__).parent
MISSES: dict[str, dict[str, str]] = json.loads((HERE / "libraries" / "misses.json").read_text())


def record_keeper() -> ModuleType:
    spec = importlib.util.spec_from_file_location("libraries_record", HERE.parent / "docs" / "_libraries.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_launching_function(library: str) -> None:
    if folder_of(LIBRARIES[library].package) is None:
        pytest.skip(f"{library} is not installed; nox -s libraries installs it")
    command = [sys.executable, str(HERE / "_library_scan.py"), library]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)

    missed = {name: kernels for name, kernels in report["missing"].items() if kernels}
    assert missed.keys() == MISSES[library].keys(), missed


@pytest.fixture
def ops_of_libraries() -> Callable[[str], list[dict[str, Any]]]:
    missing = [name for name, library in LIBRARIES.items() if folder_of(library.package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed; nox -s libraries installs it")

    def run(mode: str) -> list[dict[str, Any]]:
        command = [sys.executable, str(HERE / "_library_ops.py"), mode]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.mark.slow
def test_thirty_ops_compile_and_nearly_all_are_seen_through(ops_of_libraries: Callable[..., Any]) -> None:
    found = ops_of_libraries("graphs")
    assert len(found) == 30
    assert [one for one in found if "error" in one] == []
    opaque = [one for one in found if one["opaque"]]
    assert len(found) - len(opaque) >= 28
    assert all(one["launches"] for one in found if not one["opaque"])
    for one in opaque:
        (text,) = one["warnings"]
        assert "stays opaque to the compiler: its body cannot be traced." in text
        assert "it branches on data of a tensor (" in text


@pytest.mark.slow
def test_numbers_are_the_librarys(ops_of_libraries: Callable[..., Any]) -> None:
    found = ops_of_libraries("numbers")
    assert len(found) == 30
    assert [one for one in found if not one.get("equal")] == []


ADOPTED = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch
from _library_scan import pretended_gpu
from _pages import read_page
with pretended_gpu():
    import liger_kernel.ops
(block,) = [block for block in read_page(Path({page!r})).blocks if block.language == "python"]
(Path({folder!r}) / "adopted_page.py").write_text(block.code)
sys.path.insert(0, {folder!r})
import adopted_page
from collections import Counter
from magi_tritonwrap.testing import aot_graphs, launches_of
ids = torch.zeros(1, 8, dtype=torch.long)
with pretended_gpu(is_available=False), torch.no_grad():
    (graph,) = aot_graphs(lambda ids: adopted_page.model(input_ids=ids, use_cache=False).logits, ids, device="cpu")
targets = {{str(node.target) for node in graph.graph.nodes}}
assert not [target for target in targets if target.startswith("liger.")], targets
print(sorted(Counter(launch.kernel.fn.__name__ for launch in launches_of(graph)).items()))
"""


@pytest.mark.slow
def test_adopting_a_library(tmp_path: Path) -> None:
    if folder_of("liger_kernel") is None:
        pytest.skip("liger-kernel is not installed; nox -s libraries installs it")
    page = HERE.parent / "docs" / "adopt-a-triton-library.md"
    program = ADOPTED.format(tests=str(HERE), page=str(page), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[('_rms_norm_forward_kernel', 5), ('_swiglu_forward_kernel', 2), ('_triton_rope', 2)]\n"


def test_the_record_is_of_the_names_and_misses_on_file() -> None:
    keeper = record_keeper()
    record = keeper.read_record()
    assert set(record) == set(LIBRARIES) == set(MISSES)
    for library, row in record.items():
        functions = kernels_of(library)
        assert row["functions"] == len(functions)
        assert row["found"] == len(functions) - len(MISSES[library])
        assert MISSES[library].keys() <= functions.keys()
    page = (HERE.parent / "docs" / "compatibility.md").read_text()
    assert keeper.table(record) in page
