# SPDX-License-Identifier: Apache-2.0
"""The fragments of benchmarks/decoder_fragments.py are what they say, and the program measures them."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from _difference import Difference, WrongResultError, difference, judged
from _fragment_calls import CALLS, arguments, build, class_of
from _fragments import DIFFUSERS, FRAGMENTS
from _ratios import ratios
from _rows import joined
from _told import measure_as_told, row
from _workers import Job, Limits, measured


ROOT = Path(__file__).parents[1]


def outputs(name: str, *, second: bool = False) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    module = build(FRAGMENTS[name], tiny=True).eval()
    given = arguments(FRAGMENTS[name], tiny=True, second=second, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        out = module(*given)
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("name", FRAGMENTS)
def test_each_is_a_class_at_its_line_and_runs_at_two_sizes(name: str) -> None:
    fragment = FRAGMENTS[name]
    assert diffusers.__version__ == DIFFUSERS
    assert hasattr(diffusers, fragment.model)
    assert inspect.getsourcelines(class_of(fragment))[1] == fragment.line
    assert fragment.sizes.keys() <= fragment.tiny.keys()
    first, second = outputs(name), outputs(name, second=True)
    assert all(bool(x.isfinite().all()) for x in first)
    assert first[0].shape != second[0].shape


def test_the_list_covers_what_real_decoders_have() -> None:
    fragments = FRAGMENTS.values()
    assert len(fragments) >= 22
    assert len({fragment.model for fragment in fragments}) >= 8
    assert {"contiguous", "channels_last", "frames_first"} == {
        argument.layout for fragment in fragments for argument in fragment.arguments
    }
    assert len({fragment.symbolic for fragment in fragments}) == 2
    # The three sizes of one block, without which the figures say nothing about the block that was slower than stock.
    sizes = [FRAGMENTS[f"wan_half_{width}"].sizes for width in (96, 384, 192)]
    assert [(s["C"], s["T"], s["H"], s["W"]) for s in sizes] == [
        (96, 4, 544, 960),
        (384, 1, 136, 240),
        (192, 2, 272, 480),
    ]


def test_half_a_wan_block_is_what_the_block_does_first() -> None:
    block = class_of(FRAGMENTS["wan_half_96"])(8, 8).eval()
    for frames in (1, 2, 4):
        x, cache = torch.randn(1, 8, frames, 6, 7), torch.randn(1, 8, 2, 6, 7)
        convolved: list[torch.Tensor] = []
        handle = block.conv1.register_forward_hook(lambda _module, _args, out, kept=convolved: kept.append(out))
        caches = [cache, torch.randn(1, 8, 2, 6, 7)]
        with torch.no_grad():
            block(x, feat_cache=caches, feat_idx=[0])
            handle.remove()
            out, kept = CALLS["wan_half"](block, x, cache)
        torch.testing.assert_close(out, convolved[0] + x)
        torch.testing.assert_close(kept, caches[0])


def test_upsampling_in_time_is_what_the_model_does_with_a_cache() -> None:
    module = class_of(FRAGMENTS["wan_upsample_in_time"])(8, "upsample3d").eval()
    for frames in (1, 2):
        x, cache = torch.randn(1, 8, frames, 6, 7), torch.randn(1, 8, 2, 6, 7)
        caches: list[Any] = [cache]
        with torch.no_grad():
            expected = module(x, feat_cache=caches, feat_idx=[0])
            out, kept = CALLS["wan_upsample_in_time"](module, x, cache)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(kept, caches[0])


def test_upsampling_with_a_shortcut_is_the_end_of_the_block() -> None:
    block = class_of(FRAGMENTS["wan22_upsample_with_shortcut"])(16, 8, num_res_blocks=0, up_flag=True).eval()
    first = torch.randn(1, 16, 2, 6, 7)
    with torch.no_grad():
        out = CALLS["wan22_upsample_with_shortcut"](block, block.resnets[0](first), first)
        torch.testing.assert_close(out, block(first))


def test_a_wrong_border_a_wrong_element_and_nan_are_too_far() -> None:
    reference = torch.randn(1, 4, 3, 64, 64)
    eager = difference(reference.bfloat16(), reference)
    judged(difference(reference.bfloat16() * 1.0001, reference), eager, "rounding")
    border, element, nan = (reference.bfloat16() for _ in range(3))
    border[..., 0, :] *= 2
    element[0, 0, 0, 5, 5] += 3
    nan[0, 0, 0, 0, 0] = float("nan")
    for wrong in (border, element, nan):
        with pytest.raises(WrongResultError, match="the block: "):
            judged(difference(wrong, reference), eager, "the block")
    with pytest.raises(WrongResultError, match="outputs of shapes"):
        difference(reference[..., :-1], reference)
    assert Difference(1.0, float("nan"), 0.0).too_far(eager)
    assert difference((reference, border), (reference, reference)).output == 1


def test_ratios_of_fragments_count_one_that_failed() -> None:
    rows = [row("a", "stock_dynamic", 4.0, 4.0), row("a", "stock_static", 2.0), row("a", "magi_dynamic", 2.0, 2.0)]
    rows += [row("b", "stock_dynamic", 3.0), row("b", "magi_dynamic", 3.0), row("c", "stock_dynamic", 1.0)]
    found = ratios("decoder_fragments", rows)
    assert found["a_vs_stock_dynamic_speedup"] == 2.0
    assert found["fragments_worst_vs_stock_dynamic_speedup"] == 1.0
    assert found["fragments_median_vs_stock_dynamic_speedup"] == 1.5
    assert found["fragments_median_vs_stock_static_speedup"] == 1.0
    failed = ratios("decoder_fragments", joined([*rows, row("b", "magi_dynamic")]))
    assert failed["b_vs_stock_dynamic_speedup"] == failed["fragments_worst_vs_stock_dynamic_speedup"] == 0.0


def test_a_case_that_fails_dies_or_hangs_leaves_the_others_their_rows(tmp_path: Path) -> None:
    jobs = [Job("case", what, measure_as_told, (what,)) for what in ("works", "fails", "dies", "hangs")]
    limits = Limits(compiling=2, living=8, compile_seconds=60, step_seconds=5, repeats=3)
    found = {worker.job.arm: rows[0] for worker, rows in measured([jobs], limits, tmp_path, ["_workers"])}
    assert found["works"]["seconds"] == [1.0, 1.0, 1.0]
    assert found["fails"]["reason"] == "ValueError: no such thing"
    assert found["dies"]["reason"] == "the process ended, code 3"
    assert found["hangs"]["reason"] == "nothing for 5 s"
    assert not any(found[what]["seconds"] for what in ("fails", "dies", "hangs"))


@pytest.mark.slow
def test_the_program_compiles_compares_times_and_goes_on(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "benchmarks" / "decoder_fragments.py"), "--tiny", "--only", "kl_downsample"]
    program += ["--repeats", "3", "--compiling", "2", "--code"]
    first = tmp_path / "first"
    subprocess.run([*program, "--arms", "stock_dynamic,magi_dynamic", "--out", str(first)], check=True, timeout=500)
    rows = [json.loads(line) for line in (first / "rows.jsonl").read_text().splitlines()]
    assert [one["arm"] for one in rows] == ["stock_dynamic", "magi_dynamic"]
    for one in rows:
        assert len(one["seconds"]) == 3
        assert one["graphs"] == one["graphs_after_second_size"] == 1
        assert one["difference"]["relative"] < 1e-5
        assert one["commit"]
    assert (first / "code.zip").exists()
    again = [*program, "--arms", "stock_dynamic,magi_dynamic", "--rows", str(first / "rows.jsonl")]
    ran = subprocess.run(
        [*again, "--out", str(tmp_path / "second")], check=True, timeout=500, capture_output=True, text=True
    )
    assert "fragments_worst_vs_stock_dynamic_speedup" in ran.stdout
    assert (tmp_path / "second" / "rows.jsonl").read_text() == (first / "rows.jsonl").read_text()
