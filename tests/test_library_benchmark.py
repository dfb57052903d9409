# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/libraries.py measures: each program compiles as its arm says, and ratios are what they are called.

Without the libraries, which `nox -s libraries` installs, the programs are skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import libraries
import pytest
import torch
from _library_case import OpaqueOp
from _library_op import ROWS, LibraryOp, program_of, rows
from _library_scan import LIBRARIES, folder_of
from _ratios import ratios
from torch import Tensor


HERE = Path(__file__).parent
Row = dict[str, Any]


@pytest.fixture
def with_libraries() -> None:
    missing = [name for name in ("liger-kernel", "fla-core") if folder_of(LIBRARIES[name].package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed; nox -s libraries installs it")


def printed_by(program: str, *arguments: str) -> str:
    command = [sys.executable, str(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=550)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("with_libraries")
def test_code_is_generated_for_every_program() -> None:
    found = [json.loads(line) for line in printed_by(str(HERE / "_library_codegen.py")).splitlines()]

    assert {one["program"] for one in found} == set(libraries.PROGRAMS)
    failed = [one for one in found if "error" in one]
    # Its body reads data, and fake tensors have none.
    assert [(one["program"], one["arm"]) for one in failed] == [("liger_cross_entropy", "opaque")], failed
    kept_whole = {one["program"] for one in found if one["arm"] == "seen_through" and one["calls_op"]}
    assert kept_whole == {"liger_cross_entropy"}
    for one in found:
        if one not in failed and one["program"] not in kept_whole:
            assert bool(one["kernels"]) == (one["arm"] == "seen_through") == (not one["calls_op"]), one


@pytest.mark.slow
@pytest.mark.usefixtures("with_libraries")
def test_the_program_compiles_compares_and_times(tmp_path: Path) -> None:
    program = str(HERE.parent / "benchmarks" / "libraries.py")
    given = ("--tiny", "--only", "liger_softmax", "--arms", "eager,opaque,seen_through", "--repeats", "2")
    text = printed_by(program, *given, "--compiling", "1", "--compile-seconds", "400", "--out", str(tmp_path))

    found = {row["arm"]: row for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())}
    assert list(found) == ["eager", "opaque", "seen_through"]
    for arm, row in found.items():
        assert row["case"] == "liger_softmax_tiny"
        assert len(row["seconds"]) == 2, row
        assert row["graphs"] == (arm != "eager")
        assert row["difference"]["relative"] < 1e-5
    assert '"liger_softmax_tiny_vs_opaque_speedup"' in text


def row(case: str, arm: str, *seconds: float, **rest: Any) -> Row:
    return {"case": case, "arm": arm, "torch": "2.11.0+cu130", "seconds": list(seconds), **rest}


def four(case: str, eager: float, dynamo: float, opaque: float, ours: float) -> list[Row]:
    arms = {"eager": eager, "dynamo": dynamo, "opaque": opaque, "seen_through": ours}
    return [row(case, arm, seconds, seconds) for arm, seconds in arms.items()]


def test_ratios_are_of_ops_at_one_size_and_of_the_block() -> None:
    found = ratios(
        "libraries",
        [
            *four("liger_a_small", 2.0, 3.0, 8.0, 2.0),
            *four("liger_a_large", 9.0, 9.0, 9.0, 9.9),
            *four("fla_b_small", 2.0, 2.0, 6.0, 3.0),
            *four("fla_b_large", 9.0, 9.0, 9.0, 4.5),
            *four("fla_c_small", 2.0, 3.0, 3.0, 3.0),
            *four("llama_block_small", 8.0, 8.0, 90.0, 2.0),
            *four("llama_block_large", 1.0, 4.0, 4.0, 4.0),
        ],
    )
    assert found["libraries_median_vs_opaque_speedup"] == 2.0
    assert found["libraries_large_median_vs_opaque_speedup"] == pytest.approx((9 / 9.9 + 2) / 2)
    assert found["libraries_worst_vs_eager"] == pytest.approx(1.1)
    assert found["libraries_small_worst_vs_eager"] == 1.5
    assert found["libraries_median_vs_dynamo_speedup"] == 1.0
    assert found["llama_block_vs_dynamo_speedup"] == 2.0
    assert found["liger_a_small_vs_opaque_speedup"] == 4.0


def test_an_op_that_only_others_can_run_counts_as_nothing_gained() -> None:
    ran = four("liger_a_small", 1.0, 1.0, 3.0, 1.0)
    failed = [*four("fla_b_small", 1.0, 1.0, 1.0, 1.0)[:3], row("fla_b", "seen_through", reason="wrong")]
    found = ratios("libraries", [*ran, *failed])
    assert found["fla_b_small_vs_opaque_speedup"] == 0.0
    assert found["libraries_median_vs_opaque_speedup"] == 1.5


def test_the_table_says_why_an_op_could_not_be_run_and_what_stays_opaque() -> None:
    measured = {"alone_seconds": [2e-5], "compile_seconds": 1.0, "graphs": 1, "difference": {"relative": 0.0}}
    lines = libraries.table(
        [
            row("fla_rotary", "eager", reason="OutOfResources: shared memory"),
            row("liger_jsd_small", "seen_through", 1e-5, stays_opaque=["its body reads data"], **measured),
        ]
    )
    assert "| fla_rotary | eager | 2.11.0+cu130 | OutOfResources: shared memory |" in lines[2]
    assert lines[3].startswith("| liger_jsd_small | seen_through | 2.11.0+cu130 | 10.0 µs | 20.0 µs |")
    assert lines[3].endswith("| yes |")


def test_rows_are_sorted_by_op_size_and_arm() -> None:
    given = [
        row("fla_chunk_gla_small", "eager"),
        row("liger_rope_large", "eager"),
        row("liger_rope_small", "seen_through"),
        row("liger_rope_small", "eager"),
        row("llama_block", "dynamo"),
        row("fla_swiglu_small", "eager"),
    ]
    found = [(one["case"], one["arm"]) for one in sorted(given, key=libraries.place)]
    assert found == [(given[place]["case"], given[place]["arm"]) for place in (3, 2, 1, 5, 0, 4)]


def doubled(x: Tensor) -> Tensor:
    return x * 2


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:2].clone(), x[2:].sum()


@pytest.mark.parametrize(
    ("body", "expected"),
    [(doubled, lambda x: (x + x * 0.5,)), (halves, lambda x: (x[:2] * 0.25, x[2:].sum() * 0.25))],
)
def test_pointwise_operations_surround_an_op(body: Callable[..., Any], expected: Callable[[Tensor], Any]) -> None:
    program = program_of("op", LibraryOp(body, ROWS, rows(1)))
    (x,) = program.inputs(ROWS["tiny"], torch.float32)
    found = program.build({"op": body}, torch.float32)(x)
    torch.testing.assert_close(found, expected(x))


def test_an_opaque_op_has_the_fake_that_its_author_would_write() -> None:
    op = OpaqueOp("library_benchmark_tests::halves", halves)
    x = torch.randn(4, 3)
    op.learn(x)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = op.op(mode.from_tensor(x))
    assert [(fake.shape, fake.dtype) for fake in fakes] == [((2, 3), torch.float32), ((), torch.float32)]
    compiled = torch.compile(lambda x: op.op(x * 2), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x / 2), halves(x))
