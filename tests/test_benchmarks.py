# SPDX-License-Identifier: Apache-2.0
"""The benchmarks measure what they say, notice wrong results and failed arms, and say so in their ratios."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import decoder_fragments
import diffusers
import dynamic_decode
import libraries
import pytest
import real_decoders
import torch
import wide
from _arms import arm_named, pipeline_options
from _difference import Difference, WrongResultError, difference, judged
from _fragment_calls import CALLS, arguments, build, class_of
from _fragments import DIFFUSERS, FRAGMENTS
from _library_scan import needs
from _python import python
from _ratios import ratios
from _real_models import MODELS, compiled_part, decode, denoise, without_the_break
from _rows import joined
from _told import measure_as_told, row
from _workers import Job, Limits, Row, measured
from torch import Tensor


HERE = Path(__file__).parent


def measured_by(name: str, *arguments: str, out: Path, seconds: int = 580) -> tuple[list[Row], str]:
    """The rows that benchmarks/*name*.py writes into *out*, with what it prints."""
    program = HERE.parent / "benchmarks" / f"{name}.py"
    printed = python(program, "--tiny", *arguments, "--out", out, seconds=seconds)
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()], printed


# Each program: the case that is measured, its arms, further arguments, and a ratio that it prints.
MEASURED = {
    "decoder_fragments": (
        "kl_downsample",
        "stock_dynamic,magi_dynamic",
        "--only kl_downsample --compiling 2 --code",
        "fragments_worst_vs_stock_dynamic_speedup",
    ),
    "dynamic_decode": ("plain_540p", "eager,magi", "--model plain --together", ""),
    "real_decoders": ("kl", "eager,eager_channels_last,magi_dynamic", "--model kl --compiling 2", ""),
    "card": ("SanaTransformer2DModel", "stock_dynamic,magi_dynamic", "--only SanaTransformer2DModel --compiling 2", ""),
    "libraries": (
        "liger_softmax_tiny",
        "eager,opaque,seen_through",
        "--only liger_softmax --compiling 1 --compile-seconds 400",
        "liger_softmax_tiny_vs_opaque_speedup",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_the_program_compiles_compares_and_times(name: str, tmp_path: Path) -> None:
    case, arms, more, ratio = MEASURED[name]
    if name == "libraries":
        needs("liger-kernel", "fla-core")
    how = ["--arms", arms, "--repeats", "3", *more.split()]
    rows, printed = measured_by(name, *how, out=tmp_path)
    together = [one for one in rows if one["case"] == f"{case}_compile_together"]
    found = [one for one in rows if one not in together]

    assert ratio in printed
    assert sorted((one["case"], one["arm"]) for one in found) == sorted((case, arm) for arm in arms.split(","))
    assert [one["arm"][:4] for one in together] == ["magi"] * (name in {"dynamic_decode", "real_decoders"})
    assert all(one["compiled_beside"] >= 1 for one in together)
    for one in found:
        assert one.get("fell_back", []) == []
        assert len(one["seconds"]) == 3
        compared = [one.get("difference"), one.get("second_difference"), one.get("second_size", {}).get("difference")]
        errors = [one.get("relative_error", 0.0), *(each["relative"] for each in compared if each is not None)]
        assert max(errors) < 1e-5
        assert len(errors) >= 2 or name == "dynamic_decode"
        if not one["arm"].startswith("eager"):
            assert one.get("graphs_after_second_size", one.get("graphs", 1)) == 1
    if name == "decoder_fragments":  # rows of an earlier run are not measured again
        again, _ = measured_by(name, *how, "--rows", str(tmp_path / "rows.jsonl"), out=tmp_path / "again")
        assert (tmp_path / "code.zip").exists()
        assert again == rows


@pytest.mark.parametrize("program", [decoder_fragments, dynamic_decode, libraries, real_decoders, wide])
def test_what_processes_load_before_they_are_forked_exists(program: Any) -> None:
    # The server of multiprocessing passes over a module that it cannot import.
    for name in program.PRELOAD:
        importlib.import_module(name)


def test_a_case_that_fails_dies_or_hangs_leaves_the_others_their_rows(tmp_path: Path) -> None:
    jobs = [Job("case", what, measure_as_told, (what,)) for what in ("works", "fails", "dies", "hangs")]
    limits = Limits(compiling=2, living=8, compile_seconds=60, step_seconds=5, repeats=3)
    found = {worker.job.arm: rows[0] for worker, rows in measured([jobs], limits, tmp_path, ["_workers"])}
    assert found["works"]["seconds"] == [1.0, 1.0, 1.0]
    reasons = {what: found[what]["reason"] for what in ("fails", "dies", "hangs") if not found[what]["seconds"]}
    assert reasons == {
        "fails": "ValueError: no such thing",
        "dies": "the process ended, code 3",
        "hangs": "nothing for 5 s",
    }


def test_arms_and_passes_by_name() -> None:
    assert arm_named("stock_static").dynamic is False
    tiled = arm_named("stock_dynamic:triton.max_tiles=2+triton.prefer_nd_tiling=true")
    assert (tiled.backend, tiled.dynamic) == ("inductor", True)
    assert tiled.options == {"triton.max_tiles": 2, "triton.prefer_nd_tiling": True}
    tuned = arm_named("magi_tuned:magi.progress=false")
    assert tuned.options == {"magi.tune": True, "magi.tune_seconds": 60, "magi.progress": False}
    assert arm_named("passes_static:layout+nd2").passes == ("layout", "nd2")
    with pytest.raises(ValueError, match="no arm 'stock'; there are eager, "):
        arm_named("stock")
    rewrites = ("zero_pads", "padding", "few_channels", "wide_heads", "temporal", "temporal_all_frames", "moments")
    assert pipeline_options(("chooser", *rewrites, "layout", "nd2", "nd3"))
    with pytest.raises(KeyError, match="layuot"):
        pipeline_options(("layuot",))


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


@pytest.mark.parametrize("name", FRAGMENTS)
def test_each_fragment_is_a_class_at_its_line_and_runs_at_two_sizes(name: str) -> None:
    fragment = FRAGMENTS[name]
    assert diffusers.__version__ == DIFFUSERS
    assert hasattr(diffusers, fragment.model)
    assert inspect.getsourcelines(class_of(fragment))[1] == fragment.line
    assert fragment.sizes.keys() <= fragment.tiny.keys()
    module = build(fragment, tiny=True).eval()
    with torch.no_grad():
        first, second = (
            module(*arguments(fragment, tiny=True, second=second, device="cpu", dtype=torch.float32))
            for second in (False, True)
        )
    first, second = (out if isinstance(out, tuple) else (out,) for out in (first, second))
    assert all(bool(x.isfinite().all()) for x in first)
    assert first[0].shape != second[0].shape


@pytest.mark.parametrize("name", ["wan_half", "wan_upsample_in_time"])
@pytest.mark.parametrize("frames", [1, 2, 4])
def test_a_fragment_with_a_cache_is_what_the_model_does(name: str, frames: int) -> None:
    x, cache = torch.randn(1, 8, frames, 6, 7), torch.randn(1, 8, 2, 6, 7)
    caches: list[Any] = [cache, torch.randn(1, 8, 2, 6, 7)]
    with torch.no_grad():
        if name == "wan_half":  # what the block does first
            module = class_of(FRAGMENTS["wan_half_96"])(8, 8).eval()
            convolved: list[Tensor] = []
            handle = module.conv1.register_forward_hook(lambda _module, _args, out: convolved.append(out))
            module(x, feat_cache=caches, feat_idx=[0])
            handle.remove()
            expected = convolved[0] + x
        else:
            module = class_of(FRAGMENTS[name])(8, "upsample3d").eval()
            expected = module(x, feat_cache=caches, feat_idx=[0])
        out, kept = CALLS[name](module, x, cache)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(kept, caches[0])


def test_upsampling_with_a_shortcut_is_the_end_of_the_block() -> None:
    block = class_of(FRAGMENTS["wan22_upsample_with_shortcut"])(16, 8, num_res_blocks=0, up_flag=True).eval()
    first = torch.randn(1, 16, 2, 6, 7)
    with torch.no_grad():
        out = CALLS["wan22_upsample_with_shortcut"](block, block.resnets[0](first), first)
        torch.testing.assert_close(out, block(first))


def output(model: Any, name: str, *, second: bool = False) -> Tensor:
    given = MODELS[name].arguments("cpu", torch.float32, tiny=True, second=second)
    with torch.no_grad():
        return decode(model, **given) if hasattr(model, "decode") else denoise(model, **given)


@pytest.mark.parametrize("name", MODELS)
def test_each_model_runs_at_two_sizes(name: str) -> None:
    model = MODELS[name].build(tiny=True)
    first, second = output(model, name), output(model, name, second=True)
    assert bool(first.isfinite().all())
    assert bool(second.isfinite().all())
    assert first.shape != second.shape
    assert float(first.std()) > 0
    if name.startswith("wan"):  # the arms that change two lines of it measure the same model
        without_the_break(model)
        torch.testing.assert_close(output(model, name), first, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("wan21", 127e6), ("wan22", 705e6), ("kl", 84e6), ("cogvideox", 216e6), ("unet", 2567e6)],
)
def test_the_configurations_are_those_of_published_models(name: str, parameters: float) -> None:
    with torch.device("meta"):
        model = MODELS[name].build(tiny=False)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(parameters, rel=0.01)
    assert compiled_part(model) is getattr(model, "decoder", model)


# The ratios of published rows are computed again in test_published_results.py; here are those that did not go well.
def of_card(case: str, arm: str, *errors: float, fell_back: tuple[str, ...] = ()) -> Row:
    """A row with the error at the first and at the second size; one that failed has none."""
    found = row(case, f"{arm}_dynamic", *[1.0] * bool(errors)) | {"fell_back": list(fell_back)}
    for which, error in zip(("difference", "second_difference"), errors, strict=False):
        found[which] = {"cosine": 1.0, "relative": error, "largest": error, "output": 0}
    return found


@pytest.mark.parametrize(
    ("stock", "ours", "expected"),
    [
        (of_card("b", "stock"), of_card("b", "magi"), {"classes": 1, "compiled_share": 1.0}),
        (of_card("b", "stock", 0.01, 0.01), of_card("b", "magi"), {"compiled_share": 0.5}),
        (of_card("b", "stock", 0.01, 0.01), of_card("b", "magi", 0.01, 0.3), {"wrong": 1}),
        (of_card("b", "stock", 0.01, 0.01), of_card("b", "magi", float("inf"), 0.01), {"wrong": 1}),
        (of_card("b", "stock", 0.01, 0.01), of_card("b", "magi", 0.01, float("nan")), {"wrong": 1}),
        (
            of_card("b", "stock", 0.01, 0.01),
            of_card("b", "magi", 0.01, 0.01, fell_back=("no pass ran",)),
            {"fell_back": 1},
        ),
    ],
    ids=["stock as well", "failed", "second size", "infinite", "not a number", "fell back"],
)
def test_each_kind_of_failure_on_the_card_shows(stock: Row, ours: Row, expected: dict[str, float]) -> None:
    good = [of_card("a", "stock", 0.01, 0.01), of_card("a", "magi", 0.01, 0.01)]
    usual = {"classes": 2, "compiled_share": 1.0, "wrong": 0, "fell_back": 0}
    assert ratios("card", [*good, stock, ours]) == {**usual, **expected}


def test_a_fragment_a_decode_and_an_op_that_fail_gain_nothing() -> None:
    fragments = [row("a", "stock_dynamic", 4.0, 4.0), row("a", "stock_static", 2.0), row("a", "magi_dynamic", 2.0, 2.0)]
    fragments += [row("b", "stock_dynamic", 3.0), row("b", "magi_dynamic"), row("c", "stock_dynamic", 1.0)]
    found = ratios("decoder_fragments", joined(fragments))
    assert (found["a_vs_stock_dynamic_speedup"], found["b_vs_stock_dynamic_speedup"]) == (2.0, 0.0)
    assert found["fragments_worst_vs_stock_dynamic_speedup"] == 0.0

    decodes = [row("kl", "stock_dynamic", 1.0), {**row("kl", "magi_dynamic"), "reason": "wrong"}]
    assert ratios("real_decoders", decodes) == {"kl_vs_stock_dynamic_speedup": 0.0}
    newer = [
        {**row("wan21", arm, *times), "torch": "2.13.0"}
        for arm, *times in [("stock_dynamic", 6.0), ("magi_dynamic", 2.0)]
    ]
    assert ratios("real_decoders", [*decodes, *newer])["wan21_vs_stock_dynamic_speedup_torch213"] == 3.0

    ran = {"eager": 1.0, "dynamo": 1.0, "opaque": 3.0, "seen_through": 1.0}
    ops = [row("liger_a_small", arm, seconds) for arm, seconds in ran.items()]
    ops += [row("fla_b_small", arm, 1.0) for arm in ("eager", "dynamo", "opaque")]
    found = ratios("libraries", [*ops, {**row("fla_b", "seen_through"), "reason": "wrong"}])
    assert found["fla_b_small_vs_opaque_speedup"] == 0.0
    assert found["libraries_median_vs_opaque_speedup"] == 1.5
