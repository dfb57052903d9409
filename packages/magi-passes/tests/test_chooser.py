# SPDX-License-Identifier: Apache-2.0
"""What the chooser makes of a graph, by its cost model and by measuring."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout
from made_passes import calls, pretend_cuda, trace
from magi_passes import (
    ConvChooser,
    ConvLayoutPass,
    PassContext,
    PassPipeline,
    TemporalConvPass,
    _torch_compat,
    collect_records,
)
from magi_passes import _choose as tuning
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.nn.functional import group_norm


def _video(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.conv3d(torch.nn.functional.pad(x, (1, 1, 1, 1, 2, 0)), w)


def _image(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.conv2d(group_norm(x, 2), w)


VIDEO = torch.ones(1, 64, 3, 16, 16), torch.ones(128, 64, 3, 3, 3)
IMAGE = torch.ones(1, 64, 16, 16), torch.ones(128, 64, 3, 3)
TILES = "NDTilingWorkaroundPass"


def _products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.conv2d(x, w).flatten(1)
    return y @ y.T @ y @ y.T


PRODUCTS = torch.ones(64, 1, 16, 16), torch.ones(1, 1, 3, 3)
ALL = "ConvPaddingPass + TemporalConvPass + ForceChannelsLastPass + " + TILES


@pytest.mark.parametrize(
    ("fn", "tensors", "dims", "chooser", "context", "plan"),
    [
        (_video, VIDEO, (3, 4), {}, {}, ALL),
        (_video, VIDEO, (), {}, {}, ALL),
        (_video, VIDEO, (3, 4), {"nd_tiling": False}, {}, ALL.removesuffix(" + " + TILES)),
        (_video, VIDEO, (3, 4), {"layout": False}, {}, "ConvPaddingPass + TemporalConvPass + " + TILES),
        (_video, VIDEO, (3, 4), {"temporal": False}, {}, "ConvPaddingPass + ConvLayoutPass + " + TILES),
        (_video, VIDEO, (3, 4), {"temporal": False, "layout": False}, {}, "ConvPaddingPass + " + TILES),
        (_video, VIDEO, (3, 4), {}, {"off": "TemporalConvPass,ForceChannelsLastPass"}, "ConvPaddingPass + " + TILES),
        (_image, IMAGE, (2, 3), {}, {}, "ConvLayoutPass + " + TILES),
        (_image, IMAGE, (), {}, {}, None),
        (_image, IMAGE, (2, 3), {"layout": False}, {}, None),
        (_image, IMAGE, (2, 3), {"layout": False}, {"torch_version": "2.10.0"}, TILES),
        (_image, IMAGE, (2, 3), {"layout": False, "nd_tiling": False}, {"torch_version": "2.10.0"}, None),
        (_products, PRODUCTS, (), {}, {}, None),
    ],
)
def test_the_cost_model(
    monkeypatch: pytest.MonkeyPatch, fn: Any, tensors: Any, dims: Any, chooser: Any, context: Any, plan: str | None
) -> None:
    context = {"torch_version": "2.13.0", **context}
    monkeypatch.setenv("MAGI_PASSES_DISABLE", context.pop("off", ""))
    graph = pretend_cuda(trace(fn, tensors, dims)).graph
    verdict = ConvChooser(**chooser).is_applicable(graph, PassContext(**context))
    share, found = ("4%", "") if fn is _products else ("100%", f": {plan or 'nothing to gain'}")
    assert verdict.text == f"{share} of the arithmetic is in convolutions{found}"
    assert verdict.applies is (plan is not None)


def test_the_chosen_passes_run(inductor: Any) -> None:
    gm = pretend_cuda(trace(_video, VIDEO, (3, 4)))
    with PassPipeline([]).scope():
        ConvChooser()(gm.graph)
        assert inductor.force_layout_optimization is True
        assert (inductor.triton.prefer_nd_tiling, inductor.triton.max_tiles) == (True, 3)
    assert [node.meta["val"].dim() for node in calls(gm, torch.ops.aten.convolution.default)] == [4, 4, 4]


@pytest.mark.parametrize("tune", [False, True])
def test_a_graph_without_convolutions_gets_the_code_of_stock(inductor: Any, tmp_path: Path, tune: bool) -> None:
    weight = torch.randn(32, 32)

    def block(x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, (32,)) @ weight)

    def code(options: dict[str, Any] | None) -> str:
        torch._dynamo.reset()
        x = torch.randn(1, 24, 32)
        torch._dynamo.mark_dynamic(x, 1)
        with fresh_cache(), torch.no_grad():
            (text,) = run_and_get_code(torch.compile(block, options=options), x)[1]
        return re.sub(r"AOT ID: .*|/\S+", "", text)

    chooser = ConvChooser(tune=tune, cache_dir=str(tmp_path))
    assert code(PassPipeline([chooser]).inductor_options()) == code(None)
    assert not list(tmp_path.iterdir())


def test_a_graph_with_collectives_is_not_tuned(tmp_path: Path) -> None:
    gm = pretend_cuda(trace(_video, VIDEO, (3, 4)))
    planned = ConvChooser().is_applicable(gm.graph, PassContext())
    with gm.graph.inserting_before(gm.graph.find_nodes(op="output")[0]):
        (convolution, *_) = calls(gm, torch.ops.aten.convolution.default)
        gm.graph.call_function(torch.ops._c10d_functional.all_reduce.default, (convolution, "sum", "0"))
    reason = ConvChooser(tune=True, cache_dir=str(tmp_path)).is_applicable(gm.graph, PassContext())
    assert reason.text == f"{planned.text}; not tuned, because the graph has collectives"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_tuning_measures_remembers_and_changes_nothing_else(inductor: Any, tmp_path: Path) -> None:
    weight = torch.randn(16, 16, 3, 3, 3)

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.conv3d(torch.nn.functional.pad(x, (1, 1, 1, 1, 2, 0)), weight)

    # With dynamic=True the frames become a symbol too, on which torch 2.13 itself fails to lower the padding.
    x = torch.randn(1, 16, 3, 10, 12)
    torch._dynamo.mark_dynamic(x, [3, 4])
    options = PassPipeline([ConvChooser(tune=True, cache_dir=str(tmp_path))]).inductor_options()
    texts = []
    for _ in range(2):
        torch._dynamo.reset()
        with collect_records() as records, fresh_cache(), torch.no_grad():
            compiled = torch.compile(model, options=options)
            torch.testing.assert_close(compiled(x), model(x))
        texts.append([record.reason for record in records if record.pass_name == "ConvChooser"])
    (remembered,) = tmp_path.glob("*.json")
    assert texts[0] == texts[1]
    assert "stock" in json.loads(remembered.read_text())
    assert texts[0][0].startswith("tuned: ")


def test_no_two_processes_measure_on_a_device_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_compat.config, "shared_folder", lambda: str(tmp_path))
    order: list[str] = []
    other = FileLock(tmp_path / "magi_passes" / "cpu.lock")

    def measure() -> None:
        with tuning.alone_on({torch.device("cpu")}), pytest.raises(Timeout):
            other.acquire(timeout=0)
        order.append("ours")

    with ThreadPoolExecutor(1) as threads:
        threads.submit(measure).result()
        with other:
            waiting = threads.submit(measure)
            time.sleep(0.2)
            order.append("theirs")
        waiting.result()
    assert order == ["ours", "theirs", "ours"]


def test_a_folder_that_cannot_hold_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(_torch_compat.config, "shared_folder", lambda: str(tmp_path / "file"))
    with tuning.alone_on({torch.device("cpu")}):
        pass
    assert "other processes may measure at the same time" in caplog.text


def _empty_graph() -> torch.fx.Graph:
    return torch.fx.GraphModule({}, torch.fx.Graph()).graph


def test_a_candidate_that_fails_is_left_out(
    inductor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_graph(module: Any, inputs: Any, options: Any, is_backward: bool) -> Any:
        if not options:
            raise RuntimeError("no such kernel")
        return lambda arguments: fails_late() if "layout" in str(options).lower() else None

    def fails_late() -> None:
        raise ValueError("too many warps")

    monkeypatch.setattr(_torch_compat.compiling, "compile_graph", compile_graph)
    plans: list[Any] = [(), (ConvLayoutPass(),), (TemporalConvPass(),)]
    plan, text = tuning.choose_fastest(_empty_graph(), PassContext(), plans, str(tmp_path))
    assert plan == plans[2]
    assert text.startswith("tuned: TemporalConv (TemporalConv ")
    assert "stock failed with RuntimeError: no such kernel" in caplog.text
    assert "ConvLayout failed with ValueError: too many warps" in caplog.text
    assert text.endswith(" ms); not measured: stock, ConvLayout")


def test_where_no_candidate_can_be_measured_it_is_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_compiled", lambda *asked: None)
    plan, text = tuning.choose_fastest(_empty_graph(), PassContext(), [(TemporalConvPass(),), ()], str(tmp_path))
    assert (plan, text) == ((), "tuned: stock, because no candidate could be measured")


def test_a_choice_is_remembered_also_beside_the_time_of_another_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, folder = "tuned: stock (TemporalConv 2000.000 ms, stock 1000.000 ms)", tmp_path / "new" / "folder"
    assert _measured_once(monkeypatch, folder) == (text, 2)
    (path,) = folder.iterdir()
    path.write_text(json.dumps({"another": 0.1, **json.loads(path.read_text())}))
    assert _measured_once(monkeypatch, folder) == (text, 0)


FIRST, THIRD = (TemporalConvPass(),), (ConvLayoutPass(),)


@pytest.mark.parametrize(
    ("budget", "compiling", "measured", "chosen"),
    [
        (None, 100.0, "TemporalConv, stock, ConvLayout", THIRD),
        (1000.0, 100.0, "TemporalConv, stock, ConvLayout", THIRD),
        (300.0, 100.0, "TemporalConv, stock, ConvLayout", THIRD),
        (299.0, 100.0, "TemporalConv, stock", FIRST),
        (199.0, 100.0, "TemporalConv", FIRST),
        (1.0, 100.0, "TemporalConv", FIRST),
    ],
)
def test_a_budget_ends_the_search_before_a_candidate_that_would_exceed_it(
    budget: float | None,
    compiling: float,
    measured: str,
    chosen: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    takes = {"TemporalConv": 2.0, "stock": 3.0, "ConvLayout": 1.0}
    calls: list[str] = []

    def compiled(graph: Any, context: Any, name: str, plan: Any) -> Any:
        clock[0] += compiling

        def run(arguments: list[Any]) -> None:
            calls.append(name)
            clock[0] += takes[name]

        return run

    monkeypatch.setattr(tuning, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(tuning, "_compiled", compiled)
    for again in (False, True):
        plan, text = tuning.choose_fastest(_empty_graph(), PassContext(), [FIRST, (), THIRD], str(tmp_path), budget)
        assert plan == chosen
        times = ", ".join(f"{name} {1e3 * takes[name]:.3f} ms" for name in measured.split(", "))
        missing = ", ".join(name for name in takes if name not in measured)
        left_out = f"; not measured within {budget:g} s: {missing}" if missing else ""
        assert text == f"tuned: {tuning.plan_name(chosen)} ({times}){left_out}"
        # The second time they come from disk.
        rounds = 2 if budget in (300.0, 1.0) else 2 + tuning.ROUNDS
        assert len(calls) == len(measured.split(", ")) * rounds, again
    tuning.choose_fastest(_empty_graph(), PassContext(), [FIRST, (), THIRD], str(tmp_path), 5000.0)
    assert set(calls[-3:]) == set(takes), "another budget measures again"


def test_the_plan_of_the_cost_model_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = pretend_cuda(trace(_video, VIDEO, (3, 4))).graph
    asked: list[Any] = []

    def chosen(graph: Any, context: Any, plans: Any, *rest: Any) -> Any:
        asked.append((plans, *rest))
        return (), "tuned"

    monkeypatch.setattr(tuning, "choose_fastest", chosen)
    planned = (ConvLayoutPass(),)
    monkeypatch.setattr(ConvChooser, "_planned", lambda *_: planned)
    ConvChooser(tune=True, tune_seconds=300).is_applicable(graph, PassContext())
    ((plans, cache_dir, budget),) = asked
    assert plans[:2] == [planned, ()]
    assert (cache_dir, budget) == (None, 300)


@pytest.mark.parametrize("place", ["compilation", "run"])
def test_an_interrupt_while_tuning_arrives_as_itself(
    inductor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def stop(*args: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        _torch_compat.compiling, "compile_graph", stop if place == "compilation" else lambda *args: stop
    )
    with pytest.raises(KeyboardInterrupt):
        tuning.choose_fastest(_empty_graph(), PassContext(), [()], str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_candidates_take_turns_and_the_least_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    order: list[str] = []

    def takes(name: str, seconds: float) -> Any:
        def run(arguments: list[Any]) -> None:
            order.append(name)
            # Every second call of either meets a machine three times as slow.
            clock[0] += seconds * (3 if order.count(name) % 2 else 1)

        return run

    monkeypatch.setattr(tuning, "perf_counter", lambda: clock[0])
    found = tuning.seconds_of_a_call({"slow": takes("slow", 1.0), "fast": takes("fast", 0.75)}, [torch.ones(2)])
    assert found == {"slow": 1.0, "fast": 0.75}
    assert order == ["slow", "fast"] * (2 + tuning.ROUNDS)


def _measured_once(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> tuple[str, int]:
    """What is chosen when stock takes one second, and how many plans had to be measured for that."""
    measured: list[str] = []

    def seconds(runs: dict[str, Any], *_: Any) -> dict[str, float]:
        measured.extend(runs)
        return {name: 1.0 if name == "stock" else 2.0 for name in runs}

    with monkeypatch.context() as patch:
        patch.setattr(tuning, "_compiled", lambda *asked: asked)
        patch.setattr(tuning, "seconds_of_a_call", seconds)
        plans: list[Any] = [(TemporalConvPass(),), ()]
        plan, text = tuning.choose_fastest(torch.fx.Graph(), PassContext(), plans, str(cache_dir))
    assert plan == ()
    return text, len(measured)


@pytest.mark.parametrize("broken", ["", "{", "[1, 2]", '{"stock": "fast"}', '{"stock": null}', "7", "\0", "folder"])
def test_a_file_that_cannot_be_read_is_measured_again(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text, _ = _measured_once(monkeypatch, tmp_path)
    (path,) = tmp_path.iterdir()
    if broken == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_text(broken)
    assert _measured_once(monkeypatch, tmp_path) == (text, 2)
    assert f"{path} cannot be read, and the plans are measured again" in caplog.text
    if broken != "folder":
        assert _measured_once(monkeypatch, tmp_path) == (text, 0)


def test_a_folder_that_cannot_be_written_only_costs_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert _measured_once(monkeypatch, tmp_path / "file" / "below")[1] == 2
    assert caplog.text.count("the choice is not remembered, and the next process measures again") == 2


def test_a_full_disk_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = Path.write_text

    def half(self: Path, text: str, *args: Any, **kwargs: Any) -> int:
        real(self, text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        assert _measured_once(monkeypatch, tmp_path)[1] == 2
    assert "No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []
    assert [_measured_once(monkeypatch, tmp_path)[1] for _ in range(2)] == [2, 0]
