# SPDX-License-Identifier: Apache-2.0
"""The models of benchmarks/real_decoders.py are what they say, and the program measures them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import decoder_fragments
import dynamic_decode
import libraries
import pytest
import real_decoders
import torch
from _arms import arm_named, pipeline_options
from _case import Case, Plan, measure_case
from _clock import Clock
from _ratios import ratios
from _real_models import MODELS, compiled_part, decode, denoise, without_the_break


ROOT = Path(__file__).parents[1]
Row = dict[str, Any]


def output(model: Any, name: str, *, second: bool = False) -> torch.Tensor:
    given = MODELS[name].arguments("cpu", torch.float32, tiny=True, second=second)
    with torch.no_grad():
        return decode(model, **given) if hasattr(model, "decode") else denoise(model, **given)


@pytest.mark.parametrize("name", MODELS)
def test_each_model_runs_at_two_sizes(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name].build(tiny=True)
    first, second = output(model, name), output(model, name, second=True)
    assert bool(first.isfinite().all())
    assert bool(second.isfinite().all())
    assert first.shape != second.shape
    assert float(first.std()) > 0


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("wan21", 127e6), ("wan22", 705e6), ("kl", 84e6), ("cogvideox", 216e6), ("unet", 2567e6)],
)
def test_the_configurations_are_those_of_published_models(name: str, parameters: float) -> None:
    with torch.device("meta"):
        model = MODELS[name].build(tiny=False)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(parameters, rel=0.01)
    assert compiled_part(model) is getattr(model, "decoder", model)


@pytest.mark.parametrize("name", ["wan21", "wan22"])
def test_the_change_of_two_lines_changes_no_result_and_compares_no_tensor_with_a_str(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = MODELS[name].build(tiny=True)
    expected = output(model, name)
    compared: list[object] = []
    original = torch.Tensor.__ne__

    def watched(self: torch.Tensor, other: object) -> Any:
        compared.append(other)
        return original(self, other)

    monkeypatch.setattr(torch.Tensor, "__ne__", watched)
    output(model, name)
    assert "Rep" in compared
    compared.clear()
    without_the_break(model)
    torch.testing.assert_close(output(model, name), expected, rtol=0, atol=0)
    assert "Rep" not in compared


def row(case: str, arm: str, *seconds: float, **rest: Any) -> Row:
    return {"case": case, "arm": arm, "torch": "2.11.0+cu130", "seconds": list(seconds), **rest}


def test_ratios_of_decodes() -> None:
    rows = [
        row("wan21", "eager", 9.0, floor_seconds=1.0),
        row("wan21", "stock_dynamic", 6.0, 6.0),
        row("wan21", "stock_static", 3.0, 3.0),
        row("wan21", "magi_dynamic", 2.0, 2.0),
        row("wan21", "magi_tuned", 1.5, 1.5),
        row("wan21_nobreak", "stock_dynamic", 4.0),
        row("wan21_nobreak", "magi_dynamic", 1.0),
        row("wan21_limit8", "stock_dynamic", 3.0, graphs=27),
        row("wan21_limit8", "magi_dynamic", 1.0, graphs=3),
        row("wan22", "stock_dynamic", 8.0, graphs=31),
        row("wan22_limit8", "stock_static", 5.0, graphs=27),
        row("wan22_limit8", "magi_dynamic", 2.0, graphs=3),
        row("wan21_compile", "stock_dynamic", 100.0, compiled_beside=0),
        row("wan21_compile", "magi_dynamic", 50.0, compiled_beside=0),
        row("wan21_compile_together", "stock_dynamic", 100.0, compiled_beside=5),
        row("wan21_compile_together", "magi_dynamic", 300.0, compiled_beside=5),
        row("kl", "stock_dynamic", 1.0),
        row("kl", "magi_dynamic", reason="wrong"),
    ]
    found = ratios("real_decoders", rows)
    assert found == {
        "wan21_vs_stock_dynamic_speedup": 3.0,
        "wan21_vs_stock_static_speedup": 1.5,
        "wan21_tuned_vs_stock_dynamic_speedup": 4.0,
        "wan21_tuned_vs_stock_static_speedup": 2.0,
        "wan21_vs_floor": 2.0,
        "wan21_compile_vs_stock": 0.5,
        "wan21_vs_stock_dynamic_speedup_nobreak": 4.0,
        "wan21_vs_stock_dynamic_speedup_limit8": 3.0,
        "wan22_vs_stock_dynamic_speedup": 4.0,
        "wan22_vs_stock_static_speedup_limit8": 2.5,
        "kl_vs_stock_dynamic_speedup": 0.0,
    }
    newer = [{**one, "torch": "2.13.0"} for one in rows]
    assert ratios("real_decoders", [*rows, *newer])["wan21_vs_stock_dynamic_speedup_torch213"] == 3.0


def test_arms_by_name() -> None:
    assert arm_named("stock_static").dynamic is False
    tiled = arm_named("stock_dynamic:triton.max_tiles=2+triton.prefer_nd_tiling=true")
    assert (tiled.backend, tiled.dynamic) == ("inductor", True)
    assert tiled.options == {"triton.max_tiles": 2, "triton.prefer_nd_tiling": True}
    assert arm_named("magi_tuned:magi.progress=false").options == {"magi.tune": True, "magi.progress": False}
    assert arm_named("passes_static:layout+nd2").passes == ("layout", "nd2")
    with pytest.raises(ValueError, match="no arm 'stock'; there are eager, "):
        arm_named("stock")


def test_every_name_of_a_pass_is_one() -> None:
    names = ("chooser", "zero_pads", "padding", "temporal", "temporal_all_frames", "layout", "moments", "nd2", "nd3")
    assert pipeline_options(names)
    with pytest.raises(KeyError, match="layuot"):
        pipeline_options(("layuot",))


@pytest.mark.parametrize("program", [decoder_fragments, dynamic_decode, libraries, real_decoders])
def test_what_processes_load_before_they_are_forked_exists(program: Any) -> None:
    # The server of multiprocessing passes over a module that it cannot import.
    for name in program.PRELOAD:
        importlib.import_module(name)


class Doubling(Case):
    """A case whose calls are counted."""

    def __init__(self, arm: str) -> None:
        self.name, self.arm, self.clock = "doubling", arm_named(arm), Clock("cpu")
        self.calls, self.second = 0, False

    def call(self) -> object:
        self.calls += 1
        return torch.ones(3) * 2

    def call_eagerly(self) -> object:
        return self.call()

    def forget(self) -> None:
        """There is nothing."""

    def compared(self, *, second: bool) -> Row:
        self.second |= second
        return {"difference": second}


def test_a_case_is_measured_as_often_as_it_is_told() -> None:
    case = Doubling("eager")
    plan = Plan(cold_calls=2, queued_seconds=0.0, alone=3, second_size=True)
    (row,) = measure_case(case, plan, iter(["ready", "repeat", "repeat"]))
    assert len(row["seconds"]) == 2
    assert len(row["alone_seconds"]) == 3
    assert row["work"]["flops"] == 0
    assert row["second_size"] == {"difference": True}
    # Two cold calls, two to warm up and three alone, one to fill the queue, two repeats, one whose work is counted.
    assert case.calls == 11
    assert not Doubling("eager").second


@pytest.mark.slow
def test_dynamic_decode_times_its_models_in_the_same_way(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "benchmarks" / "dynamic_decode.py"), "--tiny", "--model", "plain"]
    program += ["--arms", "eager,magi", "--repeats", "3", "--together", "--out", str(tmp_path)]
    subprocess.run(program, check=True, timeout=580)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    cases = [("plain_540p", "eager"), ("plain_540p", "magi"), ("plain_540p_compile_together", "magi")]
    assert [(row["case"], row["arm"]) for row in rows] == cases
    assert rows[0]["work"]["flops"] > 0
    assert len(rows[1]["seconds"]) == 3
    assert rows[1]["relative_error"] < 1e-5
    assert rows[1]["passes"]


@pytest.mark.slow
def test_the_program_compiles_decodes_compares_and_times(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "benchmarks" / "real_decoders.py"), "--tiny", "--model", "kl"]
    program += ["--repeats", "3", "--compiling", "2", "--out", str(tmp_path)]
    subprocess.run([*program, "--arms", "eager,eager_channels_last,magi_dynamic"], check=True, timeout=580)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    calls = {row["arm"]: row for row in rows if row["case"] == "kl"}
    assert calls.keys() == {"eager", "eager_channels_last", "magi_dynamic"}
    for found in calls.values():
        assert len(found["seconds"]) == 3
        assert found["difference"]["relative"] < 1e-5
        assert found["second_size"]["difference"]["relative"] < 1e-5
    compilations = [row for row in rows if row["case"] == "kl_compile_together"]
    assert [row["arm"] for row in compilations] == ["magi_dynamic"]
    assert (compilations[0]["compiled_beside"], len(compilations[0]["cold_seconds"])) == (2, 2)
    assert compilations[0]["graphs"] == calls["magi_dynamic"]["graphs_after_second_size"] == 1
